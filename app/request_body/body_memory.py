"""Bounds the memory of request bodies: in total, per key and per peer.

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
    """Counts the bytes of bodies in memory. A key or peer without any has no entry."""

    def __init__(self, bounds: BodyMemoryBounds) -> None:
        self.bounds = bounds
        self.held = 0
        self._by_key: dict[str, int] = {}
        self._by_peer: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of keys and peers with bytes in memory."""
        return len(self._by_key) + len(self._by_peer)

    def open(self, key_id: str, peer: str) -> "HeldBody":
        """Return the account of one body: a context that gives back its bytes."""
        return HeldBody(self, key_id, peer)

    def take(self, key_id: str, peer: str, size: int) -> None:
        """Count more bytes. Raises RateLimited and ServiceUnavailable, having counted nothing."""
        bounds = self.bounds
        of_key = self._by_key.get(key_id, 0) + size
        of_peer = self._by_peer.get(peer, 0) + size
        if of_key > bounds.per_key:
            raise RateLimited(
                f"this key may have {bounds.per_key} bytes of request bodies under way at once; "
                "try again when a request has ended",
                "body_bytes",
                RETRY_S,
            )
        if of_peer > bounds.per_peer:
            raise RateLimited(
                f"one address may have {bounds.per_peer} bytes of request bodies under way at "
                "once; try again when a request has ended",
                "body_bytes",
                RETRY_S,
            )
        if self.held + size > bounds.total:
            raise ServiceUnavailable("too many large requests are under way; try again")
        self.held += size
        self._by_key[key_id] = of_key
        self._by_peer[peer] = of_peer

    def give_back(self, key_id: str, peer: str, size: int) -> None:
        """Give back bytes that were taken."""
        self.held -= size
        for counts, name in ((self._by_key, key_id), (self._by_peer, peer)):
            left = counts[name] - size
            if left:
                counts[name] = left
            else:
                del counts[name]


class HeldBody:
    """The bytes of one body, counted until the context is left."""

    __slots__ = ("_key_id", "_memory", "_peer", "_size")

    def __init__(self, memory: BodyMemory, key_id: str, peer: str) -> None:
        self._memory = memory
        self._key_id = key_id
        self._peer = peer
        self._size = 0

    def take(self, size: int) -> None:
        """Count more bytes of the body. Raises RateLimited and ServiceUnavailable."""
        if size:
            self._memory.take(self._key_id, self._peer, size)
            self._size += size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        size, self._size = self._size, 0
        if size:
            self._memory.give_back(self._key_id, self._peer, size)
