"""Validation of keys and owners, for the admin API and the command line."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.auth.principal import DEFAULT_PRIORITY, DEFAULT_WEIGHT, Role
from app.money import nano_of
from app.settings import CostBudget, FieldSettings, explain_value

MAX_LIMIT = 10**9
# So that sums of tokens stay far below 2**63.
MAX_BUDGET = 10**15
MAX_PATTERNS = 1000
MAX_NAME = 200
MAX_GRACE_S = 30 * 86400
# As of x-request-deadline-ms.
MAX_WAIT_S = 86400
DEFAULT_GRACE_S = 86400

_RFC_3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_DURATION = re.compile(r"(\d{1,6})([smhdw])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime(9999, 12, 31, tzinfo=UTC)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("contains a non-printable character")
    if text != text.strip():
        raise ValueError("begins or ends with a space")
    return text


def _pattern(text: str) -> str:
    if "*" in text[:-1]:
        raise ValueError("a * is allowed only at the end")
    return _printable(text)


def moment(value: object) -> datetime | None:
    """Parse an RFC 3339 time with its zone. Raises ValueError."""
    if value is None:
        return None
    if isinstance(value, str) and _RFC_3339.fullmatch(value):
        try:
            found = datetime.fromisoformat(value.upper())
        except ValueError:
            found = _LAST + timedelta(seconds=1)
        if _EPOCH <= found <= _LAST:
            return found
    raise ValueError("must be a time with its zone, such as 2027-01-31T12:00:00Z (RFC 3339)")


def duration(text: str) -> timedelta:
    """Parse a duration such as `30d`, `12h`, `90s`. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("must be a duration, such as 30d, 12h or 90s")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def milliseconds(time: datetime) -> int:
    """Return a time as milliseconds since 1970 UTC."""
    return (time - _EPOCH) // timedelta(milliseconds=1)


def written(ms: int | None) -> str | None:
    """Format milliseconds since 1970 UTC as RFC 3339."""
    if ms is None:
        return None
    time = _EPOCH + timedelta(milliseconds=ms)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Label = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_printable)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]
Pattern = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_pattern)]
Limit = Annotated[int, Field(strict=True, ge=0, le=MAX_LIMIT)]
Budget = Annotated[int, Field(strict=True, ge=0, le=MAX_BUDGET)]
Expiry = Annotated[
    datetime | None,
    BeforeValidator(moment, json_schema_input_type=str | None),
]


class KeyChanges(BaseModel):
    """Changes of a key; fields that are not given stay unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Name = Field("", description="Name of the key; unique.")
    owner: Label = Field("", description="Owner of the key: a person or team.")
    models: list[Pattern] = Field(
        ["*"],
        max_length=MAX_PATTERNS,
        description="Canonical names of allowed models, or `prefix*`; an empty list: none.",
    )
    requests_per_minute: Limit | None = Field(
        None, description="null: the configuration's default; 0: no requests."
    )
    tokens_per_minute: Limit | None = Field(None, description="As requests_per_minute.")
    concurrent_requests: Limit | None = Field(None, description="As requests_per_minute.")
    daily_tokens: Budget | None = Field(None, description="Tokens a day (UTC); null: no budget.")
    monthly_tokens: Budget | None = Field(
        None, description="Tokens a month (UTC); null: no budget."
    )
    daily_cost: CostBudget | None = Field(
        None, description="Money a day (UTC), in usage.currency; null: no budget."
    )
    monthly_cost: CostBudget | None = Field(
        None, description="Money a month (UTC), in usage.currency; null: no budget."
    )
    priority: int = Field(
        DEFAULT_PRIORITY, strict=True, ge=-100, le=100, description="Lower values are served first."
    )
    weight: int = Field(
        DEFAULT_WEIGHT,
        strict=True,
        ge=1,
        le=1000,
        description="Share among waiting keys of one priority.",
    )
    max_wait_s: int | None = Field(
        None,
        strict=True,
        ge=1,
        le=MAX_WAIT_S,
        description="Seconds within which a request has to be at an engine, where it does not say "
        "so itself (x-request-deadline-ms); null: the queue's timeout alone counts.",
    )
    expires: Expiry = Field(None, description="RFC 3339 with a time zone; null: never.")
    fields: FieldSettings | None = Field(
        None, description="Rules on request fields, in addition to the model's; null: none."
    )
    may_load_models: bool = Field(
        False,
        strict=True,
        description="May load and unload the models that it may use, at /models/load and "
        "/models/unload. For the role client.",
    )

    def columns(self) -> dict[str, Any]:
        """Return the given fields by the names of the table's columns."""
        return _columns(self.model_dump(include=self.model_fields_set))


