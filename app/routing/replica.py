"""One engine of a model as requests see it."""

from dataclasses import dataclass, field
from typing import Protocol

from app.routing.answer_health import AnswerHealth
from app.routing.prefill import PrefillLoad
from engines.base import Engine

UNDIVIDED = (1, 0)  # all slots are this gateway's


class Movable(Protocol):
    """A stream that can go on at another engine."""

    def move(self) -> None:
        """Interrupt the stream at its present engine, so that it goes on elsewhere."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, and the name under which the engine serves the model."""

    engine: Engine
    served_name: str
    # Requests of this gateway that it is working on; never below 0.
    in_flight: int = 0
    # Estimated requests of all gateways are `in_flight * weight + offset`. Between two reports of
    # another gateway its requests are taken to change as those of this one do: `weight` counts the
    # gateways that report, this one included, and `offset` is the sum of their last counts, each
    # less `in_flight` at that time. Only compared with each other: an estimate may be below 0.
    weight: int = 1
    offset: int = 0
    # Requests of other gateways that it was working on when they last reported.
    elsewhere: int = 0
    # Gateways that divide its slots, this one included, and the rank of this one from 0 on.
    division: tuple[int, int] = UNDIVIDED
    # The `system_fingerprint` of its latest stream, from the usage chunk.
    fingerprint: str | None = None
    # Requests that it gets at once from all gateways, where that is found by itself; until
    # `app/concurrency` has looked at it, the least of its first targets.
    target: int = 8
    by_priority: bool = False  # the engine schedules requests by priority
    # Streams that can go on elsewhere, while they run here.
    streams: set[Movable] = field(default_factory=set)
    # Prompts that it has yet to compute, as far as the policy knows what it has cached.
    prefill: PrefillLoad = field(default_factory=PrefillLoad)
    # What is held against its answers; None: nothing.
    health: AnswerHealth | None = None
    ejections: int = 0  # how often it was taken out for them

    @property
    def is_out(self) -> bool:
        """True while it gets no requests but trials."""
        return self.health is not None and self.present_health().is_out

    def takes_request(self, now: float) -> bool:
        """Return whether its answers are good enough for a request more."""
        return self.health is None or self.present_health().takes_request(self.in_flight, now)

    def present_health(self) -> AnswerHealth:
        """Return what is held against its engine since that started, or came back."""
        health, since = self.health, self.engine.since
        if health is None or health.since != since:
            health = self.health = AnswerHealth(since)
        return health

    def move_streams(self) -> int:
        """Interrupt the streams that can go on elsewhere, each once; return their number."""
        # The set stays the same: requests that wait for their response will add streams to it.
        streams = list(self.streams)
        self.streams.clear()
        for stream in streams:
            stream.move()
        return len(streams)
