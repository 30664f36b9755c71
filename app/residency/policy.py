"""Which of the models on demand are in memory: pure, no I/O, no clock of its own.

    UNLOADED ──▶ LOADING ──▶ LOADED ──▶ UNLOADING ──▶ UNLOADED

A model is loaded as soon as somebody wants it and it fits. Where it does not, others make room:

1. those that are idle: nobody is served or waits, and for `settle` nobody was;
2. those that are in use, only for a model that has been wanted for `patience_s`, and only once they
   have been loaded for `keep`. Their new requests are held back, those in flight end, then they go.

Models are wanted in the order in which somebody began to wait. One that has been wanted for
`patience_s` and does not fit keeps what memory is free from those behind it; before that, a later
one that fits goes ahead. Both rules together bound a wait: with k models, of which the slowest
takes L to load, U to unload and D for its longest request, a load begins within

    patience + k * (L + keep(L) + D + U)

after the first request that waits for it. And both bound the swapping: a model that is unloaded to
make room has been loaded for `settle` at least, and for `keep` if it was in use. So within T
seconds it is loaded at most 1 + T / (load + settle) times, and 1 + T / (load + keep) times while
somebody goes on using it.

A model whose need is not known yet takes all the room there is: it is loaded alone, and measured.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isinf

# Sums of GiB are floats.
SLACK_GIB = 1e-6


class Residency(enum.StrEnum):
    """Where a model is between disk and memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class Reason(enum.StrEnum):
    """Why a model is unloaded; a label of gateway_model_evictions_total."""

    IDLE = "idle"
    ROOM = "room"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """How patient those who wait are, and how long a model may stay, in seconds."""

    # As long as a person looks at a page that does nothing; a tenth of most loads on a GPU.
    patience_s: float = 15.0
    # With twice its load time a model that is always in use spends a third of it loading at worst.
    keep_s: float = 10.0
    keep_loads: float = 2.0
    # Between two requests of one conversation that a program leads.
    settle_s: float = 1.0
    settle_loads: float = 0.1

    def keep(self, load_s: float | None) -> float:
        """Return how long a model that is in use stays at least, once it is loaded."""
        return max(self.keep_s, self.keep_loads * (load_s or 0.0))

    def settle(self, load_s: float | None) -> float:
        """Return for how long nobody must have used a model for it to be idle."""
        return max(self.settle_s, self.settle_loads * (load_s or 0.0))


