from bench.samples import Comparison, Sample, Samples
from bench.targets import cpu_per_chunk, requests_per_s, ttft_p99
from tests.bench.results import of, result, samples


def test_medians_are_over_the_rounds() -> None:
    run = of(samples("streams", 64, "cpu_us_per_chunk", a=[1.0, 9.0, 2.0]))

    assert run.median("streams", 64, "a", cpu_per_chunk) == 2.0
    assert run.median("streams", 512, "a", cpu_per_chunk) is None


def test_added_is_against_the_same_round() -> None:
    # The second round was slow for all: medians alone would say that 5 ms were added.
    run = of(samples("streams", 64, "ttft_p99", direct=[1.0, 100.0, 2.0], a=[2.0, 101.0, 7.0]))

    assert run.added("streams", 64, "a", "direct", ttft_p99) == 1.0


def test_a_comparison_has_both_ratios() -> None:
    run = of(samples("streams", 64, "cpu_us_per_chunk", a=[1.0, 4.0, 9.0], b=[1.0, 2.0, 1.0]))

    assert run.compare("streams", 64, "a", "b", cpu_per_chunk) == Comparison(4.0, 2.0)


def test_a_round_that_one_of_the_two_missed_is_not_compared() -> None:
    run = of(samples("streams", 64, "cpu_us_per_chunk", a=[1.0, 4.0], b=[2.0]))

    assert run.compare("streams", 64, "a", "b", cpu_per_chunk).by_round == 0.5


def test_what_was_added_is_compared() -> None:
    run = of(samples("streams", 64, "ttft_p99", direct=[1.0], a=[4.0], b=[3.0]))

    against = run.compare_added("streams", 64, "a", "b", "direct", ttft_p99)

    assert against == Comparison(1.5, 1.5)


def test_targets_and_sizes_are_those_of_a_part() -> None:
    run = of(
        samples("streams", 512, "ok", b=[1]),
        samples("streams", 64, "ok", b=[1], a=[1]),
        samples("plain", 1, "ok", c=[1]),
    )

    assert run.sizes("streams") == [64, 512]
    assert run.targets("streams") == ["b", "a"]
    assert run.targets("streams", 512) == ["b"]


def test_failures_are_summed_over_everything() -> None:
    run = of(samples("plain", 1, "failures", a=[{"HTTP 500": 1}, {"HTTP 500": 2}], b=[{}]))

    assert run.failures() == {"a: HTTP 500": 3}
    assert result().failures == {}


def test_a_round_without_one_success_has_no_figures() -> None:
    failed = result(ok=0, requests_per_s=0.0)
    run = Samples([Sample("plain", 1, 0, "a", failed)])

    assert run.median("plain", 1, "a", requests_per_s) is None
