"""Bounds the memory of request bodies: in total, per key, per owner and per peer.

A body is counted as it arrives, so that announcing one reserves nothing, and held until its request
ends, since a retry sends it to another engine. Small bodies are not counted: the number of
connections bounds them.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from app.errors import RateLimited, ServiceUnavailable

# Bodies up to this size are not counted; 4,096 connections hold 64 MiB of them.
SMALL_BYTES = 16 * 1024
RETRY_S = 1


@dataclass(frozen=True, slots=True)
class BodyMemoryBounds:
    """The bounds, in bytes."""

    total: int
    per_key: int
    per_peer: int


class BodyMemory:
    """Counts the bytes of bodies in memory. A key, owner or peer without any has no entry.

    An owner of several bodies holds at most as much as is free, so whatever one takes, others find
    room: of two the second gets half of the rest (Choudhury and Hahne, "Dynamic Queue Length
    Thresholds for Shared-Memory Packet Switches", IEEE/ACM ToN 1998). A key without an owner is one
    of its own.
    """

    def __init__(self, bounds: BodyMemoryBounds) -> None:
        self.bounds = bounds
        self.held = 0
        self._by_key: dict[str, int] = {}
        self._by_owner: dict[str, int] = {}
        self._by_peer: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of keys, owners and peers with bytes in memory."""
        return len(self._by_key) + len(self._by_owner) + len(self._by_peer)

    def open(self, key_id: str, owner: str, peer: str) -> "HeldBody":
        """Return the account of one body: a context that gives back its bytes."""
        return HeldBody(self, key_id, owner or key_id, peer)

    def take(self, body: "HeldBody", size: int) -> None:
        """Count more bytes. Raises RateLimited and ServiceUnavailable, having counted nothing."""
        bounds = self.bounds
        of_key = self._by_key.get(body.key_id, 0) + size
        of_owner = self._by_owner.get(body.owner, 0) + size
        of_peer = self._by_peer.get(body.peer, 0) + size
        free = bounds.total - self.held - size
        if of_key > bounds.per_key:
            raise _limited(f"this key may have {bounds.per_key} bytes")
        if of_peer > bounds.per_peer:
            raise _limited(f"one address may have {bounds.per_peer} bytes")
        if of_owner > max(free, body.size + size):
            raise _limited("the keys of one owner may have as many bytes as are free for others")
        if free < 0:
            raise ServiceUnavailable("too many large requests are under way; try again")
        self.held += size
        self._by_key[body.key_id] = of_key
        self._by_owner[body.owner] = of_owner
        self._by_peer[body.peer] = of_peer
        body.size += size

    def give_back(self, body: "HeldBody") -> None:
        """Give back the bytes of a body."""
        size, body.size = body.size, 0
        if not size:
            return
        self.held -= size
        for counts, name in (
            (self._by_key, body.key_id), (self._by_owner, body.owner), (self._by_peer, body.peer),
        ):  # fmt: skip
            left = counts[name] - size
            if left:
                counts[name] = left
            else:
                del counts[name]


def _limited(bound: str) -> RateLimited:
    return RateLimited(
        f"{bound} of request bodies under way at once; try again when a request has ended",
        "body_bytes",
        RETRY_S,
    )


class HeldBody:
    """The bytes of one body, counted until the context is left."""

    __slots__ = ("_memory", "key_id", "owner", "peer", "size")

    def __init__(self, memory: BodyMemory, key_id: str, owner: str, peer: str) -> None:
        self._memory = memory
        self.key_id = key_id
        self.owner = owner
        self.peer = peer
        self.size = 0

    def take(self, size: int) -> None:
        """Count more bytes of the body. Raises RateLimited and ServiceUnavailable."""
        if size:
            self._memory.take(self, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.give_back(self)
