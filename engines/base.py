"""The door between the gateway and whatever runs a model. Standard library only.

EngineError                 an engine did not do what it was asked
├── EngineUnavailable       nothing reached it: another replica may be asked
│   └── ConnectTimeout      it did not accept the connection in time
├── EngineTimeout           it took the request and was too slow
│   ├── FirstByteTimeout    no answer began
│   └── StallTimeout        the answer began and then stood still
├── EngineDied              the connection broke before the answer was whole
└── EngineProtocolError     what it answered is not HTTP/1.1 within the limits
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Headers = Sequence[tuple[bytes, bytes]]


class EngineError(Exception):
    """An engine did not do what it was asked; the text is fit for an operator's log."""


class EngineUnavailable(EngineError):
    """Nothing of the request reached the engine, so asking another replica is safe."""


class ConnectTimeout(EngineUnavailable):
    """The engine's address did not accept a connection in time."""


class EngineTimeout(EngineError):
    """The engine took the request and was too slow."""


class FirstByteTimeout(EngineTimeout):
    """No answer began within the first-byte timeout."""


class StallTimeout(EngineTimeout):
    """An answer began, then no byte came for the stall timeout."""


class EngineDied(EngineError):
    """The connection ended before the answer was whole."""


class EngineProtocolError(EngineError):
    """The engine answered something that is not HTTP/1.1 within our limits."""


class EngineState(enum.StrEnum):
    """Where an engine is in its life; `lifecycle.py` has the table of moves."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    ASLEEP = "asleep"
    FAILED = "failed"


# An engine in these states works on requests.
SERVING = (EngineState.READY, EngineState.DRAINING)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine said of itself, on its door and in its log; None where it did not say.

    Seconds and GiB are the engine's own figures, of one rank where it speaks for one.
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
    # How many requests of the longest length the KV cache holds at once.
    max_concurrency: float | None = None
    compile_s: float | None = None
    graph_capture_s: float | None = None
    graph_capture_gib: float | None = None
    init_s: float | None = None
    # What the model's generation_config.json changed of vLLM's sampling defaults.
    sampling_defaults: Mapping[str, float | int | str | bool] | None = None
    chat_template_format: str | None = None
    supported_tasks: tuple[str, ...] | None = None

    def updated(self, told: "EngineFacts") -> "EngineFacts":
        """Return these facts, with what `told` knows in their place."""
        known = {
            name: value for name, value in dataclasses.asdict(told).items() if value is not None
        }
        return dataclasses.replace(self, **known)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start is: a phase in words, and where the engine counts, k of n."""

    phase: str
    done: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A start that is under way, or that begins without being asked for."""

    # Since it began; 0 before that.
    elapsed_s: float
    # From its beginning to READY, by the start before it, a wait before it included; None: unknown.
    expected_s: float | None


class EngineRequest(NamedTuple):
    """One HTTP request for an engine. `target` is path and query, `headers` hold no framing."""

    method: str
    target: str
    headers: Headers
    body: bytes


class EngineResponse(Protocol):
    """An answer whose head has arrived; the body is pulled."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def ended(self) -> bool:
        """Whether nothing is left: the next `read` returns b"" without waiting."""
        ...

    async def read(self) -> bytes:
        """Return all bytes that have arrived, waiting for the first; b"" at the end.

        Raises EngineDied, EngineProtocolError or StallTimeout, after the bytes that came before.
        """
        ...

    async def pump(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand the body to `sink` as it comes, each time what came together; no task wakes for it.

        `sink` returns whether it takes more at once. Returns True at the end of the body; False
        when the sink has had enough: what comes then waits for the next `read` or `pump`.
        While the last bytes are handed over, `ended` is True already. Raises what `read` raises,
        and what the sink raises.
        """
        ...

    def close(self) -> None:
        """Let go. Before the end of the body this aborts generation in the engine."""
        ...


class Engine(Protocol):
    """One running (or startable) model server. One task writes its state; others read."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def progress(self) -> Progress | None:
        """How far it is while it is STARTING, as far as it tells."""
        ...

    @property
    def last_error(self) -> str | None:
        """Why it last failed, and what to do where that is known, in one line."""
        ...

    @property
    def restarts(self) -> int:
        """How many times it was started again after it had failed."""
        ...

    @property
    def load_s(self) -> float | None:
        """How many seconds its last start took from the first process to READY."""
        ...

    @property
    def starting(self) -> Start | None:
        """The start that will make it READY; None: there is none, or the one before it failed."""
        ...

    @property
    def blocked_by(self) -> str | None:
        """The kind of fault that keeps it down until an operator acts; None: there is none.

        In words that clients may read: nothing of the configuration is in them.
        """
        ...

    def describe(self) -> str:
        """Return in one line what runs, without secrets."""
        ...

    async def ensure_ready(self, deadline: float) -> None:
        """Start or wake it if need be and return once it is READY.

        `deadline` is in the event loop's time. Raises EngineUnavailable when it is late, and at
        once when it fails, though it may be starting again by itself.
        """
        ...

    async def send(self, request: EngineRequest) -> EngineResponse:
        """Send a request and return when the head of the answer is here. Raises EngineError."""
        ...

    async def exposition(self) -> bytes:
        """Return its own Prometheus series, as it writes them.

        Counts as no request, and neither starts nor wakes it. Raises EngineError, soon.
        """
        ...

    async def drain(self) -> None:
        """Refuse new requests and return when none is in flight."""
        ...

    async def stop(self, grace: float) -> None:
        """End it, within `grace` seconds if it can, by force after that. Never raises.

        When this returns nothing of it is left; `ensure_ready` starts it again.
        """
        ...
