"""The load of an engine, from its page of metrics."""

import pytest

from app.concurrency import EngineCounters, read_counters

# Lines of vLLM 0.32.0, of two data-parallel ranks, with neighbours that begin alike.
PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b} c"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a {b} c"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a {b} c"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a {b} c"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a {b} c"} 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="a {b} c"} 2.0
vllm:num_preemptions_total{engine="1",model_name="a {b} c"} 5.0
vllm:num_preemptions_created{engine="0",model_name="a {b} c"} 1.7e+09
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a {b} c"} 40.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="a {b} c"} 1.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="a {b} c"} 30.0
"""


def test_ranks_count_together_and_the_fullest_cache_counts() -> None:
    assert read_counters(PAGE) == EngineCounters(
        running=7, waiting=1, preemptions=7, ended=71, kv_usage=0.5
    )


@pytest.mark.parametrize("name", [b"running", b"waiting{", b"preemptions_total", b"kv_cache"])
def test_a_page_that_lacks_a_counter_has_none(name: bytes) -> None:
    lines = [line for line in PAGE.splitlines(keepends=True) if name not in line]
    assert read_counters(b"".join(lines)) is None


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1.0", b"1e300", b"many", b"9" * 400])
def test_a_value_that_is_no_count_makes_the_page_worthless(value: bytes) -> None:
    assert read_counters(PAGE.replace(b" 4.0", b" " + value)) is None


def test_pages_without_labels_and_of_others() -> None:
    page = (
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2 1700000000000\n"
        b"vllm:num_preemptions_total 3\nvllm:kv_cache_usage_perc 0.125"
    )
    assert read_counters(page) == EngineCounters(1, 2, 3, 0, 0.125)
    assert read_counters(b"") is None
    assert read_counters(b"sglang:num_running_reqs 1.0\n" * 1000) is None
