"""One decision at a time: what is loaded, what makes room, what must wait, and for how long."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from app.residency.policy import Decision, LoadTerms, ModelSnapshot, Residency, UnloadReason, decide

NOW = 1000.0
TERMS = LoadTerms(patience_s=15, keep_s=10, keep_loads=2, settle_s=1, settle_loads=0.1)


def wanted(name: str, need: float | None = 1.0, since: float = NOW, **fields: Any) -> ModelSnapshot:
    """A model that somebody waits for."""
    return ModelSnapshot(name=name, need_gib=need, wanted_since=since, waiting=1, **fields)


def loaded(name: str, need: float | None = 1.0, used: float = 0.0, **fields: Any) -> ModelSnapshot:
    """A model that is in memory, loaded long ago in 5 s unless told otherwise."""
    fields = {"load_s": 5.0, **fields}
    return ModelSnapshot(
        name=name, residency=Residency.LOADED, need_gib=need, last_used=max(used, 0.0), **fields
    )


def loading(name: str, need: float | None = 1.0, **fields: Any) -> ModelSnapshot:
    return ModelSnapshot(name=name, residency=Residency.LOADING, need_gib=need, **fields)


def decided(
    *snapshots: ModelSnapshot, room: float = 2.0, slots: int = 1, now: float = NOW
) -> Decision:
    return decide(snapshots, room, slots, now, TERMS)


def evicted(decision: Decision) -> list[str]:
    return [name for name, _ in decision.unload]


class TestLoading:
    def test_nothing_is_loaded_that_nobody_wants(self) -> None:
        assert decided(ModelSnapshot(name="a", need_gib=1.0)) == Decision(
            (), (), frozenset(), {}, frozenset(), None
        )

    def test_what_fits_is_loaded_beside_the_others(self) -> None:
        decision = decided(loaded("a"), wanted("b"))
        assert (decision.load, decision.unload) == (("b",), ())
        assert decision.starts_in_s == {"b": 0.0}

    def test_without_a_budget_everything_fits(self) -> None:
        decision = decided(loaded("a", 1e6), wanted("b", None), wanted("c", 1e6), room=inf, slots=2)
        assert decision.load == ("b", "c")

    def test_only_so_many_load_at_once_in_the_order_of_their_waits(self) -> None:
        decision = decided(
            wanted("b", since=NOW - 1), wanted("a"), wanted("c", since=NOW - 2), room=9
        )
        assert decision.load == ("c",)
        assert decided(loading("a"), wanted("b"), room=9).load == ()
        assert decided(loading("a"), wanted("b"), room=9, slots=2).load == ("b",)

    def test_how_long_the_load_before_it_takes_is_told(self) -> None:
        ahead = loading("a", load_began=NOW - 3, load_s=10.0)
        assert decided(ahead, wanted("b"), room=9).starts_in_s == {"b": 7.0}

    def test_what_is_larger_than_the_room_is_never_loaded_and_evicts_nobody(self) -> None:
        decision = decided(loaded("a"), wanted("b", 2.5))
        assert decision.too_large == {"b"}
        assert (decision.load, decision.unload) == ((), ())

    def test_gib_that_sum_up_to_the_room_fit(self) -> None:
        assert decided(loaded("a", 0.1), wanted("b", 0.2), room=0.3).load == ("b",)

    @pytest.mark.parametrize("state", [Residency.LOADING, Residency.LOADED, Residency.UNLOADING])
    def test_one_of_unknown_need_is_alone(self, state: Residency) -> None:
        unknown = ModelSnapshot(
            name="a", residency=state, leases=1 if state is Residency.LOADED else 0
        )
        assert decided(unknown, wanted("b", 0.1), slots=2).load == ()
        known = replace(unknown, need_gib=0.1)
        assert decided(known, wanted("b", None), slots=2).load == ()
        assert decided(wanted("b", None), slots=2).load == ("b",)


class TestMakingRoom:
    def test_idle_models_leave_and_the_load_waits_for_their_memory(self) -> None:
        decision = decided(loaded("a", 2.0), wanted("b", 2.0))
        assert decision.unload == (("a", UnloadReason.ROOM),)
        assert decision.load == ()
        leaving = ModelSnapshot(name="a", residency=Residency.UNLOADING, need_gib=2.0)
        assert decided(leaving, wanted("b", 2.0)).unload == ()

    def test_no_more_leave_than_have_to(self) -> None:
        decision = decided(
            loaded("a", 0.5, used=1),
            loaded("b", 0.5, used=2),
            loaded("c", 1.0, used=3),
            wanted("d"),
        )
        assert evicted(decision) == ["a", "b"]
        decision = decided(loaded("a", 0.5, used=1), loaded("c", 1.5, used=3), wanted("d", 1.5))
        assert evicted(decision) == ["c"]

    def test_the_longest_idle_leaves_first(self) -> None:
        assert evicted(decided(loaded("a", used=20), loaded("b", used=10), wanted("c"))) == ["b"]

    def test_what_is_dear_to_load_again_stays_for_longer(self) -> None:
        dear = loaded("a", used=NOW - 300, load_s=100.0)
        assert evicted(decided(dear, loaded("b", used=NOW - 30), wanted("c"))) == ["b"]
        assert evicted(decided(dear, loaded("b", used=NOW - 10), wanted("c"))) == ["a"]

    def test_a_lower_priority_leaves_first_however_short_it_was_idle(self) -> None:
        low = loaded("a", used=NOW - 2, priority=-1)
        assert evicted(decided(low, loaded("b", used=1), wanted("c"))) == ["a"]

    def test_one_that_serves_stays(self) -> None:
        decision = decided(loaded("a", 2.0, leases=1), wanted("b", 2.0, since=NOW - 14))
        assert (decision.unload, decision.draining) == ((), frozenset())
        assert decision.decide_at == NOW + 1
        assert decision.starts_in_s == {"b": 1.0}

    def test_one_that_was_used_just_now_stays_until_it_settles(self) -> None:
        decision = decided(loaded("a", 2.0, used=NOW - 0.4), wanted("b", 2.0))
        assert (decision.unload, decision.decide_at) == ((), NOW + 0.6)
        assert decision.starts_in_s == {"b": pytest.approx(0.6)}

    def test_a_smaller_one_that_fits_goes_ahead_of_one_that_waits_for_room(self) -> None:
        busy = loaded("a", 1.0, leases=1)
        assert decided(busy, wanted("b", 2.0, since=NOW - 5), wanted("c", 1.0)).load == ("c",)

    def test_room_that_comes_free_for_one_is_not_given_to_the_next(self) -> None:
        leaving = ModelSnapshot(name="a", residency=Residency.UNLOADING, need_gib=1.0)
        first = wanted("b", 2.0, since=NOW - 5)
        assert decided(leaving, first, wanted("c", 1.0)).load == ()

    def test_room_is_made_for_several_at_once(self) -> None:
        assert evicted(decided(loaded("a"), loaded("b"), wanted("c"), wanted("d"))) == ["a", "b"]


class TestPatience:
    LONG_AGO = NOW - 15

    def test_one_in_use_is_held_back_for_one_that_has_waited_for_long(self) -> None:
        decision = decided(loaded("a", 2.0, leases=3), wanted("b", 2.0, since=self.LONG_AGO))
        assert decision.draining == {"a"}
        assert decision.unload == ()
        drained = loaded("a", 2.0, used=NOW, wanted_since=NOW)
        decision = decided(drained, wanted("b", 2.0, since=self.LONG_AGO))
        assert decision.unload == (("a", UnloadReason.ROOM),)

    def test_but_not_before_it_has_been_there_for_a_while(self) -> None:
        young = loaded("a", 2.0, leases=3, loaded_at=NOW - 4)
        decision = decided(young, wanted("b", 2.0, since=self.LONG_AGO))
        assert (decision.draining, decision.decide_at) == (frozenset(), NOW + 6)
        assert decision.starts_in_s == {"b": 6.0}

    def test_nobody_overtakes_it_any_more(self) -> None:
        young = loaded("a", 1.0, leases=3, loaded_at=NOW - 4)
        decision = decided(young, wanted("b", 2.0, since=self.LONG_AGO), wanted("c", 1.0))
        assert decision.load == ()

    def test_an_idle_one_leaves_rather_than_one_in_use(self) -> None:
        decision = decided(
            loaded("a", leases=1), loaded("b", used=NOW - 5), wanted("c", since=self.LONG_AGO)
        )
        assert (evicted(decision), decision.draining) == (["b"], frozenset())

    def test_the_lower_priority_yields_first(self) -> None:
        decision = decided(
            loaded("a", leases=1),
            loaded("b", leases=1, priority=-1),
            wanted("c", since=self.LONG_AGO),
        )
        assert decision.draining == {"b"}


class TestLettingGo:
    def test_idle_models_leave_when_their_time_is_over(self) -> None:
        idle = loaded("a", used=NOW - 30, idle_unload_s=60)
        assert decided(idle).decide_at == NOW + 30
        assert decided(idle, now=NOW + 30).unload == (("a", UnloadReason.IDLE),)
        assert decided(replace(idle, leases=1), now=NOW + 90).unload == ()

    def test_what_an_operator_wants_out_leaves_once_nobody_uses_it(self) -> None:
        assert decided(loaded("a", used=NOW, unload_requested=True)).unload == (
            ("a", UnloadReason.OPERATOR),
        )
        decision = decided(loaded("a", leases=1, unload_requested=True))
        assert decision.unload == ()
        assert decision.draining == {"a"}

    def test_idle_models_leave_when_the_rest_of_the_machine_takes_more(self) -> None:
        decision = decided(loaded("a", leases=1), loaded("b"), room=1.5)
        assert decision.unload == (("b", UnloadReason.ROOM),)
        assert decided(loaded("a", leases=1), loaded("b", leases=1), room=1.5).unload == ()
        assert decided(loaded("a"), loaded("b"), room=-1.0).unload != ()
