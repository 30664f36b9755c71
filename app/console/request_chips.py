"""The filters of the requests' page: one chip for each, whose choices are links."""

from collections.abc import Mapping, Sequence

from app.console.chips import Chip, Field, Filters, Option
from app.console.language import gettext, noop
from app.console.requests_query import RequestsQuery
from app.console.visitor import CONSOLE
from app.relay import OUTCOMES

REQUESTS = f"{CONSOLE}/requests"
_STATUSES = ("2xx", "4xx", "429", "5xx")
_SLOWER_S = ("1", "5", "30")
_SPANS = {
    "15m": noop("Last 15 minutes"),
    "1h": noop("Last hour"),
    "24h": noop("Last 24 hours"),
    "7d": noop("Last 7 days"),
}


def chips_of(
    query: RequestsQuery, models: Sequence[str], names: Mapping[str, str] | None
) -> list[Chip]:
    """Return the chips of a query. `names` are those of keys, by ID; None: no choice of keys."""
    outcomes = {word: gettext(word.replace("_", " ")).capitalize() for word in OUTCOMES}
    filters = Filters(REQUESTS, query.fields)
    chips = [
        filters.chip(gettext("Model"), "model", {name: name for name in models}),
        filters.chip(gettext("Outcome"), "outcome", outcomes),
        filters.chip(gettext("Status"), "status", {one: one for one in _STATUSES}, example="503"),
        _duration_chip(query, filters),
        filters.time_chip({word: gettext(title) for word, title in _SPANS.items()}),
        filters.chip("x-request-id", "request_id", {}, example="0af7651916cd43dd"),
    ]
    if names is not None:
        shown = dict(sorted(names.items(), key=lambda one: one[1].casefold()))
        key = filters.chip(
            gettext("Key"),
            "key",
            shown,
            label=gettext("Name or ID"),
            example=gettext("Web shop"),
        )
        chips.insert(1, key)
    return chips


def _duration_chip(query: RequestsQuery, filters: Filters) -> Chip:
    slower, most = query.slower_than_s, query.at_most_s
    value = gettext("over %(duration)s", duration=slower + " s") if slower else ""
    if most:
        value = gettext("at most %(duration)s", duration=most + " s")
        if slower:
            value = gettext("%(low)s to %(high)s", low=slower, high=most + " s")
    return Chip(
        gettext("Duration"),
        value,
        filters.path(slower_than_s="", at_most_s=""),
        [
            Option(
                gettext("Over %(number)s s", number=seconds),
                filters.path(slower_than_s=seconds, at_most_s=""),
                (slower, most) == (seconds, ""),
            )
            for seconds in _SLOWER_S
        ],
        (
            Field("slower_than_s", gettext("Over, in seconds"), slower, "2.5"),
            Field("at_most_s", gettext("At most"), most, "10"),
        ),
        filters.kept("slower_than_s", "at_most_s"),
    )


def path_of(query: RequestsQuery, **changes: str) -> str:
    """Return the path of the first page of a query with some fields changed, by their aliases."""
    return Filters(REQUESTS, query.fields).path(**changes)
