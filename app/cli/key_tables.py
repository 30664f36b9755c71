"""Keys as `vllm-gateway keys` prints them."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from json import dumps
from typing import TYPE_CHECKING

from app.cli.output import Column, print_fields, print_table
from app.money import amount_text

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.auth import ShownKey

LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "concurrent_requests": "at once",
}


def print_key(key: "ShownKey") -> None:
    """Print all properties of a key, one per line."""
    print_fields(list(_rows(key)))


def print_keys(keys: "Sequence[ShownKey]") -> None:
    """Print keys, one per row."""
    columns = [
        *map(Column, ("id", "role", "state")),
        *(Column(name, long=True) for name in ("name", "owner", "models")),
        *map(Column, ("expires", "last used")),
        *(Column(name, number=True) for name in LIMITS.values()),
    ]
    rotated = any(key.previous_secret_until for key in keys)
    if rotated:
        columns.append(Column("old secret until"))
    print_table(columns, (_cells(key, rotated) for key in keys))


def _rows(key: "ShownKey") -> Iterator[tuple[str, str]]:
    for name, value in key.model_dump(mode="json", exclude={"key", "limits_in_force"}).items():
        if name in LIMITS:
            yield name, _limit(key, name)
        elif value is None:
            yield name, "-"
        elif isinstance(value, float):
            yield name, amount_text(value)
        elif isinstance(value, dict):
            yield name, dumps({rule: given for rule, given in value.items() if given})
        else:
            yield name, " ".join(value) if isinstance(value, list) else str(value)


def _cells(key: "ShownKey", rotated: bool) -> list[str]:
    times = [(time or "never")[:10] for time in (key.expires, key.last_used)]
    cells = [key.id, key.role, _state(key), key.name, key.owner or "-", " ".join(key.models)]
    cells += [*times, *(_limit(key, name) for name in LIMITS)]
    if rotated:
        cells.append((key.previous_secret_until or "-")[:16])
    return cells


def _limit(key: "ShownKey", name: str) -> str:
    """Return the limit in force, marked if it is the configured default; `-`: none applies."""
    if key.limits_in_force is None:
        return "-"
    limit = getattr(key.limits_in_force, name)
    shown = "none" if limit is None else f"{limit:,}"
    return f"{shown} (default)" if getattr(key, name) is None else shown


def _state(key: "ShownKey") -> str:
    if key.disabled:
        return "disabled"
    expired = key.expires and datetime.fromisoformat(key.expires) <= datetime.now(UTC)
    return "expired" if expired else "active"
