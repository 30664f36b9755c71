"""The interface between the gateway and an engine: whatever runs a model. Standard library only.

EngineError                 the engine did not do what was asked
├── EngineNotReady          nothing was sent: retrying on another replica is safe
│   └── ConnectTimeout      the connection was not accepted in time
├── EngineTimeout           the engine took the request and was too slow
│   ├── FirstByteTimeout    no response began
│   └── StallTimeout        the response began, then no byte arrived
├── EngineDied              the connection broke before the response was complete
├── EngineDrained           the stream was interrupted on purpose: its engine is drained
└── EngineProtocolError     the response is not HTTP/1.1 within the limits
"""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from engines.adapters import AdapterPhase, AdapterSources, AdapterState
from engines.changes import ChangeNotifier
from engines.lifecycle import EngineState, Event, after

__all__ = [
    "SERVING",
    "ChangeNotifier",
    "ConnectTimeout",
    "Engine",
    "EngineCapabilities",
    "EngineDied",
    "EngineDrained",
    "EngineError",
    "EngineFacts",
    "EngineNotReady",
    "EngineProtocolError",
    "EngineRequest",
    "EngineResponse",
    "EngineState",
    "EngineStatus",
    "EngineTimeout",
    "FirstByteTimeout",
    "Headers",
    "Progress",
    "StallTimeout",
    "Start",
]

Headers = Sequence[tuple[bytes, bytes]]


class EngineError(Exception):
    """The engine did not do what was asked. The text is fit for an operator's log."""

    # The value of the label `reason` in metrics: public, so it outlives the name of the class.
    reason: ClassVar[str] = "EngineError"


class EngineNotReady(EngineError):
    """Nothing of the request was sent to the engine, so retrying on another replica is safe."""

    reason = "EngineUnavailable"


class ConnectTimeout(EngineNotReady):
    """The engine's address did not accept a connection in time."""

    reason = "ConnectTimeout"


class EngineTimeout(EngineError):
    """The engine took the request and was too slow."""

    reason = "EngineTimeout"


class FirstByteTimeout(EngineTimeout):
    """No response began within the first-byte timeout."""

    reason = "FirstByteTimeout"


class StallTimeout(EngineTimeout):
    """A response began, then no byte arrived for the stall timeout."""

    reason = "StallTimeout"


class EngineDied(EngineError):
    """The connection ended before the response was complete."""

    reason = "EngineDied"


class EngineDrained(EngineError):
    """The stream was interrupted on purpose: its engine is drained. No fault of the engine's."""

    reason = "EngineDrained"


class EngineProtocolError(EngineError):
    """The response is not HTTP/1.1 within the limits."""

    reason = "EngineProtocolError"


