import pytest

from bench.peers import (
    BEFORE,
    CONTINUING,
    COPY,
    DIRECT,
    GATEWAY,
    LITELLM,
    ROUTER,
    WITH_REDIS,
    WITH_TLS,
    WITH_TOKENS,
    WITH_TRACES,
)
from bench.rounds import Case, cases, turns

PARTS = ("streams", "plain", "stall")


def test_every_second_round_is_in_reverse_order() -> None:
    assert [*turns("abc", 0)] == [*turns("abc", 2)] == ["a", "b", "c"]
    assert [*turns("abc", 1)] == ["c", "b", "a"]


def test_the_loads_that_targets_are_about_have_rounds_enough_for_an_interval() -> None:
    judged = {("streams", 64), ("streams", 512), ("plain", 32), ("stall", 1024)}

    rounds = {(c.part, c.size): c.rounds for c in cases(PARTS, quick=False)}

    assert min(rounds[place] for place in judged) >= 6


@pytest.mark.parametrize(
    ("part", "size", "left_out"),
    [
        ("streams", 64, {WITH_REDIS, WITH_TRACES}),
        ("streams", 512, {WITH_REDIS, WITH_TRACES, LITELLM}),
        ("plain", 32, {CONTINUING}),
        (
            "stall",
            1024,
            {WITH_REDIS, WITH_TRACES, WITH_TLS, WITH_TOKENS, CONTINUING, LITELLM, COPY},
        ),
    ],
)
def test_load_skips_targets_without_a_meaningful_result(
    part: str, size: int, left_out: set[str]
) -> None:
    ours = {GATEWAY, WITH_REDIS, WITH_TRACES, WITH_TLS, WITH_TOKENS, CONTINUING, BEFORE, COPY}
    names = {DIRECT, *ours, ROUTER, LITELLM}
    case = Case(part=part, size=size)

    assert {name for name in names if not case.includes(name, 0)} == left_out
    assert not case.includes(LITELLM, 5)
