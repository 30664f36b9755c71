"""Single decisions: which models are loaded, evicted or kept waiting, and for how long."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from app.residency.policy import (
    LoadDecision,
    LoadTerms,
    ModelSnapshot,
    Residency,
    UnloadReason,
    decide,
)

NOW = 1000.0
TERMS = LoadTerms(patience_s=15, keep_s=10, keep_loads=2, idle_after_s=1, idle_after_loads=0.1)


def wanted(name: str, need: float | None = 1.0, since: float = NOW, **fields: Any) -> ModelSnapshot:
    """Return a model that a request waits for."""
    return ModelSnapshot(name=name, need_gib=need, wanted_since=since, waiting=1, **fields)


def loaded(name: str, need: float | None = 1.0, used: float = 0.0, **fields: Any) -> ModelSnapshot:
    """Return a loaded model; by default it was loaded long ago, in 5 s."""
    fields = {"load_s": 5.0, **fields}
    return ModelSnapshot(
        name=name, residency=Residency.LOADED, need_gib=need, last_used=max(used, 0.0), **fields
    )


def loading(name: str, need: float | None = 1.0, **fields: Any) -> ModelSnapshot:
    return ModelSnapshot(name=name, residency=Residency.LOADING, need_gib=need, **fields)


def decided(
    *snapshots: ModelSnapshot, room: float = 2.0, slots: int = 1, now: float = NOW
) -> LoadDecision:
    return decide(snapshots, room, slots, now, TERMS)


def evicted(decision: LoadDecision) -> list[str]:
    return [name for name, _ in decision.unload]


class TestLoading:
    def test_unwanted_model_is_not_loaded(self) -> None:
        assert decided(ModelSnapshot(name="a", need_gib=1.0)) == LoadDecision(
            (), (), frozenset(), {}, frozenset(), None
        )

    def test_model_that_fits_is_loaded_next_to_others(self) -> None:
        decision = decided(loaded("a"), wanted("b"))
        assert (decision.load, decision.unload) == (("b",), ())
        assert decision.starts_in_s == {"b": 0.0}

    def test_without_a_budget_everything_fits(self) -> None:
        decision = decided(loaded("a", 1e6), wanted("b", None), wanted("c", 1e6), room=inf, slots=2)
        assert decision.load == ("b", "c")

    def test_loads_are_limited_and_in_order_of_the_waits(self) -> None:
        decision = decided(
            wanted("b", since=NOW - 1), wanted("a"), wanted("c", since=NOW - 2), room=9
        )
        assert decision.load == ("c",)
        assert decided(loading("a"), wanted("b"), room=9).load == ()
        assert decided(loading("a"), wanted("b"), room=9, slots=2).load == ("b",)

    def test_model_that_gives_way_comes_back_after_the_one_that_it_gave_way_to(self) -> None:
        """Its streams may want it again within the clock's resolution."""
        gave_way = wanted("a", 2.0, last_used=NOW)
        assert decided(gave_way, wanted("b", 2.0, last_used=NOW - 1)).load == ("b",)
        assert decided(gave_way, wanted("b", 2.0)).load == ("b",)  # never loaded yet

    def test_start_time_includes_the_load_before_it(self) -> None:
        ahead = loading("a", load_began=NOW - 3, load_s=10.0)
        assert decided(ahead, wanted("b"), room=9).starts_in_s == {"b": 7.0}

    def test_model_larger_than_the_capacity_is_not_loaded_and_evicts_none(self) -> None:
        decision = decided(loaded("a"), wanted("b", 2.5))
        assert decision.too_large == {"b"}
        assert (decision.load, decision.unload) == ((), ())

    def test_sum_equal_to_the_capacity_fits(self) -> None:
        assert decided(loaded("a", 0.1), wanted("b", 0.2), room=0.3).load == ("b",)

    @pytest.mark.parametrize("state", [Residency.LOADING, Residency.LOADED, Residency.UNLOADING])
    def test_model_of_unknown_size_is_alone(self, state: Residency) -> None:
        unknown = ModelSnapshot(
            name="a", residency=state, leases=1 if state is Residency.LOADED else 0
        )
        assert decided(unknown, wanted("b", 0.1), slots=2).load == ()
        known = replace(unknown, need_gib=0.1)
        assert decided(known, wanted("b", None), slots=2).load == ()
        assert decided(wanted("b", None), slots=2).load == ("b",)


