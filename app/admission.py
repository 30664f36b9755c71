"""Whether a request may begin, and how many are under way.

A `Permit` is held from before an engine is chosen until the last byte has left, so "none in flight"
means that the gateway may end.
"""

import asyncio
from types import TracebackType
from typing import Self

from app.errors import EngineUnavailable
from app.telemetry.metrics import Metrics


class Permit:
    """The right of one request to be under way; released exactly once, by leaving the context."""

    __slots__ = ("_admission", "_model")

    def __init__(self, admission: "Admission", model: str) -> None:
        self._admission = admission
        self._model = model

    def __enter__(self) -> Self:
        self._admission.enter(self._model)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admission.leave(self._model)


class Admission:
    """Gives permits, until the gateway drains."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._in_flight = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def permit(self, model: str) -> Permit:
        """Return a permit to enter. Raises EngineUnavailable while draining."""
        if self._draining:
            raise EngineUnavailable("the gateway is shutting down; try again")
        return Permit(self, model)

    def drain(self) -> None:
        """Give no more permits."""
        self._draining = True

    async def idle(self) -> None:
        """Return when no request is under way."""
        await self._idle.wait()

    def enter(self, model: str) -> None:
        self._in_flight += 1
        self._idle.clear()
        self._metrics.in_flight(model, 1)

    def leave(self, model: str) -> None:
        self._in_flight -= 1
        self._metrics.in_flight(model, -1)
        if self._in_flight == 0:
            self._idle.set()
