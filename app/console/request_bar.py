"""The time of one request as the parts of one bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.console.language import gettext, noop
from app.telemetry import RequestPhase

WIDTH = 1000.0
# A part that lasted a moment can still be seen, unless there are very many.
MIN_WIDTH = 2.0
# The names of phases, as a reader would say them.
TITLES = {
    "auth": noop("Key looked up"),
    "body": noop("Body read"),
    "limits": noop("Limits and budget"),
    "load_wait": noop("Waited for the model to load"),
    "queue": noop("Waited in the queue"),
    "attempt": noop("Failed attempt"),
    "prefill": noop("Prefill, to the first token"),
    "decode": noop("Decode"),
    "generate": noop("Generated"),
    "continuation": noop("Interrupted, until it went on"),
    "client_wait": noop("Waited for the client to read"),
}


@dataclass(frozen=True, slots=True)
class BarPart:
    """A phase: where it is drawn, in units of `WIDTH`, and what is said of it."""

    name: str
    title: str
    note: str
    start_s: float
    duration_s: float
    share: float  # of the request's time
    x: float
    width: float


def request_bar(phases: Sequence[RequestPhase], total_s: float) -> list[BarPart]:
    """Return the parts of the bar of a request that took `total_s` seconds, in order.

    Their widths are in proportion to their durations, none below MIN_WIDTH while there is room for
    that, and fill WIDTH.
    """
    if not phases or total_s <= 0:
        return []
    durations = [phase.end_s - phase.start_s for phase in phases]
    min_width = min(MIN_WIDTH, WIDTH / 2 / len(phases))
    spare = WIDTH - min_width * len(phases)
    parts, x = [], 0.0
    for phase, duration_s in zip(phases, durations, strict=True):
        share = duration_s / total_s
        width = min_width + spare * share
        title = gettext(TITLES.get(phase.name, phase.name))
        parts.append(
            BarPart(phase.name, title, phase.note, phase.start_s, duration_s, share, x, width)
        )
        x += width
    return parts
