"""Prefix cache hit ratio and TTFT of each policy, in a simulation."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest

from app.routing import Replica, RoutingHints, SelectionPolicy
from app.routing.least_loaded import LeastLoaded
from app.routing.policies import RoundRobin, SessionAffinity
from app.routing.prefix_affinity import PrefixAffinity
from app.sharing.load_sharing import REPORT_S
from tests.app.routing.simulation import Clock, Outcome, Traffic, simulate

pytestmark = pytest.mark.slow

# Chats with programs among the users, each connected to one gateway; one gateway has most of them.
MIXED = Traffic(
    users_per_s=0.7, turns=6, shared=20, shared_bytes=4096, think_s=4, hot_every=10, hot_parallel=6,
    connected=(6, 3, 1),
)  # fmt: skip
# Requests so short and many that a report is old when it arrives.
SHORT = Traffic(
    users_per_s=100, turns=1, shared=50, shared_bytes=1024, answer_bytes=80, hot_every=50,
    hot_parallel=16, connected=(1, 1, 1),
)  # fmt: skip
CHATS = Traffic(users_per_s=3, turns=6, shared=20, shared_bytes=8192)
ONE_SYSTEM_PROMPT = Traffic(users_per_s=4, turns=6, shared=1, shared_bytes=4096)
DOCUMENTS = Traffic(users_per_s=6, turns=1, shared=200, shared_bytes=32768)


# Conversations whose answers are most of what the next turn sends.
LONG_ANSWERS = Traffic(
    users_per_s=1.5, turns=6, shared=20, shared_bytes=8192, answer_bytes=6000, think_s=10
)
# More documents than the caches hold.
MANY_LONG_CHATS = Traffic(
    users_per_s=0.9, turns=6, shared=20, shared_bytes=65536, message_bytes=6000, answer_bytes=2000
)


class WithoutEnds(PrefixAffinity):
    """Learns nothing of the ends of requests."""

    def choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica | None:
        replica = super().choose(candidates, hints)
        hints.on_end = None
        return replica


@cache
def outcome(
    made: Callable[[], SelectionPolicy],
    traffic: Traffic,
    gateways: int = 1,
    report_s: float | None = None,
    cache_bytes: int = 2**21,
) -> Outcome:
    clock = Clock()
    for timed in (PrefixAffinity, WithoutEnds):
        if made is timed:
            made = partial(timed, clock=clock)
    policies = [made() for _ in range(gateways)]
    return simulate(
        policies,
        traffic,
        clock=clock,
        cache_bytes=cache_bytes,
        requests=1000,
        report_s=report_s,
    )


@pytest.mark.parametrize("traffic", [CHATS, ONE_SYSTEM_PROMPT])
@pytest.mark.parametrize("made", [SessionAffinity, PrefixAffinity])
def test_affinity_raises_the_hit_ratio_of_conversations(
    made: type[SelectionPolicy], traffic: Traffic
) -> None:
    least, mine = outcome(LeastLoaded, traffic), outcome(made, traffic)
    assert mine.hit_ratio > least.hit_ratio + 0.08
    assert mine.ttft_mean_s < 0.7 * least.ttft_mean_s
    assert mine.busiest < 1.5


def test_shared_documents_need_prefix_affinity() -> None:
    least, session = outcome(LeastLoaded, DOCUMENTS), outcome(SessionAffinity, DOCUMENTS)
    prefix = outcome(PrefixAffinity, DOCUMENTS)
    assert abs(session.hit_ratio - least.hit_ratio) < 0.06
    assert prefix.hit_ratio > least.hit_ratio + 0.12
    assert prefix.ttft_mean_s < 0.6 * least.ttft_mean_s


@pytest.mark.parametrize(
    ("made", "traffic"), [(SessionAffinity, ONE_SYSTEM_PROMPT), (PrefixAffinity, DOCUMENTS)]
)
def test_several_gateways_keep_the_hit_ratio(made: type[SelectionPolicy], traffic: Traffic) -> None:
    alone, three = outcome(made, traffic), outcome(made, traffic, gateways=3)
    assert three.hit_ratio > alone.hit_ratio - 0.04


@pytest.mark.parametrize(
    ("traffic", "cache_bytes"), [(LONG_ANSWERS, 3 * 2**18), (MANY_LONG_CHATS, 2**19)]
)
def test_ends_of_requests_tell_what_is_cached(traffic: Traffic, cache_bytes: int) -> None:
    """An answer is cached as its prompt is, and both are evicted by the time of their end."""
    without = outcome(WithoutEnds, traffic, cache_bytes=cache_bytes)
    mine = outcome(PrefixAffinity, traffic, cache_bytes=cache_bytes)
    assert mine.hit_ratio > without.hit_ratio + 0.02
    assert mine.ttft_mean_s < 0.8 * without.ttft_mean_s


def test_round_robin_is_the_most_even() -> None:
    assert outcome(RoundRobin, CHATS).busiest < 1.01


@pytest.mark.parametrize("traffic", [MIXED, SHORT], ids=["mixed", "short"])
@pytest.mark.parametrize("made", [LeastLoaded, SessionAffinity, PrefixAffinity])
def test_gateways_that_share_their_load_choose_nearly_as_well_as_one(
    made: type[SelectionPolicy], traffic: Traffic
) -> None:
    one, apart = outcome(made, traffic), outcome(made, traffic, gateways=3)
    shared = outcome(made, traffic, gateways=3, report_s=REPORT_S)
    if (made, traffic) == (LeastLoaded, SHORT):
        # Reports help little with requests of half a second, and they do no harm.
        assert shared.imbalance < 1.15 * apart.imbalance
    else:
        assert shared.imbalance < 0.25 * one.imbalance + 0.75 * apart.imbalance
    assert shared.hit_ratio > one.hit_ratio - 0.03
    assert shared.ttft_mean_s < 1.15 * one.ttft_mean_s


def test_old_reports_draw_no_herd() -> None:
    """Were the last counts taken as they are, every gateway would fill the same gap."""
    fresh = outcome(LeastLoaded, SHORT, gateways=3, report_s=0.05)
    old = outcome(LeastLoaded, SHORT, gateways=3, report_s=0.5)
    assert old.imbalance < 1.5 * fresh.imbalance
