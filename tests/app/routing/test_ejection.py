"""Replicas that are on their way back: which of them get a request more."""

import pytest

from app.routing import POLICIES, Replica, list_usable
from app.routing.answer_health import AnswerHealth
from tests.app.routing.fakes import FakeEngine, FakeHints


def on_its_way_back(name: str, limit: int) -> Replica:
    engine = FakeEngine(name)
    return Replica(engine, "demo", health=AnswerHealth(engine.since, limit=limit))


def send(policy: str, candidates: list[Replica], count: int) -> None:
    """Send so many requests of as many sessions, which do not end."""
    made = POLICIES[policy]()
    for number in range(count):
        hints = FakeHints(b"%d" % number, b"%d" % number + bytes(1024))
        chosen = made.choose(list_usable(candidates), hints)
        assert chosen is not None
        chosen.in_flight += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_that_are_all_on_their_way_back_share_what_comes(policy: str) -> None:
    """More than all of them may have at once: no request is refused for that."""
    candidates = [on_its_way_back(f"demo-{number}", limit=1) for number in range(3)]
    send(policy, candidates, 300)
    assert sum(one.in_flight for one in candidates) == 300
    assert max(one.in_flight for one in candidates) < 130


@pytest.mark.parametrize("policy", POLICIES)
def test_one_on_its_way_back_gets_no_more_than_its_limit(policy: str) -> None:
    back, fine = on_its_way_back("back", limit=2), Replica(FakeEngine("fine"), "demo")
    send(policy, [back, fine], 50)
    assert back.in_flight <= 2