@dataclass(frozen=True, slots=True)
class Resident:
    """One model at one moment. Moments are seconds of one clock."""

    name: str
    residency: Residency = Residency.UNLOADED
    # Memory of all its engines; None: not known yet.
    need_gib: float | None = None
    # Requests that use it; never below 0, and 0 unless it is or was LOADED.
    holds: int = 0
    waiting: int = 0
    # Since when somebody has wanted it who could not have it; None: nobody does.
    wanted_since: float | None = None
    load_began: float = 0.0
    loaded_at: float = 0.0
    last_used: float = 0.0  # never before loaded_at
    # What its last load took; None: it was never loaded.
    load_s: float | None = None
    priority: int = 0
    idle_unload_s: float | None = None
    # An operator asked for it to be unloaded.
    asked_out: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now."""

    load: tuple[str, ...]
    unload: tuple[tuple[str, Reason], ...]
    # Loaded models that give no more holds, so that they can be unloaded.
    held_back: frozenset[str]
    # For each model that is wanted and not loaded: how soon its load may begin at best.
    starts_in_s: Mapping[str, float]
    # Those that are wanted and could not even be loaded alone.
    too_large: frozenset[str]
    # When to decide again though nothing has happened.
    look_at: float | None


def decide(
    residents: Sequence[Resident], room_gib: float, slots: int, now: float, terms: LoadTerms
) -> Decision:
    """Return what to do, in `room_gib` (inf: no bound), with `slots` loads at once at most."""
    return _Round(residents, room_gib, slots, now, terms).decision()


class _Round:
    """One decision while it is made."""

    def __init__(
        self,
        residents: Sequence[Resident],
        room_gib: float,
        slots: int,
        now: float,
        terms: LoadTerms,
    ) -> None:
        self._residents = residents
        self._room = room_gib
        self._now = now
        self._terms = terms
        self._slots = slots - sum(r.residency is Residency.LOADING for r in residents)
        taken = sum(self._need(r) for r in residents if r.residency is not Residency.UNLOADED)
        leaving = (r for r in residents if r.residency is Residency.UNLOADING)
        self._free = room_gib - taken  # below 0: the rest of the machine takes more than it did
        self._coming = sum(self._need(r) for r in leaving)
        self._load: list[str] = []
        self._unload: dict[str, Reason] = {}
        self._held_back: set[str] = set()
        self._starts_in: dict[str, float] = {}
        self._too_large: set[str] = set()
        self._moments: list[float] = []
        # When memory comes back from those that load now or before the one in question.
        self._settled_at = [
            max(now, r.load_began + (r.load_s or 0.0)) + terms.settle(r.load_s)
            for r in residents
            if r.residency is Residency.LOADING
        ]

    def decision(self) -> Decision:
        self._let_go()
        wanted = [
            r
            for r in self._residents
            if r.residency is Residency.UNLOADED and r.wanted_since is not None
        ]
        for resident in sorted(wanted, key=lambda r: (r.wanted_since, r.name)):
            self._place(resident)
        return Decision(
            tuple(self._load),
            tuple(self._unload.items()),
            frozenset(self._held_back),
            self._starts_in,
            frozenset(self._too_large),
            min((moment for moment in self._moments if moment > self._now), default=None),
        )

    def _need(self, resident: Resident) -> float:
        if resident.need_gib is not None:
            return resident.need_gib
        return 0.0 if isinf(self._room) else max(self._room, 0.0)

    def _let_go(self) -> None:
        """Unload what an operator wants out, was idle too long, or is over the budget."""
        for resident in self._loaded():
            if resident.asked_out:
                self._make_leave(resident, Reason.OPERATOR)
            elif resident.idle_unload_s is not None and self._unused(resident):
                moment = resident.last_used + resident.idle_unload_s
                self._moments.append(moment)
                if moment <= self._now:
                    self._make_leave(resident, Reason.IDLE)
        if self._free + self._coming < -SLACK_GIB:
            idle = self._idle()
            self._moments += [self._settles(r) for r in self._loaded() if self._unused(r)]
            for victim in self._pick(idle, -self._free - self._coming) or idle:
                self._make_leave(victim, Reason.ROOM)

    def _place(self, resident: Resident) -> None:
        """Load a model that is wanted, or find room for it."""
        need = self._need(resident)
        if need > self._room + SLACK_GIB:
            self._too_large.add(resident.name)
            return
        if need <= self._free + SLACK_GIB:
            self._free -= need
            if self._slots > 0:
                self._slots -= 1
                self._load.append(resident.name)
                self._will_start(resident, self._now)
            else:
                self._will_start(resident, self._earliest_load_end())
        elif need <= self._free + self._coming + SLACK_GIB:
            self._reserve(need)
            self._will_start(resident, self._now)
        else:
            self._make_room(resident, need)

    def _make_room(self, resident: Resident, need: float) -> None:
        """Have others leave, if that may be and helps."""
        assert resident.wanted_since is not None
        hurry_at = resident.wanted_since + self._terms.patience_s
        urgent = hurry_at <= self._now
        missing = need - self._free - self._coming
        idle = self._idle()
        victims = self._pick(idle, missing)
        if victims is None and urgent:
            victims = self._pick([*idle, *self._yielding()], missing)
        if victims is not None:
            for victim in victims:
                self._make_leave(victim, Reason.ROOM)
            self._reserve(need)
            self._will_start(resident, self._now)
            return
        soonest = [*self._settled_at, *(self._frees_at(r, hurry_at) for r in self._loaded())]
        if urgent:
            self._free, self._coming = min(self._free, 0.0), 0.0  # nobody overtakes
        # Each of these moments may make the difference.
        self._moments.append(hurry_at)
        for other in self._loaded():
            self._moments.append(self._keeps_until(other))
            if self._unused(other):
                self._moments.append(self._settles(other))
        self._will_start(resident, max(min(soonest, default=self._now), self._now))

    def _reserve(self, need: float) -> None:
        """Set aside memory that is free or comes free, for a load that begins later."""
        self._coming -= need - max(self._free, 0.0)
        self._free = min(self._free, 0.0)

    def _will_start(self, resident: Resident, moment: float) -> None:
        self._starts_in[resident.name] = moment - self._now
        load_s = resident.load_s
        self._settled_at.append(moment + (load_s or 0.0) + self._terms.settle(load_s))

    def _earliest_load_end(self) -> float:
        return min(
            (
                max(self._now, r.load_began + (r.load_s or 0.0))
                for r in self._residents
                if r.residency is Residency.LOADING
            ),
            default=self._now,
        )

    def _make_leave(self, resident: Resident, reason: Reason) -> None:
        if resident.holds:
            self._held_back.add(resident.name)
        else:
            self._unload[resident.name] = reason
        self._coming += self._need(resident)

    def _loaded(self) -> list[Resident]:
        """Return the loaded models that may stay so far."""
        return [
            r
            for r in self._residents
            if r.residency is Residency.LOADED
            and r.name not in self._unload
            and r.name not in self._held_back
        ]

    def _unused(self, resident: Resident) -> bool:
        return resident.holds == 0 and resident.wanted_since is None

    def _settles(self, resident: Resident) -> float:
        return resident.last_used + self._terms.settle(resident.load_s)

    def _keeps_until(self, resident: Resident) -> float:
        return resident.loaded_at + self._terms.keep(resident.load_s)

    def _frees_at(self, resident: Resident, hurry_at: float) -> float:
        """Return when a loaded model may have to leave, at the earliest."""
        yields_at = max(hurry_at, self._keeps_until(resident))
        return min(self._settles(resident), yields_at) if self._unused(resident) else yields_at

    def _idle(self) -> list[Resident]:
        """Return the models that nobody uses, those first that are missed least.

        Of equal priority, the one goes first that was idle the longest for what its load costs.
        """
        idle = [r for r in self._loaded() if self._unused(r) and self._settles(r) <= self._now]
        return sorted(
            idle,
            key=lambda r: (
                r.priority,
                (r.last_used - self._now) / max(r.load_s or 0.0, 1.0),
                r.name,
            ),
        )

    def _yielding(self) -> list[Resident]:
        """Return the other models that have had their time, those first that load fastest.

        Nothing of the order changes while they drain, so that the choice stands.
        """
        idle = {r.name for r in self._idle()}
        rest = [
            r for r in self._loaded() if r.name not in idle and self._keeps_until(r) <= self._now
        ]
        return sorted(rest, key=lambda r: (r.priority, r.load_s or 0.0, r.name))

    def _pick(self, candidates: Iterable[Resident], gib: float) -> list[Resident] | None:
        """Return the first of `candidates` that free so much, none in vain; None: they do not."""
        picked: list[Resident] = []
        sum_gib = 0.0
        for candidate in candidates:
            if sum_gib >= gib - SLACK_GIB:
                break
            picked.append(candidate)
            sum_gib += self._need(candidate)
        if sum_gib < gib - SLACK_GIB:
            return None
        for candidate in picked[::-1]:
            if sum_gib - self._need(candidate) >= gib - SLACK_GIB:
                picked.remove(candidate)
                sum_gib -= self._need(candidate)
        return picked
