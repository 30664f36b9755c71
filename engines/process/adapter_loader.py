"""Loads LoRA adapters into a vLLM server and unloads them, as the configuration has them.

The routes exist only with VLLM_ALLOW_RUNTIME_LORA_UPDATING, on the engine's own socket, which only
the gateway can open. vLLM's list of models says which adapters a server has, so a server that was
adopted, or that answered too late, is treated like any other: list, compare, change.

vLLM takes an adapter's weights to be those of its name and path, also in its prefix cache. So an
adapter from another path is unloaded and loaded; requests that run go on with the old weights.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable

from engines.adapters import AdapterPhase, AdapterState
from engines.base import EngineError, EngineRequest, EngineState, EngineStatus
from engines.http import Http1Client, read_body
from engines.logs import EngineLogger
from engines.output import redact_line

log = logging.getLogger(__name__)

# Seconds until an adapter that failed to load is tried again.
RETRY_S = 60.0
# Seconds in which requests that chose the engine before arrive there; the adapter is unloaded then.
SETTLE_S = 1.0
MAX_BODY_BYTES = 1024 * 1024
# vLLM's words around the reason.
_PREFIX = "Call to add_lora method failed: Worker failed with error "
_SUFFIX = ", please check the stack trace above for the root cause"


class AdapterFault(Exception):
    """The server did not do what was asked; the text has its reason, in one line."""


class AdapterLoader:
    """Keeps the adapters of one engine as wanted, through all of its runs. It has one writer.

    An engine that dies while it loads an adapter does not get that one again, from this path: the
    engine would die at every restart.
    """

    def __init__(
        self,
        name: str,
        status: EngineStatus,
        control: Http1Client,
        find_fault: Callable[[str], str | None],
    ) -> None:
        """`find_fault` returns why an adapter cannot be loaded from a path; it may block."""
        self._logger = EngineLogger(log, name)
        self._status = status
        self._control = control
        self._find_fault = find_fault
        # What the server has, by name; None: it has to be asked.
        self._present: dict[str, str] | None = None
        # The one that is being loaded, and those that the engine died of.
        self._loading: tuple[str, str] | None = None
        self._fatal: set[tuple[str, str]] = set()

    def begin_run(self) -> None:
        """Forget what the previous process had."""
        if self._loading is not None:
            self._fatal.add(self._loading)
            self._loading = None
        self._present = None
        self._status.adapters = {}

    def end_run(self) -> None:
        """Take note that the process was stopped: it did not die of what it was loading."""
        self._loading = None
        self._status.adapters = {}

    async def load(self) -> None:
        """Load and unload until the server has what is wanted, as far as that is possible."""
        wanted = {name: path for name, path in self._status.wanted_adapters.items() if path}
        for name, state in self._status.adapters.items():
            if state.phase is AdapterPhase.FAILED and name not in wanted:
                self._status.note_adapter(name, None)
        if self._present is None:
            if not wanted:
                return
            self._present = await self._list()
            if self._present is None:
                return
        for name in [*self._present]:
            if wanted.get(name) != self._present[name]:
                await self._unload(name, replaced=name in wanted)
        for name, path in wanted.items():
            if name in self._present:
                self._note(name, path, AdapterPhase.LOADED)
            elif not self._has_failed(name, path):
                await self._load(name, path)
                if self._present is None:  # it is gone, or about to be
                    return

    async def load_again(self) -> None:
        """Load every adapter anew: sleep mode has dropped the weights. Raises AdapterFault.

        Not by `load_inplace`, with which vLLM 0.32 goes on to read the files for every batch, and
        keeps an adapter without weights where they have gone.
        """
        present = await self._list()
        if present is None:
            raise AdapterFault("it does not list its adapters")
        for name in present:
            await self._post("unload", {"lora_name": name})
            self._status.note_adapter(name, None)
        self._present = {}
        await self.load()

    async def keep(self) -> None:
        """Load and unload at every change of what is wanted; retry what failed. Never returns."""
        while True:
            change = self._status.changes.next()  # before the pass: no later change is missed
            wanted = self._status.wanted_adapters
            if self._status.state is not EngineState.READY:  # asleep, or going
                await change
                continue
            await self.load()
            try:
                async with asyncio.timeout(RETRY_S):
                    while self._status.wanted_adapters is wanted:
                        await change
                        change = self._status.changes.next()
            except TimeoutError:
                self._forget_failures()
            finally:
                change.cancel()

    def _has_failed(self, name: str, path: str) -> bool:
        state = self._status.adapters.get(name)
        if (name, path) in self._fatal:
            self._note(name, path, AdapterPhase.FAILED, "the engine died while it loaded it")
            return True
        return state is not None and state.phase is AdapterPhase.FAILED and state.source == path

    def _forget_failures(self) -> None:
        for name, state in self._status.adapters.items():
            if state.phase is AdapterPhase.FAILED and (name, state.source) not in self._fatal:
                self._status.note_adapter(name, None)
                self._present = None

    async def _load(self, name: str, path: str) -> None:
        self._note(name, path, AdapterPhase.LOADING)
        fault = await asyncio.to_thread(self._find_fault, path)
        if fault is None:
            self._loading = (name, path)
            try:
                await self._post("load", {"lora_name": name, "lora_path": path})
            except AdapterFault as error:
                # It may have been loaded all the same, by an earlier request.
                self._present = await self._list()
                fault = None if (self._present or {}).get(name) == path else str(error)
            else:
                self._loading = None
        if fault is not None:
            self._note(name, path, AdapterPhase.FAILED, fault)
            self._logger.error(": adapter %s not loaded: %s", name, fault)
            return
        assert self._present is not None
        self._present[name] = path
        self._note(name, path, AdapterPhase.LOADED)
        self._logger.info(": adapter %s loaded", name)

    async def _unload(self, name: str, *, replaced: bool) -> None:
        assert self._present is not None
        path = self._present[name]
        if replaced:
            self._note(name, path, AdapterPhase.LOADING)
        else:
            self._status.note_adapter(name, None)
        await asyncio.sleep(SETTLE_S)
        try:
            await self._post("unload", {"lora_name": name})
        except AdapterFault as fault:
            self._logger.warning(": adapter %s not unloaded: %s", name, fault)
        else:
            self._logger.info(": adapter %s unloaded", name)
        del self._present[name]

    def _note(self, name: str, path: str, phase: AdapterPhase, reason: str | None = None) -> None:
        state = AdapterState(path, phase, reason)
        if self._status.adapters.get(name) != state:
            self._status.note_adapter(name, state)

    async def _list(self) -> dict[str, str] | None:
        """Return the server's adapters with their paths; None where it does not answer."""
        try:
            _, body = await self._send(EngineRequest("GET", "/v1/models", (), b""))
            found = {
                str(card["id"]): str(card["root"])
                for card in json.loads(body)["data"]
                if card.get("parent") is not None
            }
        except (AdapterFault, ValueError, LookupError, TypeError, AttributeError):
            return None
        self._loading = None  # it lives
        return found

    async def _post(self, verb: str, members: dict[str, object]) -> None:
        """Raise AdapterFault unless the server did it."""
        headers = ((b"content-type", b"application/json"),)
        body = json.dumps(members).encode()
        request = EngineRequest("POST", f"/v1/{verb}_lora_adapter", headers, body)
        status, reply = await self._send(request)
        if status != 200:
            raise AdapterFault(_reason(reply) or f"{request.target} answered {status}")

    async def _send(self, request: EngineRequest) -> tuple[int, bytes]:
        try:
            response = await self._control.send(request)
            with contextlib.closing(response):
                return response.status, await read_body(response, MAX_BODY_BYTES)
        except EngineError as error:
            raise AdapterFault(str(error)) from None


def _reason(reply: bytes) -> str | None:
    """Return the reason in an error of vLLM's, without what is around it."""
    try:
        message = str(json.loads(reply)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None
    text = " ".join(message.removeprefix(_PREFIX).removesuffix(_SUFFIX).split()).strip("'\"")
    return redact_line(text[:400]) or None
