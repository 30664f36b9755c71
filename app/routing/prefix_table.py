"""The prompt prefixes that an engine was sent, as checksums. Pure.

A prompt is cut into blocks: of 512 bytes at first, then of 8 KiB, since a conversation that is long
already does not fork at its end. The key of a block is the checksum of the prompt up to its end.
A wrong entry (a block that vLLM has evicted, two prompts with one checksum) costs the time of a
prefill and nothing else.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

# 128 tokens of English: vLLM's blocks of 16 are too many to look up, and a turn is longer.
BLOCK_BYTES = 512
# Blocks of BLOCK_BYTES at the beginning of a prompt: a system prompt is shorter than their 64 KiB.
FINE_BLOCKS = 128
COARSE_BLOCK_BYTES = 8192
# Blocks of a prompt, and the bytes that they cover; what is beyond 1 MiB does not count.
MAX_PROMPT_BLOCKS = 248
FINE_BYTES = FINE_BLOCKS * BLOCK_BYTES
MAX_PROMPT_BYTES = FINE_BYTES + (MAX_PROMPT_BLOCKS - FINE_BLOCKS) * COARSE_BLOCK_BYTES


def block_checksums(prompt: bytes) -> list[int]:
    """Return for each whole block of a prompt the checksum of the prompt up to its end."""
    checksum = 0
    found: list[int] = []
    for end in range(BLOCK_BYTES, min(len(prompt), FINE_BYTES) + 1, BLOCK_BYTES):
        checksum = crc32(prompt[end - BLOCK_BYTES : end], checksum)
        found.append(checksum)
    first = FINE_BYTES + COARSE_BLOCK_BYTES
    for end in range(first, min(len(prompt), MAX_PROMPT_BYTES) + 1, COARSE_BLOCK_BYTES):
        checksum = crc32(prompt[end - COARSE_BLOCK_BYTES : end], checksum)
        found.append(checksum)
    return found


def prefix_bytes(blocks: int) -> int:
    """Return the length of the first blocks of a prompt."""
    fine = min(blocks, FINE_BLOCKS)
    return fine * BLOCK_BYTES + (blocks - fine) * COARSE_BLOCK_BYTES


class PrefixTable:
    """The prefixes that one engine was sent; the least recently used are forgotten.

    A prefix is used when a prompt is sent and again when its response ends: vLLM evicts no block of
    a request that runs, and counts its age from the end.

    Invariant: a known block was used no later than the blocks before it in its prompt, so that no
    block is forgotten before those that follow it, without which it would be useless; so in vLLM.
    """

    __slots__ = ("_bytes", "_max_bytes", "_sizes", "_tails", "since")

    def __init__(self, since: float) -> None:
        self.since = since  # when the engine, or its present process, became READY
        self._sizes: OrderedDict[int, int] = OrderedDict()  # by checksum; latest used last
        # Bytes that the engine has cached behind the last block of a prompt, by that block, which
        # is known: those of the rest of the prompt, and of its answer.
        self._tails: dict[int, tuple[int, int]] = {}
        self._bytes = 0  # sum of `_sizes`
        self._max_bytes = 1

    @property
    def fullness(self) -> float:
        """Share of its bound that it had at the latest prompt; 0 before the first."""
        return self._bytes / self._max_bytes

    def __len__(self) -> int:
        """Number of known blocks and tails."""
        return len(self._sizes) + len(self._tails)

    def find(self, checksums: Sequence[int]) -> tuple[int, int]:
        """Return how many bytes of a prompt's blocks are cached, and how many behind these may be.

        The latter are cached if they are the answer to a known prompt: so goes the next turn of a
        conversation. Their checksum cannot be known, for in that turn the client writes them.
        """
        known = self.count_known(checksums)
        cached = prefix_bytes(known)
        if not 0 < known < len(checksums) or checksums[known - 1] not in self._tails:
            return cached, 0
        rest, answer = self._tails[checksums[known - 1]]
        left = prefix_bytes(len(checksums)) - cached
        rest = min(rest, left)
        return cached + rest, min(answer, left - rest)

    def count_known(self, checksums: Sequence[int]) -> int:
        """Return how many blocks of a prompt are known, from the first on; it has one at least."""
        sizes = self._sizes
        if checksums[0] not in sizes:
            return 0
        if checksums[-1] in sizes:
            return len(checksums)
        return bisect_left(checksums, True, key=lambda checksum: checksum not in sizes)

    def remember(
        self, checksums: Sequence[int], max_bytes: int, tail: tuple[int, int] | None = None
    ) -> None:
        """Note that the engine uses a prompt, and forget what exceeds the bound.

        `tail`: bytes behind the last block, of the prompt and of its answer; None: not known yet.
        """
        sizes = self._sizes
        for number in range(len(checksums) - 1, -1, -1):
            checksum = checksums[number]
            if checksum in sizes:
                sizes.move_to_end(checksum)
            else:
                size = BLOCK_BYTES if number < FINE_BLOCKS else COARSE_BLOCK_BYTES
                sizes[checksum] = size
                self._bytes += size
        if tail is not None:
            self._tails[checksums[-1]] = tail
        self._max_bytes = max_bytes
        while self._bytes > max_bytes:
            self.forget(1)

    def forget(self, blocks: int) -> None:
        """Forget as many blocks, the least recently used first."""
        for _ in range(min(blocks, len(self._sizes))):
            checksum, size = self._sizes.popitem(last=False)
            self._bytes -= size
            self._tails.pop(checksum, None)
