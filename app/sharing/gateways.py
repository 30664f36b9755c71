"""The gateways that serve the same engines as this one, as their reports say. Pure.

Two things age on their own. A **count** of requests expires SILENCE_S after its report: an old one
misleads routing. A **gateway** is dead, and the others divide its slots, when it was silent for
SILENCE_S while any other was heard. So an outage of Redis, a stalled event loop and a suspended
machine, in which nothing is heard at all, kill no gateway: the slots stay divided as they were, and
after the silence every gateway has SILENCE_S to be heard again.

Times are of one monotonic clock of this process; none is in a report.
"""

from collections import Counter
from collections.abc import Collection, Set
from dataclasses import dataclass

from app.sharing.report import Report, State

# Eight reports of a busy gateway, four of an idle one.
SILENCE_S = 2.0
# Other gateways that are known at once.
MAX_GATEWAYS = 64
# Most reports that count as lost at once: a sequence may also jump because it is forged.
MAX_LOST = 100


@dataclass(slots=True)
class _Gateway:
    """One other gateway."""

    sequence: int
    serving: bool
    engines: dict[str, int]  # those that this gateway serves too
    counted_at: float
    heard_at: float


class TooManyGateways(Exception):
    """A report of one gateway more than are known at once."""


class Gateways:
    """What is known of the other gateways."""

    def __init__(self, own_id: str) -> None:
        self.own_id = own_id
        self.lost = 0  # reports that did not arrive, as far as sequences tell
        # Counts the changes of `division`.
        self.divisions = 0
        self._others: dict[str, _Gateway] = {}
        self._own_engines: Set[str] = frozenset()
        self._elsewhere = Counter[str]()
        self._now = 0.0
        self._heard_at = 0.0  # any gateway, this one included

    def __len__(self) -> int:
        """Number of gateways that serve an engine of this one, itself included."""
        return 1 + sum(gateway.serving for gateway in self._others.values())

    @property
    def elsewhere(self) -> Counter[str]:
        """Requests of other gateways in flight, by engine key."""
        return self._elsewhere

    def set_own_engines(self, keys: Collection[str]) -> None:
        """Set the engines of this gateway; of others the next reports tell."""
        self._own_engines = frozenset(keys)
        for id_, gateway in list(self._others.items()):
            self._replace(id_, gateway.engines, gateway)
        self._elsewhere = +self._elsewhere  # without those that are 0
        self.divisions += 1

    def hear_own(self, now: float) -> None:
        """Note that a report of this gateway came back: Redis works, and who is silent is dead."""
        self._hear(now)

    def hear(self, report: Report, now: float) -> None:
        """Apply a report of another gateway. Raises TooManyGateways."""
        now = self._hear(now)
        known = self._others.get(report.gateway)
        if known is not None and report.sequence > known.sequence:
            self.lost += min(report.sequence - known.sequence - 1, MAX_LOST)
        if report.state is State.LEFT:
            self._replace(report.gateway, {}, None)
            return
        if known is None and len(self._others) >= MAX_GATEWAYS:
            raise TooManyGateways(f"more than {MAX_GATEWAYS} other gateways")
        serving = report.state is State.SERVING
        gateway = _Gateway(report.sequence, serving, {}, now, now)
        self._replace(report.gateway, report.engines, gateway)

    def expire(self, now: float) -> None:
        """Drop the counts of gateways that have been silent, also while nothing is heard."""
        now = self._advance(now)
        for gateway in self._others.values():
            if now - gateway.counted_at >= SILENCE_S and any(gateway.engines.values()):
                self._elsewhere.subtract(gateway.engines)
                gateway.engines = dict.fromkeys(gateway.engines, 0)

    def division(self, key: str) -> tuple[int, int]:
        """Return the number of gateways that serve an engine, and the rank of this one."""
        others = [id_ for id_, one in self._others.items() if one.serving and key in one.engines]
        return 1 + len(others), sum(id_ < self.own_id for id_ in others)

    def _hear(self, now: float) -> float:
        """Note that a gateway is heard, and forget those that were silent meanwhile."""
        now = self._advance(now)
        if now - self._heard_at >= SILENCE_S:  # nothing was heard: no fault of a single gateway
            for gateway in self._others.values():
                gateway.heard_at = now
        self._heard_at = now
        for id_, gateway in list(self._others.items()):
            if now - gateway.heard_at >= SILENCE_S:
                self._replace(id_, {}, None)
        return now

    def _advance(self, now: float) -> float:
        """Return the present time, which never goes back."""
        self._now = max(self._now, now)
        return self._now

    def _replace(self, id_: str, engines: dict[str, int], gateway: _Gateway | None) -> None:
        """Put a gateway with these engines in the place of what was known of it."""
        before = self._others.pop(id_, None)
        if before is not None:
            self._elsewhere.subtract(before.engines)
        if gateway is not None:
            gateway.engines = {k: n for k, n in engines.items() if k in self._own_engines}
            if gateway.engines:
                self._elsewhere.update(gateway.engines)
                self._others[id_] = gateway
        if _division(before) != _division(self._others.get(id_)):
            self.divisions += 1


def _division(gateway: _Gateway | None) -> Set[str]:
    """Return the engines whose slots a gateway takes a part of."""
    return gateway.engines.keys() if gateway is not None and gateway.serving else frozenset()
