import pytest

from bench.figures import Estimate
from bench.peers import CONTINUING, GATEWAY, ROUTER, WITH_REDIS
from bench.samples import Sample, Samples
from bench.targets import Goal, goals, stall_free_streams
from tests.bench.results import of, result, samples

NAMES = {
    "ours": GATEWAY,
    "continuing": CONTINUING,
    "redis": WITH_REDIS,
    "router": ROUTER,
}


@pytest.mark.parametrize(
    ("low", "high", "at_least", "verdict"),
    [
        (0.8, 0.9, False, "met"),
        (0.8, 1.0, False, "met"),
        (0.8, 1.1, False, "not shown"),
        (1.0, 1.1, False, "not shown"),
        (1.1, 1.2, False, "missed"),
        (1.1, 1.2, True, "met"),
        (1.0, 1.2, True, "met"),
        (0.9, 1.0, True, "not shown"),
        (0.8, 0.9, True, "missed"),
    ],
)
def test_a_target_within_the_interval_is_neither_met_nor_missed(
    low: float, high: float, at_least: bool, verdict: str
) -> None:
    measured = Estimate((low + high) / 2, (low, high))

    assert Goal("cost", measured, True, 1.0, at_least=at_least).verdict == verdict


def test_a_target_without_an_interval_is_not_shown() -> None:
    assert Goal("cost", Estimate(0.1, None), True, 1.0).verdict == "not shown"
    assert Goal("cost", None, True, 1.0).verdict == "not shown"


def test_the_targets_of_parts_that_did_not_run_are_not_run() -> None:
    assert {goal.verdict for goal in goals(of())} == {"not run"}

    plain = of(samples("plain", 32, "cpu_us_per_request", vllm_gateway=[90.0]))
    ran = {goal.figure for goal in goals(plain) if goal.verdict != "not run"}

    assert len(ran) == 3
    assert all("plain" in figure for figure in ran)


def stalls(direct: list[int], ours: list[int]) -> Samples:
    return of(
        samples("stall", 1024, "stall_free", direct=direct),
        samples("stall", 1024, "stall_free", vllm_gateway=ours),
    )


def test_stalls_count_only_if_the_direct_engine_has_none() -> None:
    run = stalls([1024, 900, 1024, 1024], [1024, 3, 1000, 1024])

    assert stall_free_streams(run, GATEWAY) == Estimate(1024, None)


def test_a_round_in_which_every_stream_failed_has_no_stall_free_one() -> None:
    failed = result(ok=0, stall_free=0)
    run = Samples(
        [
            *samples("stall", 1024, "stall_free", direct=[1024] * 6),
            *(Sample("stall", 1024, number, GATEWAY, failed) for number in range(6)),
        ]
    )

    assert stall_free_streams(run, GATEWAY) == Estimate(0.0, (0.0, 0.0))
