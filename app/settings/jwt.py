"""The section `auth.jwt`: identity providers whose access tokens are accepted as API keys."""

from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from app.settings.limits import LimitSettings
from engines.spec import SpecModel

# Signatures with a private key only: a provider's public keys can make none of its tokens.
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
_CLAIM = "A name, or a path such as /kubernetes.io/namespace."


class JwtSettings(SpecModel):
    """One identity provider, and what its access tokens may do here."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]{0,15}$",
        description="Begins the IDs of its callers in logs and reports, such as sso:alice.",
    )
    issuer: str = Field(description="Issuer of the tokens (iss), exactly as they name it.")
    audience: str = Field(
        min_length=1, description="Audience that tokens must name (aud), alone or among others."
    )
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256"), min_length=1, description="Algorithms of accepted signatures."
    )
    jwks_uri: str | None = Field(
        None,
        description="URL of the provider's public keys. Default: found below the issuer, by OpenID "
        "Connect Discovery.",
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with the authorities that the provider's certificate may be of. "
        "Default: those of the system.",
    )
    jwks_token_file: Path | None = Field(
        None,
        description="File with a Bearer token that is sent with requests for the keys, read each "
        "time, as the API server of Kubernetes asks for. Default: none.",
    )
    leeway_s: float = Field(
        30.0,
        ge=0,
        le=300,
        description="Difference of clocks that is tolerated for exp, nbf and iat, in seconds.",
    )
    subject_claim: str = Field(
        "sub",
        min_length=1,
        description="Claim that names the caller, whose limits, usage and isolation are its own. "
        f"{_CLAIM}",
    )
    owner_claim: str | None = Field(
        None, min_length=1, description=f"Claim with the owner. {_CLAIM} Default: no owner."
    )
    models: tuple[str, ...] = Field(
        ("*",), description="Models that tokens may use: names, or prefix*."
    )
    models_claim: str | None = Field(
        None,
        min_length=1,
        description=f"Claim with the list of models, in place of `models`. {_CLAIM}",
    )
    role_claim: str | None = Field(
        None,
        min_length=1,
        description=f"Claim with a name or a list of names for `roles`. {_CLAIM}",
    )
    roles: dict[str, Literal["owner_manager", "operator", "auditor", "manager", "admin"]] = Field(
        {},
        description="Roles by a name in role_claim; of several, the one that is last in this order "
        "counts: owner_manager (needs owner_claim), operator (needs models or models_claim), "
        "auditor, manager, admin. Every other caller is a client.",
    )
    limits: LimitSettings | None = Field(
        None, description="Limits of each caller. Default: limits.default."
    )
    daily_tokens: int | None = Field(
        None, ge=0, description="Tokens a day of each caller. Default: no budget."
    )
    monthly_tokens: int | None = Field(
        None, ge=0, description="Tokens a month of each caller. Default: no budget."
    )

    @model_validator(mode="after")
    def _check_scopes(self) -> Self:
        roles = self.roles.values()
        if "owner_manager" in roles and self.owner_claim is None:
            raise ValueError("roles: an owner_manager needs owner_claim, the owner of its keys")
        given = {"models", "models_claim"} & self.model_fields_set
        if "operator" in roles and not given:
            raise ValueError("roles: an operator needs models or models_claim, those it operates")
        return self

    @field_validator("issuer", "jwks_uri")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not is_fetched_safely(url):
            raise ValueError("must be an https:// URL; http:// is for this machine only")
        return url


def is_fetched_safely(url: str) -> bool:
    """Return whether a URL is fetched over TLS or from this machine, so that no proxy alters it."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme == "http":
        return host == "localhost" or _is_loopback(host)
    return parts.scheme == "https" and bool(host)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
