"""Limits of client connections: their number, in all and per address, and their timeouts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Limits of a server's client connections."""

    connections: int
    connections_per_peer: int
    header_timeout_s: float
    body_timeout_s: float
    # Seconds before a client that has stopped reading is disconnected.
    stall_s: float


class PeerConnections:
    """Counts the open connections of a server by the address of the peer."""

    def __init__(self) -> None:
        # Only addresses with connections, so its size is bounded by their number.
        self._counts: dict[str, int] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, address: str, limit: int) -> bool:
        """Count a connection from an address; return False if it has `limit` of them already."""
        count = self._counts.get(address, 0)
        if count >= limit:
            return False
        self._counts[address] = count + 1
        self.total += 1
        return True

    def release(self, address: str) -> None:
        """Stop counting a connection that `admit` has counted."""
        self.total -= 1
        left = self._counts[address] - 1
        if left:
            self._counts[address] = left
        else:
            del self._counts[address]
