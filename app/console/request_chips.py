"""The filters of the requests' page: one chip for each, whose choices are links. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from app.console.requests_query import RequestsQuery
from app.console.visitor import CONSOLE
from app.relay import OUTCOMES

REQUESTS = f"{CONSOLE}/requests"
_STATUSES = ("2xx", "4xx", "429", "5xx")
_SLOWER_S = ("1", "5", "30")
_SPANS = {"15m": "Last 15 minutes", "1h": "Last hour", "24h": "Last 24 hours", "7d": "Last 7 days"}


@dataclass(frozen=True, slots=True)
class Option:
    """A choice of a chip."""

    title: str
    path: str
    current: bool


@dataclass(frozen=True, slots=True)
class Field:
    """An input of a chip, for values that are no choice."""

    name: str
    label: str
    value: str
    example: str


@dataclass(frozen=True, slots=True)
class Chip:
    """A filter. `value` is what it selects, in words; empty: everything."""

    title: str
    value: str
    without: str  # the path of the page without it
    options: Sequence[Option]
    fields: Sequence[Field] = ()
    kept: Sequence[tuple[str, str]] = ()  # the other filters, for the form of its fields


def chips_of(
    query: RequestsQuery, models: Sequence[str], names: Mapping[str, str] | None
) -> list[Chip]:
    """Return the chips of a query. `names` are those of keys, by ID; None: no choice of keys."""
    outcomes = {word: word.replace("_", " ").capitalize() for word in OUTCOMES}
    since, until = query.since, query.until
    span = _SPANS.get(since, f"from {since}" if since else "") + (f" to {until}" if until else "")
    chips = [
        _chip(query, "Model", "model", {name: name for name in models}),
        _chip(query, "Outcome", "outcome", outcomes),
        _chip(query, "Status", "status", {one: one for one in _STATUSES}, example="503"),
        _duration_chip(query),
        Chip(
            "Time",
            span.strip(),
            path_of(query, **{"from": "", "to": ""}),
            [
                Option(title, path_of(query, **{"from": word, "to": ""}), word == since)
                for word, title in _SPANS.items()
            ],
            (
                Field("from", "From (UTC)", since, "2026-11-26T14:00"),
                Field("to", "To (UTC)", until, "2026-11-26"),
            ),
            _kept(query, "from", "to"),
        ),
        _chip(query, "x-request-id", "request_id", {}, example="0af7651916cd43dd"),
    ]
    if names is not None:
        shown = dict(sorted(names.items(), key=lambda one: one[1].casefold()))
        key = _chip(query, "Key", "key", shown, label="Name or ID", example="Web shop")
        chips.insert(1, key)
    return chips


def _duration_chip(query: RequestsQuery) -> Chip:
    slower, most = query.slower_than_s, query.at_most_s
    value = f"over {slower} s" if slower else ""
    if most:
        value = f"{slower} to {most} s" if slower else f"at most {most} s"
    return Chip(
        "Duration",
        value,
        path_of(query, slower_than_s="", at_most_s=""),
        [
            Option(
                f"Over {seconds} s",
                path_of(query, slower_than_s=seconds, at_most_s=""),
                (slower, most) == (seconds, ""),
            )
            for seconds in _SLOWER_S
        ],
        (
            Field("slower_than_s", "Over, in seconds", slower, "2.5"),
            Field("at_most_s", "At most", most, "10"),
        ),
        _kept(query, "slower_than_s", "at_most_s"),
    )


def path_of(query: RequestsQuery, **changes: str) -> str:
    """Return the path of the first page of a query with some fields changed, by their aliases."""
    fields = {**query.fields, **changes}
    text = urlencode({name: value for name, value in fields.items() if value})
    return REQUESTS + (f"?{text}" if text else "")


def _chip(
    query: RequestsQuery,
    title: str,
    name: str,
    choices: Mapping[str, str],
    *,
    label: str = "",
    example: str = "",
) -> Chip:
    current = query.fields.get(name, "")
    options = [
        Option(shown, path_of(query, **{name: value}), value == current)
        for value, shown in choices.items()
    ]
    fields = [Field(name, label or title, "", example)] if example else []
    value = choices.get(current, current)
    return Chip(title, value, path_of(query, **{name: ""}), options, fields, _kept(query, name))


def _kept(query: RequestsQuery, *names: str) -> list[tuple[str, str]]:
    return [(name, value) for name, value in query.fields.items() if name not in names]
