"""An identity provider: what `auth.jwt` and `console.oidc` have in common."""

from decimal import Decimal
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator

from app.money import MAX_AMOUNT, parse_amount
from app.settings.limits import LimitSettings
from engines.spec import SpecModel

# Signatures with a private key only: a provider's public keys can make none of its tokens.
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
# The claim with the address, by its name and by a path.
EMAIL_CLAIM = frozenset({"email", "/email"})
CLAIM = "A name, or a path such as /kubernetes.io/namespace."


CostBudget = Annotated[
    Decimal,
    BeforeValidator(
        parse_amount, json_schema_input_type=Annotated[float, Field(ge=0, le=MAX_AMOUNT)]
    ),
]


class ProviderSettings(SpecModel):
    """A provider, its keys, and what its subjects may use."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]{0,15}$",
        description="Begins the IDs of its callers in logs and reports, such as sso:alice.",
    )
    issuer: str = Field(description="Issuer of the tokens (iss), exactly as they name it.")
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256"), min_length=1, description="Algorithms of accepted signatures."
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with the authorities that the provider's certificate may be of. "
        "Default: those of the system.",
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
        f"{CLAIM}",
    )
    models: tuple[str, ...] = Field(
        ("*",), description="Models that callers may use: names, or prefix*."
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
    daily_cost: CostBudget | None = Field(
        None, description="Money a day of each caller, in usage.currency. Default: no budget."
    )
    monthly_cost: CostBudget | None = Field(
        None, description="Money a month of each caller, in usage.currency. Default: no budget."
    )

    @field_validator("issuer")
    @classmethod
    def _check_issuer(cls, url: str) -> str:
        return check_url(url)

    @field_validator("subject_claim")
    @classmethod
    def _check_subject_claim(cls, claim: str) -> str:
        # Providers vouch only for `sub` to be unique (OpenID Connect Core, section 5.7).
        if claim in EMAIL_CLAIM:
            raise ValueError("two people can have one e-mail address: use sub, the default")
        return claim


def check_url(url: str) -> str:
    """Return a URL. Raises ValueError for one that is not fetched safely."""
    if not is_fetched_safely(url):
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
