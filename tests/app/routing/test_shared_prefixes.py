"""The simulated engine with batches and a cache, and a published benchmark on it."""

import pytest

from tests.app.routing.batched_engine import (
    BLOCK_TOKENS,
    PROMPT_TOKEN_S,
    STEP_S,
    BatchedEngine,
    Job,
)
from tests.app.routing.shared_prefixes import StageResult, make


class Requests:
    """Requests to one engine, and when each had its first token and ended."""

    def __init__(self, kv_tokens: int) -> None:
        self.engine = BatchedEngine(kv_tokens)
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.now = 0.0

    def send(self, name: str, *blocks: int, answer: int = BLOCK_TOKENS) -> Job:
        job = Job(
            blocks,
            answer,
            lambda now: self.first.update({name: now}),
            lambda now: self.ended.update({name: now}),
        )
        self.engine.submit(job)
        return job

    def run(self) -> None:
        while self.engine.busy:
            self.now = self.engine.begin_step(self.now)
            self.engine.end_step(self.now)


def test_what_is_cached_of_a_prompt_is_not_computed_again() -> None:
    requests = Requests(100 * BLOCK_TOKENS)
    requests.send("cold", 1, 2, 3)
    requests.run()
    assert requests.first["cold"] == pytest.approx(STEP_S + 3 * BLOCK_TOKENS * PROMPT_TOKEN_S)
    began = requests.now
    warm = requests.send("warm", 1, 2, 4)
    requests.run()
    assert warm.cached == 2
    took_s = requests.first["warm"] - began
    assert took_s == pytest.approx(STEP_S + BLOCK_TOKENS * PROMPT_TOKEN_S)


def test_the_least_recently_used_blocks_are_evicted_the_last_of_a_prompt_first() -> None:
    requests = Requests(5 * BLOCK_TOKENS)
    requests.send("old", 1, 2, 3)
    requests.run()
    requests.send("new", 4, 5)
    requests.run()
    again = requests.send("old again", 1, 2, 3)
    requests.run()
    assert again.cached == 2


def test_a_prompt_that_does_not_fit_waits_until_another_has_ended() -> None:
    requests = Requests(6 * BLOCK_TOKENS)
    requests.send("first", 1, 2, 3)
    requests.send("second", 4, 5, 6)
    requests.run()
    assert requests.first["second"] > requests.ended["first"]


def test_the_last_is_preempted_when_the_cache_is_full_and_ends_all_the_same() -> None:
    requests = Requests(8 * BLOCK_TOKENS)
    requests.send("first", 1, 2, answer=4 * BLOCK_TOKENS)
    last = requests.send("last", 3, 4, answer=4 * BLOCK_TOKENS)
    requests.run()
    assert requests.engine.preemptions == 1
    assert last.runs == 1
    assert requests.ended["last"] > requests.ended["first"]


@pytest.mark.slow
def test_the_prefix_rule_serves_a_published_benchmark_at_a_much_higher_rate() -> None:
    results: dict[str, StageResult] = {}
    for name in ("round_robin", "prefix"):
        benchmark = make(name)
        benchmark.run(15, 50)
        results[name] = benchmark.run(30, 25)
    prefix, turns = results["prefix"], results["round_robin"]
    assert prefix.hit_ratio > turns.hit_ratio + 0.5
    assert prefix.tokens_per_s > 1.35 * turns.tokens_per_s
    assert max(prefix.ttfts_s) < min(5, sum(turns.ttfts_s) / len(turns.ttfts_s))
