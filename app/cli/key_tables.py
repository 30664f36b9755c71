"""Keys as `vllm-gateway keys` prints them."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from json import dumps
from typing import TYPE_CHECKING

from app.cli.output import Column, print_fields, print_table
from app.money import amount_text, money_text

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.auth import ShownKey
    from app.usage import Measure, Spent

    # By key: what it has spent.
    KeySpending = Mapping[str, Mapping[Measure, Spent]]

LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "concurrent_requests": "at once",
}


def print_key(key: "ShownKey") -> None:
    """Print all properties of a key, one per line."""
    print_fields(list(_rows(key)))


def print_keys(keys: "Sequence[ShownKey]", spending: "KeySpending", currency: str) -> None:
    """Print keys with their usage, one per row."""
    columns = [
        *map(Column, ("id", "role", "state")),
        *(Column(name, long=True) for name in ("name", "owner", "models")),
        *map(Column, ("expires", "last used")),
        *(Column(name, number=True) for name in LIMITS.values()),
        *(Column(name, long=True) for name in ("today", "this month")),
    ]
    rotated = any(key.previous_secret_until for key in keys)
    if rotated:
        columns.append(Column("old secret until"))
    print_table(columns, (_cells(key, rotated, spending.get(key.id), currency) for key in keys))


def _rows(key: "ShownKey") -> Iterator[tuple[str, str]]:
    for name, value in key.model_dump(mode="json", exclude={"key", "limits_in_force"}).items():
        if name in LIMITS:
            yield name, _limit(key, name)
        elif value is None:
            yield name, "-"
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif isinstance(value, int):
            yield name, f"{value:,}"
        elif isinstance(value, float):
            yield name, amount_text(value)
        elif isinstance(value, dict):
            yield name, dumps({rule: given for rule, given in value.items() if given})
        else:
            yield name, " ".join(value) if isinstance(value, list) else str(value)


def _cells(
    key: "ShownKey", rotated: bool, spent: "Mapping[Measure, Spent] | None", currency: str
) -> list[str]:
    times = [(time or "never")[:10] for time in (key.expires, key.last_used)]
    cells = [key.id, key.role, _state(key), key.name, key.owner or "-", " ".join(key.models)]
    cells += [*times, *(_limit(key, name) for name in LIMITS)]
    tokens, cost = (spent["tokens"], spent["cost"]) if spent else (None, None)
    for period in ("today", "month"):
        used = (getattr(tokens, period, 0), getattr(cost, period, 0))
        budgets = (
            (key.daily_tokens, key.daily_cost)
            if period == "today"
            else (key.monthly_tokens, key.monthly_cost)
        )
        cells.append(_use(*used, *budgets, currency))
    if rotated:
        cells.append((key.previous_secret_until or "-")[:16])
    return cells


def _use(tokens: int, cost: int, budget: int | None, money: float | None, currency: str) -> str:
    """Return what is used of a day or a month, and of which budgets."""
    used = f"{tokens:,} tokens" if budget is None else f"{tokens:,} of {budget:,} tokens"
    if money is not None:
        return f"{used}, {money_text(cost)} of {amount_text(money, currency)}"
    return f"{used}, {money_text(cost, currency)}" if cost else used


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
