"""The section `console.oidc`: sign-in to the console by OpenID Connect."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from app.settings.identity_provider import CLAIM, ProviderSettings
from app.settings.limits import LimitSettings
from engines.spec import SpecModel


class OwnKeysSettings(SpecModel):
    """Keys that people make for themselves, and their bounds."""

    max_keys: int = Field(5, ge=1, le=100, description="Keys that a person may have at once.")
    max_days: int = Field(
        90, ge=1, le=3650, description="Longest time until such a key expires, in days."
    )
    limits: LimitSettings | None = Field(
        None, description="Limits of each such key. Default: limits.default."
    )
    monthly_tokens: int | None = Field(
        None,
        ge=0,
        le=10**15,
        description="Most tokens a month of each such key; people may choose fewer. Default: no "
        "budget.",
    )


class OidcSettings(ProviderSettings):
    """An identity provider whose people sign in to the console."""

    name: str = Field(
        "sso",
        pattern=r"^[a-z][a-z0-9-]{0,15}$",
        description="Begins the IDs of people in logs and reports, such as sso:alice.",
    )
    client_id: str = Field(min_length=1, description="ID of the console at the provider.")
    client_secret_env: str | None = Field(
        None,
        description="Environment variable with the secret of the client. Default: the console is a "
        "public client, protected by PKCE alone.",
    )
    scopes: tuple[str, ...] = Field(
        ("openid", "profile"), description="Scopes that are asked for; openid is always among them."
    )
    role_claim: str = Field(
        min_length=1, description=f"Claim with a name or a list of names for `roles`. {CLAIM}"
    )
    roles: dict[
        str, Literal["client", "owner_manager", "operator", "auditor", "manager", "admin"]
    ] = Field(
        min_length=1,
        description="Roles by a name in role_claim; of several, the one that is last in this order "
        "counts: client, owner_manager (needs owner_claim), operator (needs models), auditor, "
        "manager, admin. Everyone else is refused.",
    )
    owner_claim: str | None = Field(
        None,
        min_length=1,
        description=f"Claim with the owner. {CLAIM} Default: each person is an owner, by their ID.",
    )
    session_hours: float = Field(
        8.0, gt=0, le=168, description="Time after which people have to sign in again, in hours."
    )

    own_keys: OwnKeysSettings | None = Field(
        None, description="Let people make keys for themselves. Default: they cannot."
    )

    @field_validator("scopes")
    @classmethod
    def _add_openid(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        if any(not one or not one.isascii() or len(one.split()) != 1 for one in scopes):
            raise ValueError("must be names without spaces")
        return scopes if "openid" in scopes else ("openid", *scopes)

    @model_validator(mode="after")
    def _check_scopes(self) -> "OidcSettings":
        roles = self.roles.values()
        if "owner_manager" in roles and self.owner_claim is None:
            raise ValueError("roles: an owner_manager needs owner_claim, the owner of its keys")
        if "operator" in roles and "models" not in self.model_fields_set:
            raise ValueError("roles: an operator needs models, those that it operates")
        return self