class TestMakingRoom:
    def test_idle_models_are_evicted_and_the_load_waits_for_their_memory(self) -> None:
        decision = decided(loaded("a", 2.0), wanted("b", 2.0))
        assert decision.unload == (("a", UnloadReason.ROOM),)
        assert decision.load == ()
        leaving = ModelSnapshot(name="a", residency=Residency.UNLOADING, need_gib=2.0)
        assert decided(leaving, wanted("b", 2.0)).unload == ()

    def test_no_model_is_evicted_needlessly(self) -> None:
        decision = decided(
            loaded("a", 0.5, used=1),
            loaded("b", 0.5, used=2),
            loaded("c", 1.0, used=3),
            wanted("d"),
        )
        assert evicted(decision) == ["a", "b"]
        decision = decided(loaded("a", 0.5, used=1), loaded("c", 1.5, used=3), wanted("d", 1.5))
        assert evicted(decision) == ["c"]

    def test_longest_idle_model_is_evicted_first(self) -> None:
        assert evicted(decided(loaded("a", used=20), loaded("b", used=10), wanted("c"))) == ["b"]

    def test_slow_load_protects_from_eviction(self) -> None:
        dear = loaded("a", used=NOW - 300, load_s=100.0)
        assert evicted(decided(dear, loaded("b", used=NOW - 30), wanted("c"))) == ["b"]
        assert evicted(decided(dear, loaded("b", used=NOW - 10), wanted("c"))) == ["a"]

    def test_lower_priority_is_evicted_first_however_short_it_was_idle(self) -> None:
        low = loaded("a", used=NOW - 2, priority=-1)
        assert evicted(decided(low, loaded("b", used=1), wanted("c"))) == ["a"]

    def test_model_in_use_stays(self) -> None:
        decision = decided(loaded("a", 2.0, leases=1), wanted("b", 2.0, since=NOW - 14))
        assert (decision.unload, decision.draining) == ((), frozenset())
        assert decision.decide_at == NOW + 1
        assert decision.starts_in_s == {"b": 1.0}

    def test_recently_used_model_stays_until_it_is_idle(self) -> None:
        decision = decided(loaded("a", 2.0, used=NOW - 0.4), wanted("b", 2.0))
        assert (decision.unload, decision.decide_at) == ((), NOW + 0.6)
        assert decision.starts_in_s == {"b": pytest.approx(0.6)}

    def test_smaller_model_that_fits_goes_ahead(self) -> None:
        busy = loaded("a", 1.0, leases=1)
        assert decided(busy, wanted("b", 2.0, since=NOW - 5), wanted("c", 1.0)).load == ("c",)

    def test_memory_freed_for_one_model_is_reserved_for_it(self) -> None:
        leaving = ModelSnapshot(name="a", residency=Residency.UNLOADING, need_gib=1.0)
        first = wanted("b", 2.0, since=NOW - 5)
        assert decided(leaving, first, wanted("c", 1.0)).load == ()

    def test_memory_is_freed_for_several_models_at_once(self) -> None:
        assert evicted(decided(loaded("a"), loaded("b"), wanted("c"), wanted("d"))) == ["a", "b"]


class TestPatience:
    LONG_AGO = NOW - 15

    def test_model_in_use_drains_for_one_that_waited_long(self) -> None:
        decision = decided(loaded("a", 2.0, leases=3), wanted("b", 2.0, since=self.LONG_AGO))
        assert decision.draining == {"a"}
        assert decision.unload == ()
        drained = loaded("a", 2.0, used=NOW, wanted_since=NOW)
        decision = decided(drained, wanted("b", 2.0, since=self.LONG_AGO))
        assert decision.unload == (("a", UnloadReason.ROOM),)

    def test_model_in_use_is_protected_after_its_load(self) -> None:
        young = loaded("a", 2.0, leases=3, loaded_at=NOW - 4)
        decision = decided(young, wanted("b", 2.0, since=self.LONG_AGO))
        assert (decision.draining, decision.decide_at) == (frozenset(), NOW + 6)
        assert decision.starts_in_s == {"b": 6.0}

    def test_no_model_overtakes_an_urgent_one(self) -> None:
        young = loaded("a", 1.0, leases=3, loaded_at=NOW - 4)
        decision = decided(young, wanted("b", 2.0, since=self.LONG_AGO), wanted("c", 1.0))
        assert decision.load == ()

    def test_idle_model_is_evicted_rather_than_one_in_use(self) -> None:
        decision = decided(
            loaded("a", leases=1), loaded("b", used=NOW - 5), wanted("c", since=self.LONG_AGO)
        )
        assert (evicted(decision), decision.draining) == (["b"], frozenset())

    def test_lower_priority_in_use_is_evicted_first(self) -> None:
        decision = decided(
            loaded("a", leases=1),
            loaded("b", leases=1, priority=-1),
            wanted("c", since=self.LONG_AGO),
        )
        assert decision.draining == {"b"}


class TestLettingGo:
    def test_idle_model_is_unloaded_after_its_timeout(self) -> None:
        idle = loaded("a", used=NOW - 30, idle_unload_s=60)
        assert decided(idle).decide_at == NOW + 30
        assert decided(idle, now=NOW + 30).unload == (("a", UnloadReason.IDLE),)
        assert decided(replace(idle, leases=1), now=NOW + 90).unload == ()

    def test_unload_by_an_operator_waits_for_the_leases(self) -> None:
        assert decided(loaded("a", used=NOW, unload_requested=True)).unload == (
            ("a", UnloadReason.OPERATOR),
        )
        decision = decided(loaded("a", leases=1, unload_requested=True))
        assert decision.unload == ()
        assert decision.draining == {"a"}

    def test_idle_models_are_evicted_when_the_capacity_shrinks(self) -> None:
        decision = decided(loaded("a", leases=1), loaded("b"), room=1.5)
        assert decision.unload == (("b", UnloadReason.ROOM),)
        assert decided(loaded("a", leases=1), loaded("b", leases=1), room=1.5).unload == ()
        assert decided(loaded("a"), loaded("b"), room=-1.0).unload != ()
