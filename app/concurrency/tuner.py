"""Reads the counters of engines whose target is found by itself, and applies what follows."""

import asyncio
import logging
from collections.abc import Iterator

from app.admission import Admission
from app.concurrency.counters import read_counters
from app.concurrency.target import MAX_TARGET, ConcurrencyTarget, initial_target
from app.routing import Catalogue, Replica
from engines.background_tasks import BackgroundTasks
from engines.base import EngineError, EngineState

log = logging.getLogger(__name__)

# A page of metrics costs vLLM some 5 ms, and the gateway less than one.
INTERVAL_S = 1.0
# Looks in a row without counters after which an engine is taken to have none, and has no target.
MAX_FAILED_LOOKS = 5


class _Watched:
    """An engine whose target is found: of one replica, as long as the replica lives."""

    def __init__(self, replica: Replica) -> None:
        self.target = ConcurrencyTarget(initial_target(replica.engine.facts.max_concurrency))
        self.failed_looks = 0
        self.has_counters = False
        self.look: asyncio.Task[None] | None = None
        replica.target = self.target.value


class ConcurrencyTuner:
    """Tunes the models with `queue.max_in_flight: auto` until it is canceled.

    An engine without counters, or one that stops to report them, keeps its last target: the
    gateway's own count goes on bounding. One that never had any gets no bound.
    """

    def __init__(self, catalogue: Catalogue, admission: Admission) -> None:
        self._catalogue = catalogue
        self._admission = admission
        self._watched: dict[Replica, _Watched] = {}
        self._looks = BackgroundTasks(log)

    def targets(self) -> Iterator[tuple[str, str, int]]:
        """Yield model, engine and target of each engine whose target is found."""
        for model, replica in self._replicas():
            if replica in self._watched:
                yield model, replica.engine.name, replica.target

    async def run(self) -> None:
        """Look at the engines again and again."""
        try:
            while True:
                self.look()
                await asyncio.sleep(INTERVAL_S)
        finally:
            await self._looks.cancel()

    def look(self) -> None:
        """Begin a look at each engine that works on requests, unless its last one is under way."""
        present = {replica: model for model, replica in self._replicas()}
        for gone in self._watched.keys() - present.keys():
            del self._watched[gone]
        for replica, model in present.items():
            if replica.engine.state is not EngineState.READY:
                continue
            watched = self._watched.get(replica)
            if watched is None:
                watched = self._watched[replica] = _Watched(replica)
            in_flight, _ = self._admission.counts(model)
            if in_flight and (watched.look is None or watched.look.done()):
                name = f"read the load of {replica.engine.name}"
                watched.look = self._looks.start(self._measure(model, replica, watched), name)

    async def _measure(self, model: str, replica: Replica, watched: _Watched) -> None:
        try:
            counters = read_counters(await replica.engine.exposition())
        except EngineError:
            counters = None
        if model not in self._admission.automatic():  # removed or reloaded meanwhile
            return
        if counters is None:
            watched.failed_looks += 1
            if watched.has_counters or watched.failed_looks < MAX_FAILED_LOOKS:
                return
            target = MAX_TARGET
        else:
            watched.has_counters, watched.failed_looks = True, 0
            _, waiting = self._admission.counts(model)
            now = asyncio.get_running_loop().time()
            target = watched.target.update(now, counters, queued=waiting > 0)
        if target != replica.target:
            replica.target = target
            self._admission.fill(model)

    def _replicas(self) -> Iterator[tuple[str, Replica]]:
        for name in self._admission.automatic():
            model = self._catalogue.get(name)
            for replica in () if model is None else model.replicas:
                yield name, replica
