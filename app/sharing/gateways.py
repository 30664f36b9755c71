"""The gateways that serve the same engines as this one, as their reports say. Pure.

Two things age on their own. A **count** of requests expires SILENCE_S after its report: an old one
misleads routing. A **gateway** is dead, and the others divide its slots, when it was silent for
SILENCE_S while reports of any other arrived. In an outage of Redis, with a stalled event loop and
on a suspended machine nothing arrives at all, so no gateway is dead: the slots stay divided as they
were, and after the silence every gateway has SILENCE_S to report again.

Times are of one monotonic clock of this process; none is in a report.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from app.sharing.report import LoadReport, State

# Twenty reports of a busy gateway, four of an idle one.
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
    # Requests of this gateway at the same engines, when the report arrived.
    own: dict[str, int]
    counted_at: float
    arrived_at: float
    counts: bool = True  # not expired


class Load(NamedTuple):
    """What other gateways report of one engine; see `Replica`."""

    weight: int = 1
    offset: int = 0
    elsewhere: int = 0


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
        self._loads: dict[str, Load] = {}
        self._now = -inf
        self._arrived_at = -inf  # any gateway, this one included

    def __len__(self) -> int:
        """Number of gateways that serve an engine of this one, itself included."""
        return 1 + sum(gateway.serving for gateway in self._others.values())

    def load(self, key: str) -> Load:
        """Return what the others report of an engine."""
        return self._loads.get(key, NOTHING_REPORTED)

    def division(self, key: str) -> tuple[int, int]:
        """Return the number of gateways that serve an engine, and the rank of this one."""
        others = [id_ for id_, one in self._others.items() if one.serving and key in one.engines]
        return 1 + len(others), sum(id_ < self.own_id for id_ in others)

    def rename(self, own_id: str) -> None:
        """Give this gateway another ID."""
        self.own_id = own_id
        self.divisions += 1

    def set_own_engines(self, keys: Collection[str]) -> None:
        """Set the engines of this gateway; of new ones the next reports tell."""
        self._own_engines = frozenset(keys)
        for id_, gateway in list(self._others.items()):
            self._replace(id_, gateway)
        self.divisions += 1

    def receive_own(self, now: float) -> None:
        """Note that a report of this gateway came back: Redis works, and who is silent is dead."""
        self._note_arrival(now)

    def receive(self, report: LoadReport, now: float, own: Mapping[str, int]) -> None:
        """Apply a report of another gateway; `own` are this one's requests in flight now.

        Raises TooManyGateways.
        """
        now = self._note_arrival(now)
        known = self._others.get(report.gateway)
        if known is not None and report.sequence > known.sequence:
            self.lost += min(report.sequence - known.sequence - 1, MAX_LOST)
        if report.state is State.LEFT:
            self._replace(report.gateway, None)
            return
        if known is None and len(self._others) >= MAX_GATEWAYS:
            raise TooManyGateways(f"more than {MAX_GATEWAYS} other gateways")
        engines = {key: count for key, count in report.engines.items() if key in self._own_engines}
        at_once = {key: own.get(key, 0) for key in engines}
        serving = report.state is State.SERVING
        self._replace(
            report.gateway, _Gateway(report.sequence, serving, engines, at_once, now, now)
        )

    def expire(self, now: float) -> None:
        """Drop the counts of gateways that have been silent, also while no report arrives."""
        now = self._advance(now)
        for gateway in self._others.values():
            if gateway.counts and now - gateway.counted_at >= SILENCE_S:
                self._add(gateway, -1)
                gateway.counts = False

    def _note_arrival(self, now: float) -> float:
        """Note that a report arrived, and forget gateways that were silent meanwhile."""
        now = self._advance(now)
        if now - self._arrived_at >= SILENCE_S:  # nothing arrived: no fault of a single gateway
            for gateway in self._others.values():
                gateway.arrived_at = now
        self._arrived_at = now
        for id_, gateway in list(self._others.items()):
            if now - gateway.arrived_at >= SILENCE_S:
                self._replace(id_, None)
        return now

    def _advance(self, now: float) -> float:
        """Return the present time, which never goes back."""
        self._now = max(self._now, now)
        return self._now

    def _replace(self, id_: str, gateway: _Gateway | None) -> None:
        """Put a gateway in the place of what was known of it; None: forget it."""
        before = self._others.pop(id_, None)
        if before is not None and before.counts:
            self._add(before, -1)
        divided = _divided(before)
        if gateway is not None:
            engines = gateway.engines
            gateway.engines = {key: n for key, n in engines.items() if key in self._own_engines}
            if gateway.engines:
                self._others[id_] = gateway
                if gateway.counts:
                    self._add(gateway, 1)
        if divided != _divided(self._others.get(id_)):
            self.divisions += 1

    def _add(self, gateway: _Gateway, sign: int) -> None:
        """Add the counts of a gateway, or with sign -1 subtract them."""
        for key, count in gateway.engines.items():
            load = self.load(key)
            offset = load.offset + sign * (count - gateway.own[key])
            now = Load(load.weight + sign, offset, load.elsewhere + sign * count)
            if now == NOTHING_REPORTED:
                del self._loads[key]
            else:
                self._loads[key] = now


NOTHING_REPORTED = Load()


def _divided(gateway: _Gateway | None) -> Set[str]:
    """Return the engines whose slots a gateway takes a part of."""
    return frozenset(gateway.engines) if gateway is not None and gateway.serving else frozenset()