# An engine in these states works on requests.
SERVING = (EngineState.READY, EngineState.DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts that an engine reports over HTTP and in its log; None: not reported.

    Seconds and GiB are the engine's own figures, of one rank where it reports for one.
    """

    version: str | None = None
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    attention_backend: str | None = None
    weights_load_s: float | None = None
    weights_gib: float | None = None
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    # Requests of the maximum length that the KV cache holds at once.
    max_concurrency: float | None = None
    compile_s: float | None = None
    graph_capture_s: float | None = None
    graph_capture_gib: float | None = None
    init_s: float | None = None
    # vLLM's sampling defaults that the model's generation_config.json overrides.
    sampling_defaults: Mapping[str, float | int | str | bool] | None = None
    chat_template_format: str | None = None
    supported_tasks: tuple[str, ...] | None = None

    def updated(self, newer: "EngineFacts") -> "EngineFacts":
        """Return these facts, replaced by those that `newer` has."""
        known = {
            name: value for name, value in dataclasses.asdict(newer).items() if value is not None
        }
        return dataclasses.replace(self, **known)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a start: a phase in words and, where the engine counts, k of n."""

    phase: str
    done: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A start that is under way, or that begins by itself."""

    # Since it began; 0 before that.
    elapsed_s: float
    # From its beginning to READY, a pause before it included, as the previous start took; None:
    # unknown.
    expected_s: float | None
    # The previous start failed, and this one may as well.
    after_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The operations that a kind of engine has. Callers ask for these, never for a class."""

    # The gateway starts and stops it; else it runs elsewhere, and its state is only observed.
    managed: bool = False
    # `unload` gives its memory back, `clear_failed` keeps it down after a failure.
    unloadable: bool = False
    # `sleep` is supported, where the configuration has a `sleep_level`.
    can_sleep: bool = False
    # Its output can be followed in `engine.log` of its run directory.
    has_log: bool = False
    # It may run on another machine: its memory is not counted here.
    elsewhere: bool = False


class EngineRequest(msgspec.Struct, frozen=True):
    """One HTTP request for an engine. `target` is path and query; `headers` have no framing."""

    method: str
    target: str
    headers: Headers
    body: bytes


class EngineResponse(Protocol):
    """A response whose head has arrived; the body is pulled."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def ended(self) -> bool:
        """True when nothing is left: the next `read` returns b"" without waiting."""

    def take(self) -> bytes:
        """Return all bytes that have arrived; b"" where there are none."""

    def put_back(self, data: bytes) -> None:
        """Put bytes before all others: they were read to look at them."""

    async def read(self) -> bytes:
        """Return all bytes that have arrived, waiting for the first; b"" at the end.

        Raises EngineDied, EngineProtocolError, StallTimeout or the error of `interrupt`, after the
        bytes that came before.
        """

    async def pump(
        self,
        sink: Callable[[bytes, bool], bool],
        chunk_sink: Callable[[bytes], bool] | None = None,
    ) -> bool:
        """Pass the body to `sink` as it arrives, coalesced; no asyncio task wakes for a piece.

        `sink` gets a piece, and whether it is the last; it returns whether it takes more at once.
        Returns True at the end of the body, False when the sink takes no more: what arrives then
        waits for the next `read` or `pump`. Raises what `read` raises, and what the sink raises.

        `chunk_sink` is asked first, where bytes are what may be one chunk with its framing (RFC
        9112, section 7.1): it returns True if they are, and it has taken them, else does nothing.
        """

    def interrupt(self, error: EngineError) -> None:
        """Abort generation; `read` and `pump` raise `error` after the bytes that have arrived.

        Does nothing once the response is complete, has failed, or was closed or interrupted.
        """

    def close(self) -> None:
        """Release the response. Before the end of the body this aborts generation."""


class EngineStatus:
    """The state of one engine and what is known of it.

    One task of the engine writes it; everything else reads it through `Engine`.
    """

    __slots__ = (
        "_facts", "adapters", "changes", "last_error", "load_s", "memory_gib", "restarts", "since",
        "state", "wanted_adapters",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = EngineState.STOPPED
        self.since = time.time()
        self.changes = ChangeNotifier()
        self._facts = EngineFacts()
        self.last_error: str | None = None
        self.restarts = 0
        self.load_s: float | None = None
        self.memory_gib: float | None = None
        # The adapters that it should have; written by callers.
        self.wanted_adapters: AdapterSources = {}
        # The state of each that it has or should have, by name.
        self.adapters: Mapping[str, AdapterState] = {}

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @facts.setter
    def facts(self, facts: EngineFacts) -> None:
        """Set new facts and notify of the change."""
        self._facts = facts
        self.changes.notify()

    def note_adapter(self, name: str, state: AdapterState | None) -> None:
        """Set the state of an adapter, None: it is not there; and notify of the change."""
        others = {one: at for one, at in self.adapters.items() if one != name}
        self.adapters = others if state is None else {**others, name: state}
        self.changes.notify()

    def fire(self, event: Event) -> None:
        """Move to the state that follows. Raises IllegalTransition."""
        before, self.state = self.state, after(self.state, event)
        if self.state is not before:
            self.since = time.time()
        self.changes.notify()


class Engine(ABC):
    """One running (or startable) model server.

    One task of the engine writes its state; callers read it and ask for an outcome.
    """

    # As the configuration calls it.
    kind: str
    capabilities: EngineCapabilities = EngineCapabilities()

    def __init__(self, name: str) -> None:
        self._name = name
        self._status = EngineStatus()
        # Set for good before the last stop of an engine that belongs to no model any more: a caller
        # that has found it before must not start it again.
        self.retired = False
        # An operator restarts it: it is going to be READY again, whatever its state is now.
        self.is_restarted = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> EngineState:
        return self._status.state

    @property
    def since(self) -> float:
        """The time of the last change of state, in seconds since 1970."""
        return self._status.since

    @property
    def changes(self) -> ChangeNotifier:
        """The event of every change of `state`, `facts`, `starting`, `given_up` and `adapters`."""
        return self._status.changes

    @property
    def facts(self) -> EngineFacts:
        return self._status.facts

    @property
    def adapters(self) -> Mapping[str, AdapterState]:
        """The state of each adapter that it has or should have, by name."""
        return self._status.adapters

    def has_adapter(self, name: str, source: str | None) -> bool:
        """Return whether it has loaded an adapter from there."""
        state = self._status.adapters.get(name)
        return (
            state is not None
            and state.phase is AdapterPhase.LOADED
            and (state.source is None or state.source == source)
        )

    def is_loading(self, name: str, source: str | None) -> bool:
        """Return whether an adapter is being loaded, or is there from another path.

        Then the engine is about to load it from the new path, or has, and a reload is about to say
        so.
        """
        state = self._status.adapters.get(name)
        return (
            state is not None
            and state.phase is not AdapterPhase.FAILED
            and not self.has_adapter(name, source)
        )

    def want_adapters(self, wanted: AdapterSources) -> None:
        """Have it load these adapters, and unload all others; it goes on serving meanwhile."""
        if self._status.wanted_adapters != wanted:
            self._status.wanted_adapters = wanted
            self._status.changes.notify()

    @property
    def last_error(self) -> str | None:
        """The reason of its last failure, and what to do where that is known, in one line."""
        return self._status.last_error

    @property
    def restarts(self) -> int:
        """The number of restarts after a failure."""
        return self._status.restarts

    @property
    def load_s(self) -> float | None:
        """Seconds that its last start took, from the first process to READY."""
        return self._status.load_s

    @property
    def memory_gib(self) -> float | None:
        """Memory that it takes while it is loaded, declared or measured; None: not known."""
        return self._status.memory_gib

    @property
    def pid(self) -> int | None:
        """The process of its API server, where that is a process of the gateway's."""
        return None

    @property
    def shared_id(self) -> str | None:
        """The identity under which other gateways reach it too; None: only this one does.

        Equal in all gateways that reach it, and of no other engine.
        """
        return None

    @property
    def progress(self) -> Progress | None:
        """The progress of its start while it is STARTING, as far as the engine reports it."""
        return None

    @property
    def starting(self) -> Start | None:
        """The start that will make it READY; None: there is none, or the previous one failed."""
        return None

    @property
    def blocked_by(self) -> str | None:
        """The kind of fault that keeps it down until an operator acts; None: there is none.

        In words that clients may read: nothing of the configuration is in them.
        """
        return None

    @property
    def given_up(self) -> bool:
        """True when it failed and will not be restarted by itself."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Return in one line what runs, without secrets."""

    @abstractmethod
    async def ensure_ready(self, deadline: float) -> None:
        """Start or wake it if need be and return once it is READY.

        `deadline` is in the event loop's time. Raises EngineNotReady when it passes, and at once
        when the start fails, though a restart may follow.
        """

    @abstractmethod
    def send(self, request: EngineRequest) -> Coroutine[Any, Any, EngineResponse]:
        """Send a request; return when the head of the response is here. Raises EngineError."""

    @abstractmethod
    async def exposition(self) -> bytes:
        """Return its own Prometheus series, as the engine writes them.

        Does not count as a request, and neither starts nor wakes the engine. Raises EngineError,
        soon.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new requests and return when none is in flight."""

    @abstractmethod
    async def stop(self, grace: float) -> None:
        """Stop it, within `grace` seconds if possible, by force after that. Never raises.

        When this returns none of its processes is left; `ensure_ready` starts it again.
        """

    async def unload(self) -> None:
        """Give its memory back once nothing is in flight; `ensure_ready` loads it again.

        New requests are refused at once. Raises EngineNotReady where it is not `unloadable`.
        """
        raise EngineNotReady(f"engine {self._name} cannot be unloaded")

    async def clear_failed(self) -> None:
        """End what is left of it after a failure; it stays FAILED until it is started again.

        Raises EngineNotReady where it is not `unloadable`.
        """
        raise EngineNotReady(f"engine {self._name} cannot be unloaded")

    async def sleep(self, level: int) -> None:
        """Put it into sleep mode once nothing is in flight. Raises EngineNotReady."""
        raise EngineNotReady(f"engine {self._name} has no sleep mode")

    async def release(self) -> None:  # noqa: B027 - not abstract: most kinds end with the gateway
        """Leave it running for the next gateway; does nothing where it cannot be left."""

    def last_start_s(self) -> float | None:
        """Return the seconds that its last load took, by any gateway; None: unknown. May block."""
        return None
