"""What selection policies have in common: their protocol, the load bound and rendezvous hashing."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from app.routing.replica import Replica
from app.settings import SlotsPerEngine
from engines.base import EngineState

# Load bound of a replica, as a multiple of the mean in flight; 1.25 at Vimeo, and in the paper on
# consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
MAX_LOAD_RATIO = 1.25
# Added to the bound, since with few requests one replica may well have them all: their batch has
# room. Real engines with 16 places had 77 % of prompts cached with 2 or 3, 79 to 81 % with 5 to 8.
LOAD_SLACK = 5
# Of requests that an engine may get at once, one in so many is the most slack: a small batch has
# less room.
SLOTS_PER_SLACK = 3
# Names of engines that a policy remembers, at least and as a multiple of those present: names of
# discovered servers come and go for months.
MIN_KNOWN_ENGINES = 64
KNOWN_ENGINES_RATIO = 2


class ReportedTokens(NamedTuple):
    """Tokens of a request as its engine reported them."""

    prompt: int
    cached: int  # of the prompt
    answer: int  # that the next turn may repeat


class RoutingHints(Protocol):
    """Properties of a request that policies choose by; each is computed only when it is read."""

    # Written by a policy that knows it: tokens of the prompt that the chosen replica has to compute
    # because it has not cached them, estimated.
    uncached_tokens: int
    # Written by a policy that learns from it: takes what the engine reported, at the end.
    on_end: Callable[[ReportedTokens | None], None] | None
    # Requests that each engine may get at once; None: no limit.
    slots: SlotsPerEngine | None

    def session(self) -> bytes:
        """Return the session key: equal for the requests of one session, and for no others."""

    def prompt(self, most: int) -> bytes:
        """Return up to `most` bytes; prompts with a common prefix have a common prefix here."""


class SelectionPolicy(Protocol):
    """Chooses a replica.

    A replica that is not READY comes last rather than never: a remote server may have come back
    since it was probed, and an engine that cannot serve refuses at no cost.
    """

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        """Return the replica to send to, or None when there is no candidate."""


def max_known_engines(candidates: Sequence[Replica]) -> int:
    """Return the number of engine names to remember; more than there are candidates."""
    return max(MIN_KNOWN_ENGINES, KNOWN_ENGINES_RATIO * len(candidates))


def ready_or_all(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Return the candidates that are READY; all of them if none is."""
    return [r for r in candidates if r.engine.state is EngineState.READY] or candidates


def within_load_bound(
    candidates: Sequence[Replica], slots: SlotsPerEngine | None = None
) -> Sequence[Replica]:
    """Return the candidates of `ready_or_all` that are within the load bound; at least one."""
    ready = ready_or_all(candidates)
    total = max(sum(r.in_flight * r.weight + r.offset for r in ready), 0)
    bound = MAX_LOAD_RATIO * total / len(ready) + _slack(ready, slots)
    return [r for r in ready if r.in_flight * r.weight + r.offset < bound]


def _slack(ready: Sequence[Replica], slots: SlotsPerEngine | None) -> float:
    if slots is None:
        return LOAD_SLACK
    fewest = min(replica.target for replica in ready) if slots == "auto" else slots
    return min(fewest / SLOTS_PER_SLACK, LOAD_SLACK)


def rank_by_rendezvous(candidates: Sequence[Replica], key: bytes) -> list[Replica]:
    """Return the candidates in the order for a key, which is the same in every gateway.

    When a replica is lost, only the keys that it was first for have another first.
    """
    seed = blake2b(key, digest_size=16).digest()
    return sorted(
        candidates,
        key=lambda r: blake2b(r.engine.name.encode(), digest_size=8, key=seed).digest(),
        reverse=True,
    )
