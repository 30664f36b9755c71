"""What a request took of a model: told, else counted from what passed, else what it reserved. Pure.

| how it went                           | prompt             | answer                              |
|---------------------------------------|--------------------|-------------------------------------|
| the engine told, and all of it passed | told               | told, within what is plausible      |
| a stream broke, was left, or told not | told, or estimated | events, or bytes where that is more |
| a plain answer that tells nothing     | estimated          | its bytes                           |
| a plain request that was left         | estimated          | what was reserved                   |
| it runs on after its answer           | estimated          | what was reserved                   |
| refused, or failed without an answer  | nothing            | nothing                             |
"""

import msgspec

from app.relay.cost import Cost
from app.usage.meter import StreamMeter
from app.usage.reading import Usage


class Course(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How a request went that reached an engine."""

    # The status of the engine's answer; None: there was none. The client may have got another one
    # before, with a keep-alive comment.
    answered: int | None
    started: bool  # something of an answer has left for the client
    complete: bool  # all of it has
    left: bool  # the client went first
    bytes_out: int
    streamed: bool
    runs_on: bool  # the engine generates after its answer


def usage_of(cost: Cost, meter: StreamMeter, course: Course) -> Usage | None:
    """Return what a request took; None where the engine did nothing for it."""
    told = meter.usage
    refused = course.answered is not None and course.answered >= 300
    begun = course.started and course.answered is not None and not refused
    if course.runs_on and begun and (told is None or course.left):
        return Usage(cost.prompt, cost.output, estimated=True)
    if meter.events:
        if told is None or course.left or not course.complete:
            told = meter.so_far(cost.prompt, course.bytes_out)
        return cost.plausible(told)
    if told is not None:
        return cost.plausible(told)
    if begun:
        # No token has less than a byte. What was reserved may be less than what was written.
        most = cost.plausible_output if cost.output else 0
        return Usage(cost.prompt, min(most, course.bytes_out), estimated=True)
    if not course.left or refused:
        return None
    return Usage(cost.prompt, 0 if course.streamed else cost.output, estimated=True)