class KeyFields(KeyChanges):
    """Fields of a new key. The role cannot be changed later."""

    name: Name = Field(description="Name of the key; unique.")
    role: Role = Field(
        Role.CLIENT,
        description="client: for models; all others: for /admin. An operator is for the models in "
        "`models`, an owner_manager for the keys of `owner`, which these roles must have.",
    )

    @model_validator(mode="after")
    def _check_scope(self) -> Self:
        if self.role is Role.OPERATOR and "models" not in self.model_fields_set:
            raise ValueError("models: an operator needs the models that it operates; * for all")
        if self.role is Role.OWNER_MANAGER and not self.owner:
            raise ValueError("owner: an owner_manager needs the owner whose keys it manages")
        return self

    def columns(self) -> dict[str, Any]:
        """Return every field by the names of the table's columns."""
        return _columns(self.model_dump())


def _columns(fields: dict[str, Any]) -> dict[str, Any]:
    if "expires" in fields:
        expires = fields.pop("expires")
        fields["expires_ms"] = None if expires is None else milliseconds(expires)
    return _cost_columns(fields)


def _cost_columns(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with budgets in money by the names and in the unit of the tables."""
    for name in ("daily_cost", "monthly_cost"):
        if name in fields:
            amount = fields.pop(name)
            fields[f"{name}_nano"] = None if amount is None else nano_of(amount)
    return fields


class OwnerFields(BaseModel):
    """Limits and budgets that all keys of an owner share. Keys name their owner in `owner`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    requests_per_minute: Limit | None = Field(
        None, description="For all keys together; null: no limit; 0: no requests."
    )
    tokens_per_minute: Limit | None = Field(None, description="As requests_per_minute.")
    concurrent_requests: Limit | None = Field(None, description="As requests_per_minute.")
    daily_tokens: Budget | None = Field(None, description="Tokens a day (UTC); null: no budget.")
    monthly_tokens: Budget | None = Field(
        None, description="Tokens a month (UTC); null: no budget."
    )
    daily_cost: CostBudget | None = Field(
        None, description="Money a day (UTC), in usage.currency; null: no budget."
    )
    monthly_cost: CostBudget | None = Field(
        None, description="Money a month (UTC), in usage.currency; null: no budget."
    )

    def given(self) -> dict[str, Any]:
        """Return the given fields by the names of the table's columns."""
        return _cost_columns(self.model_dump(include=self.model_fields_set))

    def columns(self) -> dict[str, Any]:
        """Return every field by the names of the table's columns."""
        return _cost_columns(self.model_dump())


class Rotation(BaseModel):
    """Options of the rotation of a secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    grace_s: int = Field(
        DEFAULT_GRACE_S,
        strict=True,
        ge=0,
        le=MAX_GRACE_S,
        description="Seconds for which the previous secret remains valid.",
    )


def faults(errors: list[Any]) -> list[str]:
    """Return one line per validation error, with the field's name and without values."""
    lines = []
    for error in errors:
        place = ".".join(str(part) for part in error["loc"] if _is_safe(part))
        match error["type"]:
            case "extra_forbidden":
                message = "unknown field"
            case "missing":
                message = "is required"
            case "value_error":
                message = str(error["msg"]).removeprefix("Value error, ")
            case _:
                message = explain_value(error, shows=False)
        lines.append(f"{place}: {message}" if place else message)
    return lines


def _is_safe(part: object) -> bool:
    """Return whether a field's name may be shown: a client may have sent its key as a name."""
    return isinstance(part, int) or re.fullmatch(r"[a-z_]{1,40}", str(part)) is not None
