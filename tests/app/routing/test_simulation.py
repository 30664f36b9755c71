"""What each policy makes of conversations: how much of their prompts the replicas have cached."""

from collections.abc import Callable

import pytest

from app.routing.affinity import PrefixAffinity, SessionAffinity
from app.routing.policies import LeastLoaded, RoundRobin, SelectionPolicy
from tests.app.routing.simulation import Outcome, Traffic, simulate

pytestmark = pytest.mark.slow

CHATS = Traffic(people_per_s=3, turns=6, shared=20, shared_bytes=8192)
ONE_SYSTEM_PROMPT = Traffic(people_per_s=4, turns=6, shared=1, shared_bytes=4096)
DOCUMENTS = Traffic(people_per_s=6, turns=1, shared=200, shared_bytes=32768)


def outcome(made: Callable[[], SelectionPolicy], traffic: Traffic, gateways: int = 1) -> Outcome:
    return simulate([made() for _ in range(gateways)], traffic, requests=1000)


@pytest.mark.parametrize("traffic", [CHATS, ONE_SYSTEM_PROMPT])
@pytest.mark.parametrize("made", [SessionAffinity, PrefixAffinity])
def test_conversations_are_cached_better_where_they_were(
    made: type[SelectionPolicy], traffic: Traffic
) -> None:
    least, mine = outcome(LeastLoaded, traffic), outcome(made, traffic)
    assert mine.hit_ratio > least.hit_ratio + 0.08
    assert mine.ttft_mean_s < 0.7 * least.ttft_mean_s
    assert mine.busiest < 1.5


def test_documents_that_many_ask_about_need_the_prefix() -> None:
    least, session = outcome(LeastLoaded, DOCUMENTS), outcome(SessionAffinity, DOCUMENTS)
    prefix = outcome(PrefixAffinity, DOCUMENTS)
    assert abs(session.hit_ratio - least.hit_ratio) < 0.06
    assert prefix.hit_ratio > least.hit_ratio + 0.12
    assert prefix.ttft_mean_s < 0.6 * least.ttft_mean_s


@pytest.mark.parametrize(
    ("made", "traffic"), [(SessionAffinity, ONE_SYSTEM_PROMPT), (PrefixAffinity, DOCUMENTS)]
)
def test_several_gateways_agree_well_enough(made: type[SelectionPolicy], traffic: Traffic) -> None:
    alone, three = outcome(made, traffic), outcome(made, traffic, gateways=3)
    assert three.hit_ratio > alone.hit_ratio - 0.04


def test_turns_are_the_most_even() -> None:
    assert outcome(RoundRobin, CHATS).busiest < 1.01
