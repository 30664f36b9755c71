"""A server that somebody else runs: a URL, perhaps a key, and a watch on whether it answers."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from engines.base import (
    SERVING,
    EngineFacts,
    EngineRequest,
    EngineState,
    EngineUnavailable,
    Progress,
)
from engines.http.client import Address, Http1Client, Http1Response
from engines.http.probe import Probe
from engines.http.scrape import scrape
from engines.lifecycle import Event, after
from engines.spec import RemoteSpec

log = logging.getLogger(__name__)

# Kubernetes asks every 10 s by default; half of that keeps a lost server's errors short.
WATCH_S = 5.0
# States in which it takes no requests.
_CLOSED = (EngineState.STOPPED, EngineState.DRAINING, EngineState.STOPPING)


class RemoteEngine:
    """One remote server; see `engines.base.Engine`.

    READY means that it answered HTTP when last asked. A request is tried in any state but
    DRAINING and STOPPED, since the server may have come back a moment ago.
    """

    def __init__(self, name: str, spec: RemoteSpec) -> None:
        self._name = name
        self._url = spec.url
        key = os.environ.get(spec.api_key_env) if spec.api_key_env else None
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        self._client = Http1Client(Address.from_url(spec.url), spec.timeouts, headers)
        # Its own connections: questions of ours are not requests in flight.
        self._control = Http1Client(self._client.address, spec.timeouts, headers)
        self._state = EngineState.STOPPED
        self._since = time.time()
        self._facts = EngineFacts()
        self._last_error: str | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def since(self) -> float:
        """When it came into its state, in seconds since 1970."""
        return self._since

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def progress(self) -> Progress | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    @property
    def load_s(self) -> float | None:
        return None

    @property
    def last_error(self) -> str | None:
        return self._last_error

    @property
    def starting(self) -> None:
        return None  # what goes on there is not known here

    @property
    def blocked_by(self) -> None:
        return None

    def describe(self) -> str:
        return self._url

    async def ensure_ready(self, deadline: float) -> None:
        if self._watch_task is None:
            self._fire(Event.START)
            self._watch_task = asyncio.create_task(self._watch(), name=f"engine {self._name}")
        try:
            async with asyncio.timeout_at(deadline):
                await self._asked.wait()
        except TimeoutError:
            raise EngineUnavailable(f"engine {self._name} has not answered yet") from None
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._last_error or f"engine {self._name} is {self._state}")

    def send(self, request: EngineRequest) -> Coroutine[Any, Any, Http1Response]:
        if self._state in _CLOSED:
            raise EngineUnavailable(f"engine {self._name} is {self._state}")
        return self._client.send(request)  # awaited by the caller: one frame less

    async def exposition(self) -> bytes:
        if self._state not in SERVING:
            raise EngineUnavailable(f"engine {self._name} is {self._state}")
        return await scrape(self._control)

    async def drain(self) -> None:
        if self._state is EngineState.READY:
            self._fire(Event.DRAIN)
        while self._client.in_flight:
            await self._client.quiet()

    async def stop(self, grace: float) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait({self._watch_task})
        self._fire(Event.STOP)
        if self._state is EngineState.STOPPING:
            self._fire(Event.EXIT)
        self._client.close()
        self._control.close()

    def _fire(self, event: Event) -> None:
        self._state = after(self._state, event)
        self._since = time.time()

    async def _watch(self) -> None:
        probe = Probe(self._control)
        while True:
            fault = await probe.reachable()
            if fault is None and self._state is not EngineState.READY:
                self._facts = await _facts(probe)
            self._judge(fault)
            self._asked.set()
            await asyncio.sleep(WATCH_S)

    def _judge(self, fault: str | None) -> None:
        if self._state is EngineState.DRAINING:
            return
        if fault is None:
            if self._state is EngineState.FAILED:
                self._fire(Event.START)
            if self._state is EngineState.STARTING:
                self._fire(Event.LOADED)
                self._last_error = None
                log.info("engine %s answers", self._name)
        elif self._state is not EngineState.FAILED:
            self._fire(Event.FAIL)
            self._last_error = fault
            log.error("engine %s does not answer: %s", self._name, fault)


async def _facts(probe: Probe) -> EngineFacts:
    """Return what a server tells of itself; of one that is not vLLM no more than its models."""
    facts = await probe.facts()
    if facts.version is None:
        return facts
    return replace(facts, supported_tasks=await probe.tasks())
