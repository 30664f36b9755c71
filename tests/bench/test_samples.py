from bench.figures import Estimate
from bench.samples import Sample, Samples
from tests.bench.results import of, result, samples


def test_added_is_against_the_same_round() -> None:
    # The second round was slow for all: medians alone would say that 5 ms were added.
    run = of(samples("streams", 64, "ttft_p99", direct=[1.0, 100.0, 2.0], a=[2.0, 101.0, 7.0]))

    assert run.added("streams", 64, "a", "direct", "ttft_p99") == 1.0


def test_a_ratio_is_taken_within_each_round() -> None:
    # The ratio of the medians would be 4.
    run = of(samples("streams", 64, "cpu_us_per_chunk", a=[1.0, 4.0, 9.0], b=[1.0, 2.0, 1.0]))

    assert run.ratio("streams", 64, "a", "b", "cpu_us_per_chunk") == Estimate(2.0, None)


def test_a_ratio_of_enough_rounds_has_an_interval() -> None:
    a, b = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 180.0], [2.0] * 9
    run = of(samples("plain", 32, "cpu_us_per_request", a=a, b=b))

    ratio = run.ratio("plain", 32, "a", "b", "cpu_us_per_request")

    assert ratio == Estimate(5.0, (2.0, 8.0))


def test_a_round_that_one_of_the_two_missed_is_not_compared() -> None:
    run = of(samples("streams", 64, "cpu_us_per_chunk", a=[1.0, 4.0], b=[2.0]))

    assert run.ratio("streams", 64, "a", "b", "cpu_us_per_chunk") == Estimate(0.5, None)


def test_what_was_added_is_compared_within_each_round() -> None:
    run = of(
        samples(
            "streams", 64, "ttft_p99", direct=[1.0, 9.0, 5.0], a=[4.0, 9.5, 6.0], b=[3.0, 8.0, 5.5]
        )
    )

    against = run.ratio_of_added("streams", 64, "a", "b", "direct", "ttft_p99")
    reverse = run.ratio_of_added("streams", 64, "b", "a", "direct", "ttft_p99")

    assert against == Estimate(2.0, None)  # of 1.5, infinity and 2
    assert reverse == Estimate(0.5, None)  # of 2/3, 0 and 1/2


def test_a_round_without_one_success_has_no_figures() -> None:
    failed = result(ok=0, requests_per_s=0.0)
    run = Samples([Sample("plain", 1, 0, "a", failed)])

    assert run.median("plain", 1, "a", "requests_per_s") is None
