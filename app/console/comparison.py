"""Facts and flags of engines side by side."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.console import formats
from app.console.fleet_view import EngineView
from app.console.language import gettext

_UNITS = {"s": "s", "gib": "GiB"}
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A fact or a flag, with its value for each engine."""

    name: str
    values: Sequence[str]

    @property
    def differs(self) -> bool:
        """Return whether the engines have different values."""
        return len(set(self.values)) > 1

    @property
    def cells(self) -> Sequence[tuple[str, bool]]:
        """The values, each with whether it differs from what most engines have.

        Of values that equally many have, that of the first engine is not marked.
        """
        usual = Counter(self.values).most_common(1)[0][0]
        return [(value, value != usual) for value in self.values]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is known of some engines."""

    engines: Sequence[str]
    facts: Sequence[ComparedRow]
    flags: Sequence[ComparedRow]
    variables: Sequence[ComparedRow]

    @property
    def differences(self) -> int:
        """The number of rows that differ."""
        return sum(row.differs for row in (*self.facts, *self.flags, *self.variables))


def compare(engines: Sequence[EngineView]) -> Comparison:
    """Return the facts, flags and environment variables of engines, a row for each."""
    return Comparison(
        [one.row.name for one in engines],
        _rows([_facts(one) for one in engines]),
        _rows([one.command.flags for one in engines]),
        _rows([one.command.variables for one in engines]),
    )


def fact_rows(engine: EngineView) -> Sequence[ComparedRow]:
    """Return the facts of one engine."""
    return _rows([_facts(engine)])


def _rows(columns: Sequence[Mapping[str, str]]) -> list[ComparedRow]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [ComparedRow(name, [column.get(name, UNKNOWN) for column in columns]) for name in names]


def _facts(engine: EngineView) -> dict[str, str]:
    row = engine.row
    known: dict[str, Any] = {
        "gateway_model": row.model,
        "kind": gettext(row.kind.replace("_", " ")),
        "load_s": row.load_s,
        "memory_gib": row.memory_gib,
        **asdict(row.facts),
    }
    found = {_name(name): _value(value) for name, value in known.items() if value is not None}
    return found if engine.command.flags else {**found, gettext("address"): row.runs}


def _name(name: str) -> str:
    """Return a fact's name with its unit: `weights_gib` becomes `weights (GiB)`."""
    *words, last = name.split("_")
    if words and last in _UNITS:
        text = " ".join(words)
        return f"{gettext(text)} ({_UNITS[last]})"
    text = " ".join([*words, last])
    return gettext(text)


def _value(value: Any) -> str:
    match value:
        case bool():
            return gettext("yes") if value else gettext("no")
        case int() | float():
            return formats.count(value)
        case Mapping():
            return ", ".join(f"{name}={_value(one)}" for name, one in value.items()) or UNKNOWN
        case str():
            return value or UNKNOWN
        case Iterable():
            return ", ".join(map(str, value)) or UNKNOWN
        case _:
            return str(value)
