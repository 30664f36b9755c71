from typing import Any

from bench.disturbances import AT_ONCE, NO_BODY, Disturbance, Disturbances
from bench.peers import GATEWAY, ROUTER
from tests.bench.results import disturbance


def stops(*values: float | None, **fields: Any) -> list[Disturbance]:
    return [disturbance(round=n, stop_ms=value, **fields) for n, value in enumerate(values)]


def test_longest_stop_is_the_median_send_of_the_worst_body() -> None:
    run = Disturbances(
        [
            *stops(1.0, 900.0, 2.0),
            *stops(30.0, body="form", at_once=AT_ONCE),
            *stops(300.0, body=NO_BODY),
            *stops(400.0, target=ROUTER),
            *stops(None, body="image"),
        ]
    )

    assert run.longest_stop_ms(GATEWAY) == 30.0
    assert Disturbances().longest_stop_ms(GATEWAY) is None


def outcome(*found: Disturbance) -> str:
    return Disturbances(found).outcome("members", GATEWAY)


def test_an_outcome_names_each_status_once() -> None:
    eight = disturbance(at_once=AT_ONCE, outcomes=["200", "503", "200", "ConnectionResetError"])

    assert outcome(disturbance(), eight) == "200, 503, ConnectionResetError"
    assert outcome(disturbance(outcomes=[])) == ""


def test_outcome_distinguishes_refusals_before_and_after_the_body() -> None:
    early, late = (disturbance(outcomes=["429"], before_body=early) for early in (True, False))

    assert outcome(early, early) == "429, before the body"
    assert outcome(early, late) == "429, after the body"


def test_outcome_reports_lost_streams_and_a_dead_target() -> None:
    last = disturbance(outcomes=["ConnectionResetError"], streams_lost=64, died=True)

    assert outcome(last) == "ConnectionResetError, 64 streams lost, died"
