"""Policies that keep together what belongs together, as long as that overloads nobody.

vLLM reuses the KV cache of a prompt that begins as an earlier one did, on the replica that computed
it. So the next turn of a conversation is cheap where the last one was. But a session that asks for
much at once, or a system prompt that everybody sends, must not drown one replica while others
idle: a replica that has more than its share is passed over, as in consistent hashing with bounded
loads (Mirrokni, Thorup, Zadimoghaddam 2016). tests/app/routing/simulation.py has the figures.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

from app.routing.policies import LeastLoaded, RoutingHints, able
from app.routing.replica import Replica

# How many times the mean a replica may have in flight; that paper's and Vimeo's 1.25.
SHARE = 1.25
# And so many more, since of few requests at once a replica may well have all. In the simulation 1
# tears sessions apart on a quiet day, and 3 leaves what many share to one replica on a busy one.
SLACK = 2
# 128 tokens of English: vLLM's blocks of 16 are too many to look at, and a turn is longer.
BLOCK_BYTES = 512
# Of a prompt that is longer the beginning decides. A checksum of 64 KiB takes 60 µs.
MOST_BLOCKS = 128
# What is known of prompts is bounded: 65536 blocks are 32 MiB of text in 11 MiB of memory.
MOST_KNOWN = 65536


class SessionAffinity:
    """A session's replica by rendezvous hashing: when one comes or goes, 1/n of sessions move."""

    def choose(self, candidates: Sequence[Replica], clues: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return by_rendezvous(with_room(candidates), clues.session())


class PrefixAffinity:
    """The replica that was sent the longest beginning of a prompt; equals as `LeastLoaded`.

    A beginning that nobody knows goes where every gateway would send it. Which replica was sent
    what is kept by blocks: a block is known by the checksum of the prompt up to its end, those
    unused for longest are forgotten first. An error (a block that vLLM has evicted, two prompts
    with one checksum) costs the time of a prefill, nothing else.
    """

    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most_known = most_known
        # Bits of the engines that were sent a block, by its checksum; used last stands last.
        self._known: OrderedDict[int, int] = OrderedDict()
        # An engine's bit by its name: there are as many as the configuration ever had.
        self._bits: dict[str, int] = {}
        self._equals = LeastLoaded()

    def __len__(self) -> int:
        """How many blocks are known."""
        return len(self._known)

    def choose(self, candidates: Sequence[Replica], clues: RoutingHints) -> Replica | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        blocks = checksums(clues.prompt(MOST_BLOCKS * BLOCK_BYTES))
        room = with_room(candidates)
        bits = {replica: self._bit(replica) for replica in room}
        owners = self._owners(blocks, sum(bits.values()))
        chosen: Replica | None
        if blocks and not owners:
            chosen = by_rendezvous(room, b"%d" % blocks[0])
        else:
            chosen = self._equals.choose(
                [replica for replica in room if bits[replica] & owners] or room, clues
            )
        assert chosen is not None
        self._note(blocks, bits[chosen])
        return chosen

    def _bit(self, replica: Replica) -> int:
        return self._bits.setdefault(replica.engine.name, 1 << len(self._bits))

    def _owners(self, blocks: Sequence[int], among: int) -> int:
        """Return the bits of those who know the most of these blocks from the first on."""
        owners = 0
        for block in blocks:
            among &= self._known.get(block, 0)
            if not among:
                break
            owners = among
        return owners

    def _note(self, blocks: Sequence[int], bit: int) -> None:
        known = self._known
        # Ends go before beginnings, without which they are worth nothing; so does vLLM evict.
        for block in reversed(blocks):
            known[block] = known.get(block, 0) | bit
            known.move_to_end(block)
        while len(known) > self._most_known:
            known.popitem(last=False)


def with_room(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Return the able candidates that have not more than their share; at least one."""
    ready = able(candidates)
    bound = SHARE * sum(r.in_flight for r in ready) / len(ready) + SLACK
    return [r for r in ready if r.in_flight < bound]


def by_rendezvous(candidates: Sequence[Replica], key: bytes) -> Replica:
    """Return the candidate of a key, which is the same in every gateway with these engines."""
    seed = blake2b(key, digest_size=16).digest()
    return max(
        candidates,
        key=lambda r: blake2b(r.engine.name.encode(), digest_size=8, key=seed).digest(),
    )


def checksums(prompt: bytes) -> list[int]:
    """Return the checksum of a prompt up to the end of each of its whole blocks."""
    checksum = 0
    found: list[int] = []
    for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
        checksum = crc32(prompt[end - BLOCK_BYTES : end], checksum)
        found.append(checksum)
    return found
