import pytest

from bench.disturbances import Disturbances
from bench.targets import Goal, goals, stall_free_streams
from tests.bench.results import disturbance, of, samples


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("cost", 1.0, 1.0), True),
        (Goal("cost", 1.0, 1.01), False),
        (Goal("cost", 1.0, None), None),
        (Goal("throughput", 0.98, 0.98, at_least=True), True),
        (Goal("throughput", 0.98, 0.97, at_least=True), False),
    ],
)
def test_a_bound_is_a_ceiling_or_a_floor(goal: Goal, met: bool | None) -> None:
    assert goal.met is met


def test_without_a_measurement_nothing_is_met() -> None:
    assert {goal.met for goal in goals(of())} == {None}


def test_every_goal_takes_its_figure_from_the_run() -> None:
    run = of(
        samples("streams", 64, "cpu_us_per_chunk", vllm_gateway=[8.0], vllm_router=[10.0]),
        samples("streams", 64, "cpu_us_per_chunk", litellm=[100.0]),
        samples("streams", 512, "cpu_us_per_chunk", vllm_gateway=[30.0], vllm_router=[20.0]),
        samples("plain", 32, "cpu_us_per_request", vllm_gateway=[90.0], vllm_router=[60.0]),
        samples("plain", 32, "cpu_us_per_request", litellm=[9000.0]),
        samples("plain", 32, "cpu_us_per_request", **{"vllm_gateway, limits in Redis": [126.0]}),
        samples("stall", 1024, "rss_mib", vllm_gateway=[130.0]),
        samples("real", 32, "tokens_per_s", direct=[5000.0], vllm_gateway=[4950.0]),
    )

    measured = {goal.figure: (goal.measured, goal.met) for goal in goals(run)}

    assert measured == {
        "CPU per streamed chunk, 64 streams, × vllm-router": (0.8, True),
        "CPU per streamed chunk, 512 streams, × vllm-router": (1.5, False),
        "CPU per plain request, 32 at a time, × vllm-router": (1.5, True),
        "CPU per plain request, 32 at a time, limits in Redis × in memory": (1.4, True),
        "CPU per streamed chunk, 64 streams, × litellm": (0.08, True),
        "CPU per plain request, 32 at a time, × litellm": (0.01, True),
        "added TTFT p99, 64 streams, × what vllm-router adds": (None, None),
        "stall-free streams": (0, False),
        "RSS at 1,024 streams": (130.0, False),
        "tokens per second on real vLLM, 32 streams, × direct": (0.99, True),
        "longest stop of the event loop under a hostile body": (None, None),
    }


@pytest.mark.parametrize(("stop_ms", "met"), [(19.5, True), (20.5, False)])
def test_the_longest_stop_of_the_event_loop_has_a_bound(stop_ms: float, met: bool) -> None:
    run = Disturbances([disturbance(stop_ms=stop_ms)])

    stop = next(goal for goal in goals(of(), run) if goal.figure.startswith("longest stop"))

    assert (stop.measured, stop.bound, stop.met) == (stop_ms, 20, met)


def test_added_latency_is_compared_to_what_the_router_adds() -> None:
    run = of(
        samples("streams", 64, "ttft_p99", direct=[1.0], vllm_gateway=[4.0], vllm_router=[3.0])
    )

    added = next(goal for goal in goals(run) if goal.figure.startswith("added TTFT"))

    assert (added.measured, added.met) == (1.5, True)


@pytest.mark.parametrize(
    ("by_size", "expected"),
    [
        ({64: [64, 64, 64], 128: [128, 3, 128]}, 128),  # the median round counts
        ({64: [64, 64, 64], 128: [127, 127, 128]}, 64),
        ({64: [63], 128: [128]}, 0),  # luck at a larger size is no merit
    ],
)
def test_stall_free_streams_is_the_size_up_to_which_none_stalled(
    by_size: dict[int, list[int]], expected: int
) -> None:
    run = of(*(samples("stall", size, "stall_free", me=v) for size, v in by_size.items()))

    assert stall_free_streams(run, "me") == expected


def test_stall_free_streams_of_one_that_took_no_part_is_nothing() -> None:
    assert stall_free_streams(of(samples("stall", 64, "stall_free", a=[64])), "b") is None
    assert stall_free_streams(of(), "a") is None
