"""Simulates models, requests and a clock under the real policy."""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from app.residency.policy import (
    LoadDecision,
    LoadTerms,
    ModelSnapshot,
    Residency,
    UnloadReason,
    decide,
)

UNLOAD_S = 1.0


@dataclass
class Profile:
    """Properties of a model: its memory, its load time."""

    need_gib: float
    load_s: float
    priority: int = 0
    idle_unload_s: float | None = None
    # Otherwise its memory is known only after its first load.
    known: bool = True


@dataclass
class Arrival:
    """A request: its time, model and duration."""

    at: float
    model: str
    serve_s: float


@dataclass
class Loaded:
    """One stay in memory."""

    model: str
    began: float
    ready: float
    left: float | None = None
    why: UnloadReason | None = None
    # Whether it was used, or wanted again, when it was evicted.
    in_use: bool = False


@dataclass
class World:
    """Runs arrivals to their end, and checks the invariants at each step."""

    profiles: dict[str, Profile]
    capacity_gib: float
    slots: int = 1
    terms: LoadTerms = field(default_factory=LoadTerms)
    now: float = 0.0
    loads: list[Loaded] = field(default_factory=list)
    # Wait of each request, in order of service.
    waits: list[float] = field(default_factory=list)
    # Time from the first waiting request to the start of each load.
    delays: list[float] = field(default_factory=list)
    unloads: list[tuple[str, UnloadReason]] = field(default_factory=list)
    decision: LoadDecision | None = None

    def __post_init__(self) -> None:
        self.models = {
            name: ModelSnapshot(
                name=name,
                need_gib=profile.need_gib if profile.known else None,
                priority=profile.priority,
                idle_unload_s=profile.idle_unload_s,
            )
            for name, profile in self.profiles.items()
        }
        self._waiting: dict[str, list[Arrival]] = {name: [] for name in self.profiles}
        self._events: list[tuple[float, int, str, object]] = []
        self._number = itertools.count()
        self._draining: frozenset[str] = frozenset()

    def run(self, arrivals: Iterable[Arrival], until: float | None = None) -> None:
        """Process all events, or those until a time."""
        for arrival in arrivals:
            self._push(arrival.at, "arrive", arrival)
        while self._events and (until is None or self._events[0][0] <= until):
            self.now, _, what, about = heapq.heappop(self._events)
            self._happen(what, about)
            # Simultaneous events are one event to the policy.
            while self._events and self._events[0][0] == self.now:
                _, _, what, about = heapq.heappop(self._events)
                self._happen(what, about)
            self._decide()

    def stays(self, model: str) -> list[Loaded]:
        return [loaded for loaded in self.loads if loaded.model == model]

    @property
    def unserved(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _push(self, at: float, what: str, about: object) -> None:
        heapq.heappush(self._events, (at, next(self._number), what, about))

    def _set(self, name: str, **changes: object) -> None:
        self.models[name] = replace(self.models[name], **changes)  # type: ignore[arg-type]

    def _happen(self, what: str, about: object) -> None:
        if isinstance(about, Arrival):
            model = self.models[about.model]
            if what == "leave":
                self._set(about.model, leases=model.leases - 1, last_used=self.now)
            elif model.residency is Residency.LOADED and about.model not in self._draining:
                self._serve(about)
            else:
                self._waiting[about.model].append(about)
                since = self.now if model.wanted_since is None else model.wanted_since
                self._set(about.model, wanted_since=since)
        elif what == "loaded":
            name = str(about)
            self._set(
                name,
                residency=Residency.LOADED,
                loaded_at=self.now,
                last_used=self.now,
                load_s=self.profiles[name].load_s,
                need_gib=self.profiles[name].need_gib,
                wanted_since=None,
            )
            self._serve_all(name)
            self.stays(name)[-1].ready = self.now
        elif what == "unloaded":
            self._set(str(about), residency=Residency.UNLOADED)

    def _serve(self, arrival: Arrival) -> None:
        model = self.models[arrival.model]
        assert model.residency is Residency.LOADED
        self._set(arrival.model, leases=model.leases + 1)
        self.waits.append(self.now - arrival.at)
        self._push(self.now + arrival.serve_s, "leave", arrival)

    def _serve_all(self, name: str) -> None:
        for arrival in self._waiting[name]:
            self._serve(arrival)
        self._waiting[name].clear()

    def _decide(self) -> None:
        self.decision = decision = decide(
            list(self.models.values()), self.capacity_gib, self.slots, self.now, self.terms
        )
        self._draining = decision.draining
        assert not set(decision.load) & {name for name, _ in decision.unload}
        for name, reason in decision.unload:
            model = self.models[name]
            assert model.residency is Residency.LOADED
            assert model.leases == 0, "it is unloaded while in use"
            stay = self.stays(name)[-1]
            stay.left, stay.why = self.now, reason
            idle_at = model.last_used + self.terms.idle_after(model.load_s)
            stay.in_use = bool(self._waiting[name]) or self.now < idle_at
            self.unloads.append((name, reason))
            self._set(name, residency=Residency.UNLOADING)
            self._push(self.now + UNLOAD_S, "unloaded", name)
        for name, waiting in self._waiting.items():
            model = self.models[name]
            if waiting and model.residency is Residency.LOADED and name not in self._draining:
                self._serve_all(name)
                self._set(name, wanted_since=None)
        for name in decision.load:
            model = self.models[name]
            assert model.residency is Residency.UNLOADED, "two loads of one model"
            assert model.wanted_since is not None
            self.delays.append(self.now - model.wanted_since)
            self.loads.append(Loaded(name, self.now, 0.0))
            self._set(name, residency=Residency.LOADING, load_began=self.now)
            self._push(self.now + self.profiles[name].load_s, "loaded", name)
        self._check()
        if decision.decide_at is not None:
            assert decision.decide_at > self.now
            self._push(decision.decide_at, "look", None)

    def _check(self) -> None:
        in_memory = [m for m in self.models.values() if m.residency is not Residency.UNLOADED]
        taken = sum(m.need_gib or 0.0 for m in in_memory)
        unknown = self.capacity_gib < inf and any(m.need_gib is None for m in in_memory)
        assert taken <= self.capacity_gib + 1e-6, "over the budget"
        assert not unknown or len(in_memory) == 1, "a model of unknown size is not alone"
        loading = sum(m.residency is Residency.LOADING for m in in_memory)
        assert loading <= self.slots
        if loading < self.slots and not unknown:
            self._work_conserving(self.capacity_gib - taken)

    def _work_conserving(self, free: float) -> None:
        """Check that the model wanted longest is not loaded only if it does not fit."""
        wanted = [
            m
            for m in self.models.values()
            if m.residency is Residency.UNLOADED and m.wanted_since is not None
        ]
        if wanted:
            first = min(wanted, key=lambda m: (m.wanted_since, m.last_used, m.name))
            if first.need_gib is not None:
                assert first.need_gib > free + 1e-6, "it would fit"
