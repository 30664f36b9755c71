"""The guarantees in the docstring of the policy, on simulated traffic."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.residency.policy import LoadTerms, UnloadReason
from tests.app.residency.simulation import UNLOAD_S, Arrival, Loaded, Profile, World

QUICK = LoadTerms(patience_s=5, keep_s=4, keep_loads=2, idle_after_s=0.5, idle_after_loads=0.1)
NAMES = "abcdef"


def longest_delay(world: World, busy_s: float) -> float:
    """Return the guaranteed bound from the first waiting request to the start of its load."""
    load_s = max(sort.load_s for sort in world.profiles.values())
    each = load_s + world.terms.keep(load_s) + busy_s + UNLOAD_S
    return world.terms.patience_s + len(world.profiles) * each


def check(world: World, arrivals: list[Arrival]) -> None:
    """Check the guarantees at the end of a run."""
    assert world.unserved == 0
    assert len(world.waits) == len(arrivals)
    busy_s = max(arrival.serve_s for arrival in arrivals)
    bound = longest_delay(world, busy_s)
    assert all(delay <= bound for delay in world.delays)
    load_s = max(sort.load_s for sort in world.profiles.values())
    keep_s = world.terms.keep(load_s)
    # Who comes while a model is held back waits for one round more, and all wait for the load.
    assert max(world.waits) <= bound + busy_s + UNLOAD_S + keep_s + load_s
    for name, sort in world.profiles.items():
        check_swapping(world, world.stays(name), sort)


def check_swapping(world: World, stays: list[Loaded], sort: Profile) -> None:
    keep_s, idle_after_s = world.terms.keep(sort.load_s), world.terms.idle_after(sort.load_s)
    for stay in stays:
        if stay.left is not None and stay.why is UnloadReason.ROOM:
            assert stay.left - stay.ready >= (keep_s if stay.in_use else idle_after_s) - 1e-6
    # An operator may want idle models out sooner than that.
    least_s = min(idle_after_s, sort.idle_unload_s or idle_after_s)
    assert len(stays) <= 1 + (world.now + sort.load_s) / (sort.load_s + least_s)


def random_day(
    seed: int, models: int, seconds: float, every_s: float, serve_s: float
) -> tuple[dict[str, Profile], list[Arrival]]:
    """Return models of several sizes, and bursts of requests for them."""
    chance = random.Random(seed)
    profiles = {
        name: Profile(
            need_gib=chance.choice([1.0, 2.0, 3.0]),
            load_s=chance.choice([1.0, 5.0, 20.0]),
            priority=chance.choice([0, 0, 1]),
            idle_unload_s=chance.choice([None, 2.0, 60.0]),
            known=chance.random() < 0.7,
        )
        for name in NAMES[:models]
    }
    arrivals: list[Arrival] = []
    now = 0.0
    while now < seconds:
        now += chance.expovariate(1 / every_s)
        name = chance.choice(list(profiles))
        for _ in range(chance.choice([1, 1, 1, 5, 20])):
            at = now + chance.random() * 3
            arrivals.append(Arrival(at, name, min(chance.expovariate(1 / serve_s), 30.0)))
    return profiles, arrivals


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("every_s", [0.5, 5.0, 60.0], ids=["crowded", "busy", "quiet"])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_keeps_every_guarantee(seed: int, every_s: float, slots: int) -> None:
    profiles, arrivals = random_day(
        seed, models=6, seconds=600 * every_s**0.5, every_s=every_s, serve_s=2.0
    )
    world = World(profiles, capacity_gib=5.0, slots=slots, terms=QUICK)
    world.run(arrivals)
    check(world, arrivals)


requests = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 120, allow_nan=False),
        st.sampled_from("abcd"),
        st.floats(0, 20, allow_nan=False),
    ),
    min_size=1,
    max_size=40,
)
sorts_of_models = st.fixed_dictionaries(
    {
        name: st.builds(
            Profile,
            st.sampled_from([0.5, 1.0, 1.5, 2.5, 3.0]),
            st.sampled_from([0.0, 0.3, 2.0, 15.0]),
            st.integers(-1, 1),
            st.sampled_from([None, 0.1, 10.0]),
            st.booleans(),
        )
        for name in "abcd"
    }
)


@pytest.mark.slow
@settings(max_examples=300)
@given(sorts_of_models, requests, st.sampled_from([3.0, 4.0, inf]), st.integers(1, 3))
def test_any_traffic_keeps_every_guarantee(
    profiles: dict[str, Profile], arrivals: list[Arrival], capacity_gib: float, slots: int
) -> None:
    world = World(profiles, capacity_gib, slots, QUICK)
    world.run(arrivals)
    check(world, arrivals)


def steady(model: str, every_s: float, seconds: float, serve_s: float) -> list[Arrival]:
    count = int(seconds / every_s)
    return [Arrival(n * every_s, model, serve_s) for n in range(count)]


def test_two_models_in_constant_use_load_at_most_a_third_of_the_time() -> None:
    profiles = {"a": Profile(2, 10), "b": Profile(2, 10)}
    world = World(profiles, capacity_gib=3, terms=QUICK)
    # Each request overlaps with the next: neither model is idle for a moment.
    day = steady("a", 1.0, 3600, 1.5) + steady("b", 1.0, 3600, 1.5)
    world.run(day)
    assert world.unserved == 0
    assert abs(len(world.stays("a")) - len(world.stays("b"))) <= 1
    loading_s = sum(stay.ready - stay.began for stay in world.loads)
    assert loading_s / world.now <= 1 / 3
    assert {reason for _, reason in world.unloads} == {UnloadReason.ROOM}
    check(world, day)


def test_rare_request_preempts_a_model_that_is_never_idle() -> None:
    world = World({"a": Profile(2, 10), "b": Profile(2, 10)}, capacity_gib=3, terms=QUICK)
    day = [*steady("a", 0.5, 600, 2.0), Arrival(300.0, "b", 1.0)]
    world.run(day)
    assert [stay.model for stay in world.loads] == ["a", "b", "a"]
    rare = world.stays("b")[0]
    # It waits for patience, for the longest request in flight, and for the memory.
    assert rare.began - 300.0 == pytest.approx(QUICK.patience_s + 2.0 + UNLOAD_S, abs=0.5)


def test_large_model_is_not_starved_by_small_ones() -> None:
    profiles = {"large": Profile(4, 10), **{name: Profile(1, 1) for name in "abcde"}}
    world = World(profiles, capacity_gib=4, terms=QUICK)
    small = [r for n in range(5) for r in steady("abcde"[n], 1.0, 600, 1.2)]
    day = [*small, Arrival(100.0, "large", 1.0)]
    world.run(day)
    assert world.stays("large")[0].began - 100.0 <= longest_delay(world, 1.2)


def test_sequential_conversations_swap_once_each() -> None:
    """A pause longer than those within a conversation counts as idle."""
    world = World({"a": Profile(2, 5), "b": Profile(2, 5)}, capacity_gib=3, terms=QUICK)
    day = [
        *(Arrival(100.0 + n * 0.3, "a", 0.1) for n in range(20)),
        *(Arrival(120.0 + n * 0.3, "b", 0.1) for n in range(20)),
        *(Arrival(140.0 + n * 0.3, "a", 0.1) for n in range(20)),
    ]
    world.run(day)
    assert [stay.model for stay in world.loads] == ["a", "b", "a"]
    assert max(world.waits) == pytest.approx(5 + UNLOAD_S)
