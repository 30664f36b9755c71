"""What happened to this gateway's engines, for the marks of the charts: kept in memory."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.console.language import gettext
from app.routing import Catalogue
from engines.base import EngineState

MAX_EVENTS = 200


@dataclass(frozen=True, slots=True)
class Event:
    """Something that may explain what a chart shows; `kind` is `bad` or `good`; empty: a reload."""

    at: float  # seconds since 1970
    kind: str
    engine: str | None = None

    @property
    def text(self) -> str:
        """What happened, in the language of the page."""
        if self.engine is None:
            return gettext("configuration reloaded")
        if self.kind == "bad":
            return gettext("engine %(name)s failed", name=self.engine)
        return gettext("engine %(name)s ready", name=self.engine)


class EventLog:
    """The newest events: engines that failed or became ready, and reloads."""

    def __init__(self, catalogue: Catalogue, clock: Callable[[], float] = time.time) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        # The state of each engine, and how often it was restarted.
        self._states: Mapping[str, tuple[EngineState, int]] = {}
        self._models = catalogue.models

    async def run(self) -> None:
        """Note events until canceled."""
        self._states = self._read()
        while True:
            await self._catalogue.changes.next()
            self.observe()

    def observe(self) -> None:
        """Note what differs from the time before."""
        before, self._states = self._states, self._read()
        if self._catalogue.models is not self._models:
            self._models = self._catalogue.models
            self._add("")
        for name, (state, restarts) in self._states.items():
            old, restarted = before.get(name, (state, restarts))
            # One that is restarted at once is seen again when it starts.
            if (
                state is EngineState.FAILED or restarts > restarted
            ) and old is not EngineState.FAILED:
                self._add("bad", name)
            if state is EngineState.READY and old is not EngineState.READY:
                self._add("good", name)

    def since(self, at: float) -> Sequence[Event]:
        """Return the events after a moment since 1970, oldest first."""
        return [event for event in self._events if event.at >= at]

    def _read(self) -> Mapping[str, tuple[EngineState, int]]:
        return {one.name: (one.state, one.restarts) for one in self._catalogue.engines}

    def _add(self, kind: str, engine: str | None = None) -> None:
        self._events.append(Event(self._clock(), kind, engine))
