"""Keys as the admin API and the command line show them, without secrets and digests.

Times are RFC 3339.
"""

from dataclasses import asdict
from typing import Self

from pydantic import BaseModel, Field

from app.auth.key_format import NewKey
from app.auth.keys import ApiKey, Page, wall_ms
from app.auth.principal import Role
from app.auth.validation import written
from app.money import amount_of
from app.settings import NO_LIMITS, FieldSettings, LimitSettings

# What of a shown key is no setting of it.
_NO_SETTINGS = {"id", "created", "changed_by", "last_used", "limits_in_force"}


class ShownKey(BaseModel):
    id: str
    name: str
    owner: str
    role: Role
    models: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    daily_tokens: int | None
    monthly_tokens: int | None
    daily_cost: float | None = Field(description="In the currency of usage.currency.")
    monthly_cost: float | None
    priority: int
    weight: int
    max_wait_s: int | None
    fields: FieldSettings | None
    may_load_models: bool
    disabled: bool
    created: str
    changed_by: str | None = Field(
        description="Who made the last change, or that of its owner: the ID of an admin key, or "
        "`user@host` of a command; null: unknown."
    )
    expires: str | None
    last_used: str | None = Field(description="Up to a minute late.")
    limits_in_force: LimitSettings | None = Field(
        description="The key's own limits, else those of the configuration; null for keys that are "
        "not for models."
    )
    previous_secret_until: str | None = Field(
        description="Until when the secret before the last rotation is valid; null: it is not."
    )

    @classmethod
    def of(cls, key: ApiKey, default: LimitSettings) -> Self:
        """Return a key for display; `default` are the limits of a key without its own."""
        return cls.model_validate(_fields(key, default))


class ShownNewKey(ShownKey):
    """A key with its new secret, which is shown only now."""

    key: str = Field(repr=False, description="The secret; it cannot be shown again.")

    @classmethod
    def with_secret(cls, key: ApiKey, made: NewKey, default: LimitSettings) -> Self:
        """Return a key with its new secret."""
        return cls.model_validate({**_fields(key, default), "key": made.text})


class ShownPage(BaseModel):
    data: list[ShownKey]
    has_more: bool = Field(description="Ask for those `after` the last one's id.")

    @classmethod
    def of(cls, page: Page, default: LimitSettings) -> Self:
        """Return a page of keys for display."""
        return cls(data=[ShownKey.of(key, default) for key in page.keys], has_more=page.more)


def shown_costs(daily_nano: int | None, monthly_nano: int | None) -> dict[str, float | None]:
    """Return budgets in money for display."""
    return {
        "daily_cost": None if daily_nano is None else amount_of(daily_nano),
        "monthly_cost": None if monthly_nano is None else amount_of(monthly_nano),
    }


def key_facts(key: ApiKey) -> dict[str, object]:
    """Return the settings of a key for the audit, as values of JSON."""
    shown = ShownKey.of(key, NO_LIMITS).model_dump(mode="json", exclude=_NO_SETTINGS)
    if key.fields is not None:
        shown["fields"] = key.fields.model_dump(mode="json", exclude_defaults=True)
    return shown


def _fields(key: ApiKey, default: LimitSettings) -> dict[str, object]:
    previous_ms = key.previous_until_ms
    shown = {
        **shown_costs(key.daily_cost_nano, key.monthly_cost_nano),
        "created": written(key.created_ms),
        "expires": written(key.expires_ms),
        "last_used": written(key.last_used_ms),
        "limits_in_force": key.limits(default) if key.role is Role.CLIENT else None,
        "previous_secret_until": (
            written(previous_ms) if previous_ms is not None and previous_ms > wall_ms() else None
        ),
    }
    return {**asdict(key), **shown}
