"""What the page of requests shows: the fields of its form, as its address has them."""

import re
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from app.api import DEFAULT_SPAN, cursor_of, parse_cursor, parse_moment, status_range
from app.errors import BadRequest
from app.relay import OUTCOMES
from app.usage import Order, Place, RequestFilter

MAX_CHARS = 256
# A time before now, such as 24h.
_AGO = re.compile(r"([1-9]\d{0,3})([mhd])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


class RequestsQuery(BaseModel):
    """Every field as it was typed; empty: not given."""

    model_config = ConfigDict(str_max_length=MAX_CHARS, str_strip_whitespace=True)

    key: str = ""  # its ID; as it is typed, also its name
    request_id: str = ""  # the client's
    model: str = ""
    status: str = ""
    outcome: str = ""
    slower_than_s: str = ""
    at_most_s: str = ""
    since: str = Field("", alias="from")
    until: str = Field("", alias="to")
    order: str = ""
    cursor: str = ""

    @property
    def is_history(self) -> bool:
        """Whether it asks for stored requests; otherwise for those in memory, which change."""
        return any(
            (self.slower_than_s, self.at_most_s, self.since, self.until, self.order, self.cursor)
        )

    @property
    def ranked(self) -> Order:
        """What comes first. Raises BadRequest."""
        if self.order not in ("", *Order):
            raise BadRequest(f"order must be one of {', '.join(Order)}")
        return Order(self.order or Order.LATEST)

    @property
    def after(self) -> Place | None:
        """The place behind which the page begins. Raises BadRequest."""
        return parse_cursor(self.cursor) if self.cursor else None

    def chosen(self, seen: RequestFilter) -> RequestFilter:
        """Return what is shown of the requests that the visitor sees. Raises BadRequest."""
        if self.outcome and self.outcome not in OUTCOMES:
            raise BadRequest(f"outcome must be one of {', '.join(OUTCOMES)}")
        until = parse_time("to", self.until, end_of_day=True) if self.until else None
        since = parse_time("from", self.since) if self.since else None
        if since is None and self.is_history:
            since = (until or datetime.now(UTC)) - DEFAULT_SPAN
        return msgspec.structs.replace(
            seen,
            key_id=seen.key_id or self.key or None,
            request_id=self.request_id or None,
            model=self.model or None,
            statuses=status_range(self.status) if self.status else None,
            outcome=self.outcome or None,
            slower_than_s=_seconds("slower than", self.slower_than_s),
            at_most_s=_seconds("at most", self.at_most_s),
            since_s=None if since is None else since.timestamp(),
            until_s=None if until is None else until.timestamp(),
        )

    def next_page(self, place: Place) -> str:
        """Return the query of the page behind a place."""
        return urlencode({**self.fields, "cursor": cursor_of(place)})

    @property
    def fields(self) -> dict[str, str]:
        """The fields that are given, as the address has them, without the cursor."""
        return self.model_dump(by_alias=True, exclude={"cursor"}, exclude_defaults=True)


def parse_time(name: str, text: str, *, end_of_day: bool = False) -> datetime:
    """Return a time of an address, such as 24h before now. Raises BadRequest."""
    if ago := _AGO.fullmatch(text):
        return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    return parse_moment(name, text, end_of_day=end_of_day)


def _seconds(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise BadRequest(f"{name} must be a number of seconds, such as 2.5")
    return seconds
