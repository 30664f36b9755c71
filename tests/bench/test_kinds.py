"""The figures of a round are typical of its turns."""

from bench.kinds import medians
from tests.bench.results import result


def test_a_round_has_the_medians_of_its_turns_and_all_that_was_counted() -> None:
    turns = [
        result(ok=64, failed=0, ttft_p50=60.0, cpu_us_per_chunk=30.0),
        result(ok=63, failed=1, failures={"HTTP 502": 1}, ttft_p50=90.0, cpu_us_per_chunk=None),
        result(ok=64, failed=0, ttft_p50=61.0, cpu_us_per_chunk=28.0),
    ]
    found = medians(turns)
    assert (found.ok, found.failed, found.failures) == (191, 1, {"HTTP 502": 1})
    assert (found.ttft_p50, found.cpu_us_per_chunk) == (61.0, 29.0)
