"""The section `auth.jwt`: identity providers whose access tokens are accepted as API keys."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from app.settings.identity_provider import CLAIM, ProviderSettings, check_url


class JwtSettings(ProviderSettings):
    """One identity provider, and what its access tokens may do here."""

    audience: str = Field(
        min_length=1, description="Audience that tokens must name (aud), alone or among others."
    )
    jwks_uri: str | None = Field(
        None,
        description="URL of the provider's public keys. Default: found below the issuer, by OpenID "
        "Connect Discovery.",
    )
    jwks_token_file: Path | None = Field(
        None,
        description="File with a Bearer token that is sent with requests for the keys, read each "
        "time, as the API server of Kubernetes asks for. Default: none.",
    )
    owner_claim: str | None = Field(
        None, min_length=1, description=f"Claim with the owner. {CLAIM} Default: no owner."
    )
    models_claim: str | None = Field(
        None,
        min_length=1,
        description=f"Claim with the list of models, in place of `models`. {CLAIM}",
    )
    role_claim: str | None = Field(
        None,
        min_length=1,
        description=f"Claim with a name or a list of names for `roles`. {CLAIM}",
    )
    roles: dict[str, Literal["owner_manager", "operator", "auditor", "manager", "admin"]] = Field(
        {},
        description="Roles by a name in role_claim; of several, the one that is last in this order "
        "counts: owner_manager (needs owner_claim), operator (needs models or models_claim), "
        "auditor, manager, admin. Every other caller is a client.",
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

    @field_validator("jwks_uri")
    @classmethod
    def _check_jwks_uri(cls, url: str | None) -> str | None:
        return None if url is None else check_url(url)
