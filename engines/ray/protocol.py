"""The calls of the gateway to the connector, and what the connector and an engine's actor return.

Between the gateway and the connector, each line is JSON: the ID of a call and the call, or its
`Reply`, in any order. Actors are called by Ray, with the arguments that a call has, and return
JSON values: their code is that of the node, and of the gateway that has started them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from engines.ray.placement import Node
from engines.ray.ranks import Rank

# Of the methods of `EngineActor` and of what they return. An actor of another one is not adopted:
# its engine starts anew.
PROTOCOL = 4
# A line may hold a chunk of an engine's log.
MAX_LINE = 8 * 1024 * 1024

Result = TypeVar("Result")


class ClusterError(Exception):
    """The cluster did not do what was asked; the text says why, in one line."""

    kind = "cluster"


class ActorDead(ClusterError):
    """The actor of an engine is dead, or there is none."""

    kind = "actor"


class EngineRefused(ClusterError):
    """The engine cannot be started with this configuration."""

    kind = "refused"


class EngineOwned(ClusterError):
    """Another gateway owns the engine; the text is its name."""

    kind = "owned"


ERRORS = {error.kind: error for error in (ClusterError, ActorDead, EngineRefused, EngineOwned)}


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The address and key of an actor's engine, or of its rank."""

    protocol: int
    pid: int
    fingerprint: str
    host: str
    port: int | None  # None for a rank that does not serve
    key: str
    place: str
    rank: int
    nodes: int
    nice: int


class ActorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine, as its actor sees it."""

    exit: int | None  # only when the whole log has been read
    processes: dict[int, str]  # PID: state
    frozen: bool
    listens: bool
    log: str
    log_at: tuple[int, int] | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that an actor starts. The connector fills in the last three for each rank."""

    owner: str
    owner_name: str
    namespace: str
    fingerprint: str
    lease_s: float
    launcher: tuple[str, ...] | None  # default: the vLLM of the node
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    inherit: tuple[str, ...]
    withheld: tuple[str, ...]
    gpus: bool
    model_path: str | None
    files: tuple[str, ...]
    name: str
    node: str = ""
    rank: Rank = Rank()


class Call(msgspec.Struct, Generic[Result], kw_only=True, tag=True):
    """A call of the connector. `timeout_s` is the gateway's; the connector's own are shorter."""

    timeout_s: ClassVar[float] = 30.0  # Ray's calls wait for the head of a cluster that is down


class Connect(Call[None]):
    """Connect to the cluster. One of this machine alone takes 5 to 20 s to start."""

    timeout_s = 90.0
    address: str
    namespace: str


class ListNodes(Call[list[Node]]):
    """Return the living nodes with their resources."""


class ListEngines(Call[list[str]]):
    """Return the names of the engines that a gateway owns, and of places that it has left."""

    owner: str


class Claim(Call[list[Hello]]):
    """Claim an engine that runs; return its ranks.

    None if it does not run: then nothing is left of an earlier one.
    """

    name: str
    owner: str
    owner_name: str


class Reserve(Call[None]):
    """Ask for a place for an engine: on one node, or on as many different ones."""

    place: str
    needed: dict[str, float]
    nodes: int


class IsReserved(Call[bool]):
    """Return whether there is a place, after `wait_s` seconds at most."""

    place: str
    wait_s: float


class Start(Call[list[Hello]]):
    """Start every rank of an engine in its place; return how to reach them."""

    timeout_s = 200.0
    place: str
    needed: dict[str, float]
    nodes: int
    plan: Plan


class Watch(Call[ActorReport]):
    """Return the state of an actor's engine when it changes, after `wait_s` seconds at most.

    `log_at` and `listens` are what the previous call returned.
    """

    timeout_s = 40.0
    name: str
    owner: str
    keep: bool
    log_at: tuple[int, int] | None
    listens: bool
    wait_s: float


class Stop(Call[None]):
    """Stop an actor's engine gracefully, by force after `grace` seconds."""

    name: str
    owner: str
    grace: float


class Kill(Call[None]):
    """Kill every rank of an engine of this gateway; give its places back."""

    timeout_s = 50.0
    name: str
    owner: str


class UsedGib(Call[float | None]):
    """Return the memory that an actor's engine uses; None: not known."""

    name: str


class Remove(Call[None]):
    """Give a place back; Ray ends the actor that is there."""

    timeout_s = 8.0  # nothing waits for it
    place: str


PlaceCall = Reserve | IsReserved | Start | Remove
AnyCall = Connect | ListNodes | ListEngines | Claim | PlaceCall | Watch | Stop | Kill | UsedGib


class Reply(msgspec.Struct, frozen=True):
    """The outcome of the call with this ID: a result, or the kind and text of an error."""

    id: int
    result: msgspec.Raw = msgspec.Raw(b"null")
    kind: str | None = None
    error: str = ""


def result_type(call: Call[Any]) -> Any:
    """Return the type of a call's result."""
    (base,) = type(call).__orig_bases__  # type: ignore[attr-defined]
    (found,) = base.__args__
    return found
