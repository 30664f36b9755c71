"""Numbers, times, sizes and names as pages show them."""

import math
import re
import time
from datetime import UTC, datetime

from markupsafe import Markup

from app.console.language import gettext, noop

_GIB = 2**30
_MIB = 2**20
_AGO = (
    (86400, noop("%(number)s d ago")),
    (3600, noop("%(number)s h ago")),
    (60, noop("%(number)s min ago")),
)


def duration(seconds: float | None) -> str:
    """Return a duration in the unit that reads well: `0.4 ms`, `12 ms`, `3.4 s`, `2 min 5 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: float | None) -> str:
    """Return a number with thousands apart, as `1,234`; large ones as `1.2 M`."""
    if number is None or not math.isfinite(number):
        return "–"
    if abs(number) >= 10_000_000:
        return f"{number / 1_000_000:,.1f} M"
    digits = 1 if abs(number) >= 10 else 2
    if round(number, digits) == round(number):
        return f"{round(number):,}"
    return f"{number:,.{digits}f}"


def size(of_bytes: float | None) -> str:
    """Return a size in GiB or MiB."""
    if of_bytes is None or not math.isfinite(of_bytes):
        return "–"
    return f"{of_bytes / _GIB:.1f} GiB" if of_bytes >= _GIB else f"{of_bytes / _MIB:.0f} MiB"


def percent(part: float | None) -> str:
    """Return a share of one in percent."""
    return "–" if part is None or not math.isfinite(part) else f"{part * 100:.0f} %"


def ago(seconds: float, now: float | None = None) -> str:
    """Return a moment, in seconds since 1970, as its distance from now, such as `5 min ago`."""
    past = max((time.time() if now is None else now) - seconds, 0.0)
    for unit_s, text in _AGO:
        if past >= unit_s:
            return gettext(text, number=int(past // unit_s))
    return gettext("%(number)s s ago", number=int(past))


def rfc3339(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as programs read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def moment(seconds: float | None) -> str:
    """Return a moment, in seconds since 1970, as date and time in UTC."""
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(seconds: float, day: bool = False) -> str:
    """Return a moment, in seconds since 1970, as its hour or its day in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime(gettext("%d %b") if day else "%H:%M")


def iso_moment(text: str | None) -> str:
    """Return a moment in ISO 8601 as date and time in UTC."""
    return "–" if text is None else moment(datetime.fromisoformat(text).timestamp())


def iso_ago(text: str) -> str:
    """Return a moment in ISO 8601 as its distance from now."""
    return ago(datetime.fromisoformat(text).timestamp())


def iso_soon(text: str, days: int = 14) -> bool:
    """Return whether a moment in ISO 8601 is in the next days, or past."""
    return datetime.fromisoformat(text).timestamp() < time.time() + days * 86_400


def phase_note(note: str) -> str:
    """Return the note of a request's phase; a position in the queue is in the page's language."""
    position = note.removeprefix("position ")
    return note if position == note else gettext("position %(number)s", number=position)


def breakable(name: str) -> Markup:
    """Return a setting's name that lines break behind its dots and underscores, if they have to."""
    parts = re.split(r"(?<=[._])", name)
    return Markup("<wbr>").join(parts)


FILTERS = {
    # Of a word that is not known where it is shown; `_()` is for texts of templates.
    "translated": gettext,
    "breakable": breakable,
    "duration": duration,
    "count": count,
    "phase_note": phase_note,
    "size": size,
    "percent": percent,
    "ago": ago,
    "iso_ago": iso_ago,
    "iso_soon": iso_soon,
    "rfc3339": rfc3339,
    "moment": moment,
    "clock": clock,
    "iso_moment": iso_moment,
}
