"""Prefix cache hit ratio and TTFT of each policy, in a simulation."""

from collections.abc import Callable

import pytest

from app.routing.policies import (
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    SelectionPolicy,
    SessionAffinity,
)
from tests.app.routing.simulation import Outcome, Traffic, simulate

pytestmark = pytest.mark.slow

CHATS = Traffic(users_per_s=3, turns=6, shared=20, shared_bytes=8192)
ONE_SYSTEM_PROMPT = Traffic(users_per_s=4, turns=6, shared=1, shared_bytes=4096)
DOCUMENTS = Traffic(users_per_s=6, turns=1, shared=200, shared_bytes=32768)


def outcome(made: Callable[[], SelectionPolicy], traffic: Traffic, gateways: int = 1) -> Outcome:
    return simulate([made() for _ in range(gateways)], traffic, requests=1000)


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


def test_round_robin_is_the_most_even() -> None:
    assert outcome(RoundRobin, CHATS).busiest < 1.01
