"""Decides which on-demand models are in memory. Pure, without a clock.

    UNLOADED ──▶ LOADING ──▶ LOADED ──▶ UNLOADING ──▶ UNLOADED

A wanted model is loaded as soon as it fits. If it does not fit, other models are evicted:

1. idle models: without a lease or a waiting request, and unused for `idle_after`;
2. models in use, only for a model that has been wanted for `patience_s`, and only those that have
   been loaded for `keep`. They grant no more leases, and are unloaded after their requests.

Models are served in the order in which they became wanted; of several at the same time, the one
that was used longest ago goes first. One that does not fit reserves the free memory once it has
been wanted for `patience_s`; before that, a later one that fits goes ahead. Both rules together
bound a wait: with k models, of which the slowest takes L to load, U to unload and D for its longest
request, a load begins within

    patience + k * (L + keep(L) + D + U)

after the first request that waits for it. They also bound thrashing: a model that is evicted has
been loaded for at least `idle_after`, or `keep` if it was in use. So within T seconds it is loaded
at most 1 + T / (load + idle_after) times, and 1 + T / (load + keep) times while it is in use.

A model whose memory is still unknown takes all the capacity: it is loaded alone, and measured.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isinf

# Tolerance for sums of floats.
SLACK_GIB = 1e-6


class Residency(enum.StrEnum):
    """Place of a model between disk and memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class UnloadReason(enum.StrEnum):
    """Why a model is unloaded; a label of gateway_model_evictions_total."""

    IDLE = "idle"
    ROOM = "room"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """Times of waiting requests and loaded models, in seconds."""

    # How long a user watches an idle page; a tenth of most loads on a GPU.
    patience_s: float = 15.0
    # With twice its load time, a model that is always in use is loading a third of it at most.
    keep_s: float = 10.0
    keep_loads: float = 2.0
    # Pause between two requests of one agent.
    idle_after_s: float = 1.0
    idle_after_loads: float = 0.1

    def keep(self, load_s: float | None) -> float:
        """Return how long a model in use stays loaded at least."""
        return max(self.keep_s, self.keep_loads * (load_s or 0.0))

    def idle_after(self, load_s: float | None) -> float:
        """Return for how long a model must be unused to count as idle."""
        return max(self.idle_after_s, self.idle_after_loads * (load_s or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """An on-demand model at one moment. Times are seconds of one clock."""

    name: str
    residency: Residency = Residency.UNLOADED
    # Memory of all its engines; None: unknown yet.
    need_gib: float | None = None
    # Requests that use it; never below 0, and 0 unless it is or was LOADED.
    leases: int = 0
    waiting: int = 0
    # When a request first wanted it while it was unavailable; None: none does.
    wanted_since: float | None = None
    load_began: float = 0.0
    loaded_at: float = 0.0
    last_used: float = 0.0  # never before loaded_at
    # Duration of its latest load; None: it was never loaded.
    load_s: float | None = None
    priority: int = 0
    idle_unload_s: float | None = None
    unload_requested: bool = False  # by an operator
    held: bool = False  # not loaded for now; requests wait


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Loads and unloads to begin now."""

    load: tuple[str, ...]
    unload: tuple[tuple[str, UnloadReason], ...]
    # Loaded models that grant no more leases, so that they can be unloaded.
    draining: frozenset[str]
    # For each wanted model that is not loaded: time until its load can begin at the earliest.
    starts_in_s: Mapping[str, float]
    # Wanted models that do not fit even alone.
    too_large: frozenset[str]
    # When to decide again without an event.
    decide_at: float | None


def decide(
    snapshots: Sequence[ModelSnapshot],
    capacity_gib: float,
    slots: int,
    now: float,
    terms: LoadTerms,
) -> LoadDecision:
    """Return what to do with `capacity_gib` (inf: unbounded) and at most `slots` loads at once."""
    return _DecisionRound(snapshots, capacity_gib, slots, now, terms).decision()


def away_s(
    victim: ModelSnapshot, snapshots: Iterable[ModelSnapshot], terms: LoadTerms
) -> float | None:
    """Return for how long at most a model that is evicted now is not loaded; None: unknown.

    Every model that is wanted before it has its whole turn: a load, and the time for which a model
    in use stays loaded.
    """
    loads = [
        other.load_s
        for other in snapshots
        if other.name != victim.name
        and (other.residency is Residency.LOADING or other.wanted_since is not None)
    ]
    if victim.load_s is None or None in loads:
        return None
    turns = sum(load_s + terms.keep(load_s) for load_s in loads if load_s is not None)
    return max(turns, terms.patience_s) + victim.load_s


class _DecisionRound:
    """One decision in the making."""

    def __init__(
        self,
        snapshots: Sequence[ModelSnapshot],
        capacity_gib: float,
        slots: int,
        now: float,
        terms: LoadTerms,
    ) -> None:
        self._models = snapshots
        self._capacity = capacity_gib
        self._now = now
        self._terms = terms
        self._slots = slots - sum(r.residency is Residency.LOADING for r in snapshots)
        taken = sum(self._need(r) for r in snapshots if r.residency is not Residency.UNLOADED)
        leaving = (r for r in snapshots if r.residency is Residency.UNLOADING)
        self._free = capacity_gib - taken  # below 0: the other engines take more than before
        self._expected = sum(self._need(r) for r in leaving)
        self._load: list[str] = []
        self._unload: dict[str, UnloadReason] = {}
        self._draining_names: set[str] = set()
        self._starts_in: dict[str, float] = {}
        self._too_large: set[str] = set()
        self._moments: list[float] = []
        # When each model that loads before the one in question can be evicted again.
        self._evictable_at = [
            max(now, r.load_began + (r.load_s or 0.0)) + terms.idle_after(r.load_s)
            for r in snapshots
            if r.residency is Residency.LOADING
        ]

    def decision(self) -> LoadDecision:
        self._unload_unneeded()
        wanted = [
            r
            for r in self._models
            if r.residency is Residency.UNLOADED and r.wanted_since is not None and not r.held
        ]
        # uvloop's clock has a resolution of one millisecond: a model that gives way may be wanted
        # again in the one in which the other was, and must not come back before it.
        for snapshot in sorted(wanted, key=lambda r: (r.wanted_since, r.last_used, r.name)):
            self._place_model(snapshot)
        return LoadDecision(
            tuple(self._load),
            tuple(self._unload.items()),
            frozenset(self._draining_names),
            self._starts_in,
            frozenset(self._too_large),
            min((moment for moment in self._moments if moment > self._now), default=None),
        )

    def _need(self, snapshot: ModelSnapshot) -> float:
        if snapshot.need_gib is not None:
            return snapshot.need_gib
        return 0.0 if isinf(self._capacity) else max(self._capacity, 0.0)

    def _unload_unneeded(self) -> None:
        """Unload models on request, after their idle timeout, and those over the budget."""
        for snapshot in self._loaded():
            if snapshot.unload_requested:
                self._evict(snapshot, UnloadReason.OPERATOR)
            elif snapshot.idle_unload_s is not None and self._unused(snapshot):
                moment = snapshot.last_used + snapshot.idle_unload_s
                self._moments.append(moment)
                if moment <= self._now:
                    self._evict(snapshot, UnloadReason.IDLE)
        if self._free + self._expected < -SLACK_GIB:
            idle = self._idle()
            self._moments += [self._idle_at(r) for r in self._loaded() if self._unused(r)]
            for victim in self._select_victims(idle, -self._free - self._expected) or idle:
                self._evict(victim, UnloadReason.ROOM)

    def _place_model(self, snapshot: ModelSnapshot) -> None:
        """Load a wanted model, or make room for it."""
        need = self._need(snapshot)
        if need > self._capacity + SLACK_GIB:
            self._too_large.add(snapshot.name)
            return
        if need <= self._free + SLACK_GIB:
            self._free -= need
            if self._slots > 0:
                self._slots -= 1
                self._load.append(snapshot.name)
                self._will_start(snapshot, self._now)
            else:
                self._will_start(snapshot, self._earliest_load_end())
        elif need <= self._free + self._expected + SLACK_GIB:
            self._reserve(need)
            self._will_start(snapshot, self._now)
        else:
            self._make_room(snapshot, need)

    def _make_room(self, snapshot: ModelSnapshot, need: float) -> None:
        """Evict other models, if that is allowed and frees enough."""
        assert snapshot.wanted_since is not None
        urgent_at = snapshot.wanted_since + self._terms.patience_s
        urgent = urgent_at <= self._now
        missing = need - self._free - self._expected
        idle = self._idle()
        victims = self._select_victims(idle, missing)
        if victims is None and urgent:
            victims = self._select_victims([*idle, *self._preemptible()], missing)
        if victims is not None:
            for victim in victims:
                self._evict(victim, UnloadReason.ROOM)
            self._reserve(need)
            self._will_start(snapshot, self._now)
            return
        soonest = [*self._evictable_at, *(self._frees_at(r, urgent_at) for r in self._loaded())]
        if urgent:
            self._free, self._expected = min(self._free, 0.0), 0.0  # reserved
        # Each of these moments may make the difference.
        self._moments.append(urgent_at)
        for other in self._loaded():
            self._moments.append(self._protected_until(other))
            if self._unused(other):
                self._moments.append(self._idle_at(other))
        self._will_start(snapshot, max(min(soonest, default=self._now), self._now))

    def _reserve(self, need: float) -> None:
        """Reserve memory that is free or becomes free, for a load that begins later."""
        self._expected -= need - max(self._free, 0.0)
        self._free = min(self._free, 0.0)

    def _will_start(self, snapshot: ModelSnapshot, moment: float) -> None:
        self._starts_in[snapshot.name] = moment - self._now
        load_s = snapshot.load_s
        self._evictable_at.append(moment + (load_s or 0.0) + self._terms.idle_after(load_s))

    def _earliest_load_end(self) -> float:
        return min(
            (
                max(self._now, r.load_began + (r.load_s or 0.0))
                for r in self._models
                if r.residency is Residency.LOADING
            ),
            default=self._now,
        )

    def _evict(self, snapshot: ModelSnapshot, reason: UnloadReason) -> None:
        if snapshot.leases:
            self._draining_names.add(snapshot.name)
        else:
            self._unload[snapshot.name] = reason
        self._expected += self._need(snapshot)

    def _loaded(self) -> list[ModelSnapshot]:
        """Return the loaded models that are not being evicted so far."""
        return [
            r
            for r in self._models
            if r.residency is Residency.LOADED
            and r.name not in self._unload
            and r.name not in self._draining_names
        ]

    def _unused(self, snapshot: ModelSnapshot) -> bool:
        return snapshot.leases == 0 and snapshot.wanted_since is None

    def _idle_at(self, snapshot: ModelSnapshot) -> float:
        return snapshot.last_used + self._terms.idle_after(snapshot.load_s)

    def _protected_until(self, snapshot: ModelSnapshot) -> float:
        return snapshot.loaded_at + self._terms.keep(snapshot.load_s)

    def _frees_at(self, snapshot: ModelSnapshot, urgent_at: float) -> float:
        """Return when a loaded model can be evicted at the earliest."""
        yields_at = max(urgent_at, self._protected_until(snapshot))
        return min(self._idle_at(snapshot), yields_at) if self._unused(snapshot) else yields_at

    def _idle(self) -> list[ModelSnapshot]:
        """Return the idle models in the order of eviction.

        Of equal priority, the model goes first that was idle longest relative to its load time.
        """
        idle = [r for r in self._loaded() if self._unused(r) and self._idle_at(r) <= self._now]
        return sorted(
            idle,
            key=lambda r: (
                r.priority,
                (r.last_used - self._now) / max(r.load_s or 0.0, 1.0),
                r.name,
            ),
        )

    def _preemptible(self) -> list[ModelSnapshot]:
        """Return the models in use that may be evicted, those with the shortest load first.

        The order does not change while they drain, so the choice is stable.
        """
        idle = {r.name for r in self._idle()}
        rest = [
            r
            for r in self._loaded()
            if r.name not in idle and self._protected_until(r) <= self._now
        ]
        return sorted(rest, key=lambda r: (r.priority, r.load_s or 0.0, r.name))

    def _select_victims(
        self, candidates: Iterable[ModelSnapshot], gib: float
    ) -> list[ModelSnapshot] | None:
        """Return the first candidates that free enough, none needlessly; None: too little."""
        picked: list[ModelSnapshot] = []
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
