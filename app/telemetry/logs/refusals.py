"""Bounds the access lines of refused requests, of which anyone can send thousands a second. Pure.

Each client, a key or an address, has some lines a second; the others are counted, and the counts
are logged from time to time.
"""

from collections import Counter

# Statuses of refusals for which a client needs no engine.
STATUSES = frozenset({400, 401, 403, 404, 405, 411, 413, 415, 426, 429, 431})
LINES_PER_S = 20
# Clients whose lines are counted at once; the others share one count.
MAX_CLIENTS = 1000
OTHERS = "other clients"


class RefusalCounts:
    """Decides which refusals get a line, and counts the others by client and status."""

    def __init__(self) -> None:
        self._second = 0
        self._lines: Counter[str] = Counter()  # of this second
        self._counts: Counter[tuple[str, int]] = Counter()
        self._clients: set[str] = set()  # of the counts

    def admit(self, client: str, status: int, second: int) -> bool:
        """Return whether a refusal of a client gets a line; else count it."""
        if second != self._second:
            self._second = second
            self._lines.clear()
        if client not in self._lines and len(self._lines) >= MAX_CLIENTS:
            client = OTHERS
        self._lines[client] += 1
        if self._lines[client] <= LINES_PER_S:
            return True
        if client not in self._clients and len(self._clients) >= MAX_CLIENTS:
            client = OTHERS
        self._clients.add(client)
        self._counts[client, status] += 1
        return False

    def take(self) -> list[tuple[str, int, int]]:
        """Return client, status and number of the counted refusals, and begin anew."""
        counts, self._counts = self._counts, Counter()
        self._clients.clear()
        return [(client, status, number) for (client, status), number in counts.items()]
