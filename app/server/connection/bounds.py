"""What one client connection may take, and how many there may be, in all and per address."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """What one client connection may take, and how many there may be."""

    connections: int
    connections_per_peer: int
    header_timeout_s: float
    body_timeout_s: float
    # How long a client may leave unread what waits for it.
    stall_s: float


class PeerConnections:
    """Counts the open connections of a server by the address of the peer."""

    def __init__(self) -> None:
        # Only addresses that have connections, so it is no larger than their number.
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, address: str, limit: int) -> bool:
        """Count one more connection from an address, unless it has `limit` of them already."""
        count = self._counts.get(address, 0)
        if count >= limit:
            return False
        self._counts[address] = count + 1
        return True

    def release(self, address: str) -> None:
        """Count a connection no longer that `admit` has counted."""
        left = self._counts[address] - 1
        if left:
            self._counts[address] = left
        else:
            del self._counts[address]
