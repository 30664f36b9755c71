"""The engine of kind `remote`: a server that the gateway does not run, checked periodically."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from engines.adapters import AdapterPhase, AdapterSources, AdapterState
from engines.base import (
    SERVING,
    Engine,
    EngineFacts,
    EngineNotReady,
    EngineRequest,
    EngineState,
)
from engines.http import Address, EngineProbe, Http1Client, ResponseBody, identify, scrape_metrics
from engines.lifecycle import Event
from engines.logs import EngineLogger
from engines.secret_variables import secret_value
from engines.spec import RemoteSpec

log = logging.getLogger(__name__)

# Kubernetes' default is 10 s; half of that shortens the errors of a server that is lost.
CHECK_INTERVAL_S = 5.0
# Between two checks at least, where requests show that a failed server answers again.
RECHECK_S = 0.5
# Reading a member of an enumeration takes Python 3.11 longer.
_READY, _FAILED = EngineState.READY, EngineState.FAILED
_CLOSED = (EngineState.STOPPED, EngineState.DRAINING, EngineState.STOPPING)


class RemoteEngine(Engine):
    """A remote server.

    READY: it responded to the latest check. A request is sent in any state except DRAINING,
    STOPPING and STOPPED, since the server may have recovered since the check.

    With `serves` it is READY only while the server lists a model of that name, and gets no request
    when it lists others: an address may be given to another server.
    """

    kind = "remote"

    def __init__(self, name: str, spec: RemoteSpec, serves: str | None = None) -> None:
        """`spec` has a `url`."""
        super().__init__(name)
        self._logger = EngineLogger(log, name)
        assert spec.url is not None
        self._url = spec.url
        self._serves = serves
        # States in which requests are refused.
        self._closed: tuple[EngineState, ...] = _CLOSED
        self._failure = ""  # the event of the latest failure
        key = secret_value(spec.api_key_env) if spec.api_key_env else None
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        self._client = Http1Client(Address.from_url(spec.url), spec.timeouts, headers)
        # A separate pool: the gateway's own requests do not count as in flight.
        self._control = Http1Client(self._client.address, spec.timeouts, headers)
        self._shared_id = identify(self._client.address)
        self._check_task: asyncio.Task[None] | None = None
        self._checked = asyncio.Event()
        # A request that was sent although the server failed was answered.
        self._answered = asyncio.Event()

    @property
    def shared_id(self) -> str:
        return self._shared_id

    def describe(self) -> str:
        return self._url

    async def ensure_ready(self, deadline: float) -> None:
        if self._check_task is None:
            self._status.fire(Event.START)
            self._check_task = asyncio.create_task(self._run_checks(), name=f"engine {self._name}")
        try:
            async with asyncio.timeout_at(deadline):
                await self._checked.wait()
        except TimeoutError:
            raise EngineNotReady(f"engine {self._name} has not responded yet") from None
        if self._status.state is not EngineState.READY:
            raise EngineNotReady(
                self._status.last_error or f"engine {self._name} is {self._status.state}"
            )

    def send(self, request: EngineRequest) -> Coroutine[Any, Any, ResponseBody]:
        state = self._status.state
        if state is not _READY:
            if state in self._closed:
                raise EngineNotReady(f"engine {self._name} is {state}")
            if state is _FAILED:
                return self._send_to_failed(request)
        return self._client.send(request)  # awaited by the caller: one frame less

    async def _send_to_failed(self, request: EngineRequest) -> ResponseBody:
        response = await self._client.send(request)
        self._answered.set()
        return response

    async def exposition(self) -> bytes:
        if self._status.state not in SERVING:
            raise EngineNotReady(f"engine {self._name} is {self._status.state}")
        return await scrape_metrics(self._control)

    async def drain(self) -> None:
        if self._status.state is EngineState.READY:
            self._status.fire(Event.DRAIN)
        else:
            await self._end_checks()  # it would be READY, and get requests again, when it recovers
        while self._client.in_flight:
            await self._client.wait_idle()

    async def stop(self, grace: float) -> None:
        await self._end_checks()
        self._status.fire(Event.STOP)
        if self._status.state is EngineState.STOPPING:
            self._status.fire(Event.EXIT)
        self._client.close()
        self._control.close()

    async def _end_checks(self) -> None:
        if self._check_task is not None:
            self._check_task.cancel()
            await asyncio.wait({self._check_task})
            self._check_task = None
            self._checked.clear()

    async def _run_checks(self) -> None:
        probe, loop = EngineProbe(self._control), asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._answered.clear()
            try:
                fault, event = await self._check(probe)
            except Exception:
                self._logger.exception(": unhandled exception during its check")
                fault, event = "its check failed", "is not used"
            self._update_state(fault, event)
            self._checked.set()
            await asyncio.sleep(min(RECHECK_S, CHECK_INTERVAL_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(began + CHECK_INTERVAL_S):
                    await self._answered.wait()

    async def _check(self, probe: EngineProbe) -> tuple[str | None, str]:
        """Return the fault of the server, if there is one, and the event that it is."""
        if (fault := await probe.check_reachable()) is not None:
            return fault, "does not respond"
        if self._serves is not None:
            fault = await self._check_model(probe, self._serves)
        if fault is None:
            await self._check_adapters(probe)
        if fault is None and self._status.state is not EngineState.READY:
            self._status.facts = await _read_facts(probe)
        return fault, "is not used"

    def want_adapters(self, wanted: AdapterSources) -> None:
        if self._status.wanted_adapters != wanted:
            super().want_adapters(wanted)
            self._answered.set()  # the next check says which of them the server has

    async def _check_adapters(self, probe: EngineProbe) -> None:
        """Note which of the wanted adapters the server lists; it has loaded them itself."""
        wanted = self._status.wanted_adapters
        models = await probe.fetch_models() if wanted else ()
        if models is None:
            return  # a server that is too busy has what it had
        missing = AdapterState(None, AdapterPhase.FAILED, "its server does not list it")
        loaded = AdapterState(None, AdapterPhase.LOADED)
        found = {name: loaded if name in models else missing for name in wanted}
        if found != self._status.adapters:
            self._status.adapters = found
            self._status.changes.notify()

    async def _check_model(self, probe: EngineProbe, name: str) -> str | None:
        """Return None if the server lists the model, else the fault."""
        models = await probe.fetch_models()
        if models is None:
            # A READY server is too busy to say what it has said before.
            ready = self._status.state is EngineState.READY
            return None if ready else await probe.find_models_fault()
        if name in models:
            self._closed = _CLOSED
            return None
        self._closed = (*_CLOSED, EngineState.FAILED)
        return f"it does not serve the model {name!r}"

    def _update_state(self, fault: str | None, event: str) -> None:
        if self._status.state is EngineState.DRAINING:
            return
        if fault is None:
            if self._status.state is EngineState.FAILED:
                self._status.fire(Event.START)
            if self._status.state is EngineState.STARTING:
                self._status.fire(Event.LOADED)
                self._status.last_error = None
                self._logger.info("is ready")
            return
        is_new = self._status.state is not EngineState.FAILED or event != self._failure
        if self._status.state is not EngineState.FAILED:
            self._status.fire(Event.FAIL)
        self._status.last_error, self._failure = fault, event
        if is_new:  # its words may change with each check
            self._logger.error("%s: %s", event, fault)


async def _read_facts(probe: EngineProbe) -> EngineFacts:
    """Return the facts of a server; of one that is not vLLM only its models."""
    facts = await probe.fetch_facts()
    if facts.version is None:
        return facts
    tasks, kv_tokens = await asyncio.gather(probe.fetch_tasks(), probe.fetch_kv_tokens())
    return replace(facts, supported_tasks=tasks, kv_cache_tokens=kv_tokens)
