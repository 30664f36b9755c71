"""The ranks of an engine over several nodes: their flags, their names, what is whole."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.ray.ranks import Rank, actor_name, attributed, engine_of, is_whole, members

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,20}-[0-9]{1,2}", fullmatch=True)


def found(rank: int, nodes: int = 2, place: str = "one", **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "nodes": nodes, "place": place, "pid": 7, **fields}


def test_one_node_has_no_flags_of_ranks() -> None:
    assert Rank().flags() == []


def test_rank_0_serves_and_the_others_are_headless() -> None:
    first, second = (Rank(number, 2, "10.0.0.1", 20001).flags() for number in range(2))
    assert first == [
        "--nnodes=2",
        "--node-rank=0",
        "--master-addr=10.0.0.1",
        "--master-port=20001",
        "--distributed-executor-backend=mp",
    ]
    assert second == [*first[:1], "--node-rank=1", *first[2:], "--headless"]


@given(NAMES, st.integers(0, 63))
def test_name_of_an_actor_has_its_engine_and_rank(engine: str, rank: int) -> None:
    name = actor_name(engine, rank)
    assert engine_of(name) == engine
    assert members(engine, [name]) == list(dict.fromkeys([engine, name]))
    assert (name == engine) == (rank == 0)


def test_members_are_those_of_one_engine_in_order_of_their_ranks() -> None:
    actors = ["a-1", "a-0@10", "a-0@2", "a-0", "a-0-0@1", "b-0@1"]
    assert members("a-0", actors) == ["a-0", "a-0@2", "a-0@10"]
    assert members("c-0", actors) == ["c-0"]


@pytest.mark.parametrize("stranger", ["demo-0@blue", "demo-0@", "demo-0@1@2", "demo-0@0"])
def test_an_actor_that_is_named_like_an_engine_is_no_member(stranger: str) -> None:
    assert members("demo-0", ["demo-0", "demo-0@1", stranger]) == ["demo-0", "demo-0@1"]


@pytest.mark.parametrize(
    ("actors", "whole"),
    [
        ([], False),
        ([found(0, 1)], True),
        ([found(0), found(1)], True),
        ([found(0)], False),
        ([found(1)], False),
        ([found(0), found(1), found(2, 3)], False),
        ([found(0), found(1, place="another start")], False),
        ([found(0), {"place": "one"}], False),
    ],
)
def test_engine_is_whole_if_every_rank_of_one_start_runs(
    actors: list[dict[str, Any]], whole: bool
) -> None:
    assert is_whole(actors) == whole


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "(Worker_TP1 pid=12) INFO 11-23 21:27:22 [m.py:1] text",
            "(Worker_TP1 pid=12, ip=10.0.0.2) INFO 11-23 21:27:22 [m.py:1] text",
        ),
        ("  warnings.warn()", "(Rank 1 pid=9, ip=10.0.0.2)   warnings.warn()"),
        ("(in brackets) text", "(Rank 1 pid=9, ip=10.0.0.2) (in brackets) text"),
    ],
)
def test_line_of_a_rank_names_its_node(line: str, shown: str) -> None:
    assert attributed(line, 1, 9, "10.0.0.2") == shown
