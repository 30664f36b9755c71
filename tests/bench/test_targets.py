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


def test_figure_without_a_bound_has_no_verdict() -> None:
    assert Goal("pause", Estimate(0.1, (0.1, 0.1)), True).verdict == ""
    assert Goal("pause", None, False).verdict == "not run"


def test_the_targets_of_parts_that_did_not_run_are_not_run() -> None:
    assert {goal.verdict for goal in goals(of())} == {"not run"}

    plain = of(samples("plain", 32, "cpu_us_per_request", vllm_gateway=[90.0]))
    ran = {goal.figure for goal in goals(plain) if goal.verdict != "not run"}

    assert len(ran) == 3
    assert all("plain" in figure for figure in ran)


def rounds(part: str, size: int, **by_target: dict[str, float]) -> list[Sample]:
    """Return six equal rounds, so that each interval is a single value."""
    return [
        Sample(part, size, number, NAMES.get(target, target), result(**fields))
        for number in range(6)
        for target, fields in by_target.items()
    ]


def test_every_target_takes_its_figures_from_the_run() -> None:
    run = of(
        rounds(
            "plain",
            32,
            ours={"cpu_us_per_request": 90.0, "requests_per_s": 4000.0},
            router={"cpu_us_per_request": 60.0, "requests_per_s": 10000.0},
            redis={"cpu_us_per_request": 108.0},
        ),
        rounds(
            "streams",
            64,
            direct={"ttft_p99": 1.0},
            ours={"cpu_us_per_chunk": 8.0, "ttft_p99": 4.0},
            router={"cpu_us_per_chunk": 10.0, "ttft_p99": 3.0},
            continuing={"cpu_us_per_chunk": 8.8},
        ),
        rounds(
            "streams",
            512,
            ours={"cpu_us_per_chunk": 30.0},
            router={"cpu_us_per_chunk": 20.0},
            continuing={"cpu_us_per_chunk": 36.0},
        ),
        rounds("stall", 1024, direct={"stall_free": 1024}, ours={"stall_free": 1024}),
        rounds("memory", 1024, ours={"rss_mib": 104.0, "gc_pause_ms": 7.5}),
        rounds("real", 32, ours={"tokens_per_s": 990.0}, router={"tokens_per_s": 900.0}),
    )

    shown = {
        goal.figure: (goal.bound, goal.aim, goal.measured and goal.measured.median, goal.verdict)
        for goal in goals(run)
    }

    assert shown == {
        "CPU per plain request, 32 at a time, × vllm-router": (1.8, 1.3, 1.5, "met"),
        "CPU per streamed chunk, 64 streams, × vllm-router": (1.0, 0.9, 0.8, "met"),
        "CPU per streamed chunk, 512 streams, × vllm-router": (1.1, 1.0, 1.5, "missed"),
        "CPU per streamed chunk, 64 streams, continuation on × off": (1.15, None, 1.1, "met"),
        "CPU per streamed chunk, 512 streams, continuation on × off": (1.15, None, 1.2, "missed"),
        "added TTFT p99, 64 streams, × what vllm-router adds": (1.3, 1.0, 1.5, "missed"),
        "stall-free streams of 1,024, where direct has 1,024": (1024, None, 1024, "met"),
        "RSS after plain load, 512 and 1,024 streams": (105, 90, 104.0, "met"),
        "tokens/s on real vLLM, 32 streams, × vllm-router": (1.0, None, 1.1, "met"),
        "CPU per plain request, 32 at a time, limits in Redis × in memory": (
            1.15,
            None,
            1.2,
            "missed",
        ),
        "plain requests/s of one process, 32 at a time, × vllm-router": (
            0.5,
            None,
            0.4,
            "missed",
        ),
        "longest pause of the garbage collector under load": (None, None, 7.5, ""),
    }


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


def test_stall_free_share_of_an_absent_target_is_none() -> None:
    assert stall_free_streams(stalls([1024], [1024]), "b") is None
    assert stall_free_streams(of(), "a") is None
