"""Which usage a page shows: the period, the groups and the filters of its form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from urllib.parse import urlencode

from app.api import MAX_DAYS, check_names, parse_day, parse_groups
from app.console.language import gettext, noop
from app.console.visitor import CONSOLE
from app.errors import BadRequest

USAGE = f"{CONSOLE}/usage"
DEFAULT_DAYS = 30
DEFAULT_GROUPS = "key"
# What the form offers.
GROUPINGS = (
    ("key", noop("Key")),
    ("owner", noop("Owner")),
    ("model", noop("Model")),
    ("day", noop("Day")),
    ("day,key", noop("Day and key")),
    ("day,model", noop("Day and model")),
    ("key,model", noop("Key and model")),
    ("day,key,model", noop("Day, key and model")),
)
_PERIODS = (
    (1, noop("Today")),
    (7, noop("7 days")),
    (30, noop("30 days")),
    (90, noop("90 days")),
    (365, noop("365 days")),
)
_MAX_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """The UTC days from `since` to `until`, both included; an empty filter is none."""

    since: date
    until: date
    by: Sequence[str]
    key: str = ""
    owner: str = ""
    model: str = ""

    @property
    def groups(self) -> str:
        """The groups as the form and the API have them."""
        return ",".join(self.by)

    @property
    def text(self) -> str:
        """The query as a part of a URL."""
        fields = {
            "from": self.since.isoformat(),
            "to": self.until.isoformat(),
            "by": self.groups,
            "key": self.key,
            "owner": self.owner,
            "model": self.model,
        }
        return urlencode({name: value for name, value in fields.items() if value})

    @property
    def path(self) -> str:
        """The page with this query."""
        return f"{USAGE}?{self.text}"


def default_query(today: date) -> UsageQuery:
    """Return the query of a page without one: the last 30 days, by key."""
    since = today - timedelta(days=DEFAULT_DAYS - 1)
    return UsageQuery(since=since, until=today, by=[DEFAULT_GROUPS])


def parse_query(fields: Mapping[str, str], today: date) -> UsageQuery:
    """Return the query of a form; what is empty has its default. Raises BadRequest."""
    default = default_query(today)
    given = {name: value.strip() for name, value in fields.items()}
    if any(len(value) > _MAX_CHARS for value in given.values()):
        raise BadRequest(f"a filter has at most {_MAX_CHARS} characters")
    until = parse_day("to", given["to"]) if given.get("to") else default.until
    since = (
        parse_day("from", given["from"])
        if given.get("from")
        else until - (default.until - default.since)
    )
    if since > until:
        raise BadRequest(f"the first day ({since}) must not be after the last day ({until})")
    if (until - since).days >= MAX_DAYS:
        raise BadRequest(f"a period has at most {MAX_DAYS} days")
    owner, model = given.get("owner", ""), given.get("model", "")
    check_names(owner, model)
    by = parse_groups(given.get("by") or DEFAULT_GROUPS)
    key = given.get("key", "")
    return UsageQuery(since=since, until=until, by=by, key=key, owner=owner, model=model)


@dataclass(frozen=True, slots=True)
class PeriodLink:
    """A link to the same query for another period."""

    title: str
    path: str
    current: bool


def period_links(query: UsageQuery, today: date) -> list[PeriodLink]:
    """Return links to the usual periods."""
    links: list[PeriodLink] = []
    for days, title in _PERIODS:
        other = replace(query, since=today - timedelta(days=days - 1), until=today)
        links.append(PeriodLink(gettext(title), other.path, other == query))
    month = replace(query, since=today.replace(day=1), until=today)
    end = today.replace(day=1) - timedelta(days=1)
    last = replace(query, since=end.replace(day=1), until=end)
    return [
        *links,
        PeriodLink(gettext("This month"), month.path, month == query),
        PeriodLink(gettext("Last month"), last.path, last == query),
    ]


def row_path(query: UsageQuery, group: str, value: str) -> str:
    """Return the page of what a row of a group adds up: of a day by key, of others by day."""
    match group:
        case "day":
            day = date.fromisoformat(value)
            return replace(query, since=day, until=day, by=["key"]).path
        case "key":
            return replace(query, key=value, by=["day", "model"]).path
        case "owner":
            return replace(query, owner=value, by=["key"]).path
        case _:
            return replace(query, model=value, by=["day", "key"]).path
