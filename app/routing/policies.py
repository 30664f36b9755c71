"""Selection policies: each chooses a replica for a request; synchronous, no I/O.

To add a policy, write a class with `choose`, add it to `POLICIES` at the end of this file and its
name to `ModelSettings.policy`.

The affinity policies keep together what belongs together. vLLM reuses the KV cache of a prompt
prefix on the replica that computed it, so the next turn of a conversation is cheap where the
previous one ran. But a session with many concurrent requests, or a system prompt that all clients
send, must not overload one replica while others idle: a replica above its load bound is skipped, as
in consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
tests/app/routing/simulation.py has the figures.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol
from zlib import crc32

from app.routing.replica import Replica
from engines.base import EngineState

# Load bound of a replica, as a multiple of the mean in flight; 1.25 in that paper and at Vimeo.
MAX_LOAD_RATIO = 1.25
# Added to the bound, since with few requests one replica may well have them all. In the simulation
# 1 splits sessions under light load, and 3 keeps shared prefixes on one replica under heavy load.
LOAD_SLACK = 2
# 128 tokens of English: vLLM's blocks of 16 are too many to look up, and a turn is longer.
BLOCK_BYTES = 512
# Only the first 64 KiB of a longer prompt count. Their checksum takes 60 µs.
MAX_PROMPT_BLOCKS = 128
# Names of engines that a policy remembers, at least and as a multiple of those present: names of
# discovered servers come and go for months.
MIN_KNOWN_ENGINES = 64
KNOWN_ENGINES_RATIO = 2
# Bound of the prefix index: 65536 blocks are 32 MiB of text in 11 MiB of memory.
MAX_KNOWN_BLOCKS = 65536


class RoutingHints(Protocol):
    """Properties of a request that policies choose by; each is computed only when it is read."""

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


class LeastLoaded:
    """Chooses the replica with the fewest requests in flight; ties take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        count = len(candidates)
        if count < 2:
            return candidates[0] if candidates else None
        self._turn += 1
        ring = (candidates[(self._turn + step) % count] for step in range(count))
        return min(
            ring,
            key=lambda r: (
                r.engine.state is not EngineState.READY,
                r.in_flight * r.weight + r.offset,
            ),
        )


class RoundRobin:
    """Chooses the replica whose turn was longest ago, regardless of its load.

    A plain index would give the turns of a replica that left to the one after it.
    """

    def __init__(self) -> None:
        self._turn = 0
        # Latest turn by engine name, bounded by `max_known_engines`.
        self._turns: dict[str, int] = {}

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if not candidates:
            return None
        turns = self._turns
        chosen = min(ready_or_all(candidates), key=lambda r: turns.get(r.engine.name, 0))
        self._turn += 1
        turns[chosen.engine.name] = self._turn
        if len(turns) > max_known_engines(candidates):
            # An engine without a turn is as good as one whose turn was longest ago.
            del turns[min(turns, key=turns.__getitem__)]
        return chosen


class SessionAffinity:
    """Chooses by rendezvous hashing of the session: one replica more or less moves 1/n of them."""

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return choose_by_rendezvous(within_load_bound(candidates), hints.session())


class PrefixAffinity:
    """Chooses the replica that was sent the longest prefix of the prompt; ties by `LeastLoaded`.

    An unknown prefix goes where every gateway would send it. The index maps blocks to replicas; the
    key of a block is the checksum of the prompt up to its end, and the least recently used are
    evicted. A wrong entry (a block that vLLM has evicted, two prompts with one checksum) costs the
    time of a prefill and nothing else.
    """

    def __init__(self, max_known: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_known = max_known
        # Bit set of the engines that were sent a block, by its checksum; most recently used last.
        self._known: OrderedDict[int, int] = OrderedDict()
        # Bit of an engine by its name, bounded by `max_known_engines`.
        self._bits: dict[str, int] = {}
        self._tie_breaker = LeastLoaded()

    def __len__(self) -> int:
        """Number of known blocks."""
        return len(self._known)

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        blocks = block_checksums(hints.prompt(MAX_PROMPT_BLOCKS * BLOCK_BYTES))
        eligible = within_load_bound(candidates)
        bits = {replica: self._bit(replica, candidates) for replica in eligible}
        owners = self._find_owners(blocks, sum(bits.values()))
        chosen: Replica | None
        if blocks and not owners:
            chosen = choose_by_rendezvous(eligible, b"%d" % blocks[0])
        else:
            chosen = self._tie_breaker.choose(
                [replica for replica in eligible if bits[replica] & owners] or eligible, hints
            )
        assert chosen is not None
        self._remember(blocks, bits[chosen])
        return chosen

    def _bit(self, replica: Replica, candidates: Sequence[Replica]) -> int:
        bit = self._bits.get(replica.engine.name)
        if bit is None:
            bit = 1 << len(self._bits)
            if len(self._bits) >= max_known_engines(candidates):
                # What the index has of the engine that left passes to the one that came.
                present = {candidate.engine.name for candidate in candidates}
                bit = self._bits.pop(next(name for name in self._bits if name not in present))
            self._bits[replica.engine.name] = bit
        return bit

    def _find_owners(self, blocks: Sequence[int], among: int) -> int:
        """Return the bits of the engines that have the most of these blocks from the first on."""
        owners = 0
        for block in blocks:
            among &= self._known.get(block, 0)
            if not among:
                break
            owners = among
        return owners

    def _remember(self, blocks: Sequence[int], bit: int) -> None:
        known = self._known
        # The end of a prompt is evicted before its prefix, without which it is useless; so in vLLM.
        for block in reversed(blocks):
            known[block] = known.get(block, 0) | bit
            known.move_to_end(block)
        while len(known) > self._max_known:
            known.popitem(last=False)


def max_known_engines(candidates: Sequence[Replica]) -> int:
    """Return the number of engine names to remember; more than there are candidates."""
    return max(MIN_KNOWN_ENGINES, KNOWN_ENGINES_RATIO * len(candidates))


def ready_or_all(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Return the candidates that are READY; all of them if none is."""
    return [r for r in candidates if r.engine.state is EngineState.READY] or candidates


def within_load_bound(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Return the candidates of `ready_or_all` that are within the load bound; at least one."""
    ready = ready_or_all(candidates)
    total = max(sum(r.in_flight * r.weight + r.offset for r in ready), 0)
    bound = MAX_LOAD_RATIO * total / len(ready) + LOAD_SLACK
    return [r for r in ready if r.in_flight * r.weight + r.offset < bound]


def choose_by_rendezvous(candidates: Sequence[Replica], key: bytes) -> Replica:
    """Return the candidate for a key; every gateway with these engines returns the same."""
    seed = blake2b(key, digest_size=16).digest()
    return max(
        candidates,
        key=lambda r: blake2b(r.engine.name.encode(), digest_size=8, key=seed).digest(),
    )


def block_checksums(prompt: bytes) -> list[int]:
    """Return for each whole block of a prompt the checksum of the prompt up to its end."""
    checksum = 0
    found: list[int] = []
    for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
        checksum = crc32(prompt[end - BLOCK_BYTES : end], checksum)
        found.append(checksum)
    return found


# Every policy by its name in the configuration (`models[].policy`).
POLICIES: Mapping[str, type[SelectionPolicy]] = {
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
    "round_robin": RoundRobin,
    "session": SessionAffinity,
}
