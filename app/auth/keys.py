"""A stored key as other modules see it, and the errors of looking one up."""

import time
from dataclasses import dataclass, field

from app.auth.principal import Owner, Role
from app.settings import FieldSettings, LimitSettings


class UnknownKey(LookupError):
    """The key does not exist. The message omits what was asked for: it may be a secret."""

    def __init__(self, nearest: str | None = None) -> None:
        """`nearest` is the most similar name of a key, as a hint."""
        hint = "" if nearest is None else f"; did you mean {nearest!r}?"
        super().__init__(f"there is no such key{hint}")


class NameTaken(ValueError):
    """Another key has the name, or has an ID equal to it."""


class TooManyKeys(ValueError):
    """The owner has as many keys as its manager may make, or a person as they may."""

    def __init__(self) -> None:
        super().__init__("there are as many keys as there may be; delete some first")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without its secret. Times are milliseconds since 1970 UTC."""

    id: str
    name: str
    owner: str
    role: Role
    models: tuple[str, ...]
    # None: the configuration's default.
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    # None: no budget.
    daily_tokens: int | None
    monthly_tokens: int | None
    daily_cost_nano: int | None
    monthly_cost_nano: int | None
    priority: int
    weight: int
    # None: its requests have no deadline of their own.
    max_wait_s: int | None
    fields: FieldSettings | None
    may_load_models: bool
    disabled: bool
    created_ms: int
    # Who made the last change, or that of its owner: the ID of an admin key, or `user@host` of a
    # command; None: unknown.
    changed_by: str | None
    expires_ms: int | None
    last_used_ms: int | None
    # Until when the previous secret is accepted after a rotation; None: there is none.
    previous_until_ms: int | None

    def limits(self, default: LimitSettings) -> LimitSettings:
        """Return the effective limits: the key's own, else those of the configuration."""
        own = {name: getattr(self, name) for name in LimitSettings.model_fields}
        given = {name: limit for name, limit in own.items() if limit is not None}
        return LimitSettings(**{**default.model_dump(), **given})


@dataclass(frozen=True, slots=True)
class Credential:
    """A key with the digests of its secrets, for the Authenticator only."""

    key: ApiKey
    digest: bytes = field(repr=False)
    previous_digest: bytes | None = field(repr=False)
    owner: Owner | None = None  # None: the key's owner has no record


@dataclass(frozen=True, slots=True)
class Change:
    """The last change of a key."""

    revision: int
    deleted: bool
    cut_ms: int | None  # requests that began before this moment are terminated; None: none
    by: str | None = None  # as in ApiKey.changed_by


@dataclass(frozen=True, slots=True)
class Page:
    """A page of keys; `more`: there are others after the last."""

    keys: list[ApiKey]
    more: bool


def wall_ms() -> int:
    """Return the current time in milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000
