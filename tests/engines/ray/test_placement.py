"""What engines need of a node, and the words for a cluster that does not have it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.ray.placement import (
    MAX_SHOWN,
    Node,
    needed_resources,
    occupied,
    placement_fault,
)
from engines.spec import RaySpec

NAMES = st.sampled_from(["CPU", "GPU", "slot"])
AMOUNTS = st.dictionaries(NAMES, st.integers(1, 8).map(float))


def spec(**fields: Any) -> RaySpec:
    return RaySpec.model_validate({"kind": "ray", "model": "m", **fields})


def node(address: str = "10.0.0.1", **total: float) -> Node:
    return Node(address, total, total)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, {"CPU": 1}),
        ({"resources": {"CPU": 8, "slot": 1}}, {"CPU": 8, "slot": 1}),
        ({"gpus": 2}, {"CPU": 1, "GPU": 2}),
        ({"gpus": "auto", "args": {"tensor-parallel-size": 4}}, {"CPU": 1, "GPU": 4}),
        (
            {"nodes": 2, "gpus": "auto", "args": {"tensor-parallel-size": 16}},
            {"CPU": 1, "GPU": 8},
        ),
        (
            {"gpus": 1, "accelerator_type": "A100"},
            {"CPU": 1, "GPU": 1, "accelerator_type:A100": 0.001},
        ),
    ],
)
def test_needed_resources(fields: dict[str, Any], needed: dict[str, float]) -> None:
    assert needed_resources(spec(**fields)) == needed


def test_fault_names_what_is_needed_and_what_there_is() -> None:
    nodes = [
        node("10.0.0.1", CPU=4.0, object_store_memory=1.0, **{"node:10.0.0.1": 1.0}),
        node("10.0.0.2", CPU=64.0, GPU=4.0, memory=2.0**36, **{"accelerator_type:T4": 1.0}),
    ]
    assert placement_fault({"CPU": 1.0, "GPU": 8.0}, nodes) == (
        "no node of the Ray cluster can hold it: it needs CPU 1, GPU 8; there is "
        "10.0.0.2 (CPU 64, GPU 4, type T4, memory 64.0 GiB), 10.0.0.1 (CPU 4)"
    )
    assert placement_fault({"GPU": 4.0}, nodes) is None
    assert "the cluster has no node" in (placement_fault({"CPU": 1.0}, []) or "")


def test_full_cluster_shows_what_is_free() -> None:
    full = [Node("10.0.0.1", {"CPU": 8.0, "GPU": 1.0}, {"CPU": 7.0, "GPU_group_0_ab": 1.0})]
    assert occupied({"GPU": 1.0}, full) == (
        "no node of the Ray cluster has room for it now: it needs GPU 1; free: 10.0.0.1 (CPU 7)"
    )


def test_engine_over_several_nodes_needs_as_many_that_can_hold_a_part() -> None:
    need = {"CPU": 1.0, "GPU": 8.0}
    nodes = [node("10.0.0.1", CPU=4.0), node("10.0.0.2", CPU=64.0, GPU=8.0)]
    there = "10.0.0.2 (CPU 64, GPU 8), 10.0.0.1 (CPU 4)"
    assert placement_fault(need, nodes, 1) is None
    assert placement_fault(need, nodes, 2) == (
        "only 1 node of the Ray cluster can hold a part of it: it needs 2 nodes with CPU 1, GPU 8 "
        f"each; there is {there}"
    )
    assert occupied(need, nodes, 2) == (
        "only 1 node of the Ray cluster has room for a part of it now: it needs 2 nodes with "
        f"CPU 1, GPU 8 each; free: {there}"
    )
    assert (placement_fault(need, nodes[:1], 2) or "").startswith("no node of the Ray cluster can")
    assert occupied(need, nodes[:1], 2).startswith("no node of the Ray cluster has room")


def test_message_about_a_large_cluster_is_short() -> None:
    nodes = [node(f"10.0.0.{n}", CPU=4.0) for n in range(100)]
    fault = placement_fault({"GPU": 1.0}, nodes)
    assert fault is not None
    assert fault.count("10.0.0.") == MAX_SHOWN
    assert fault.endswith("96 more")


@given(AMOUNTS, st.lists(AMOUNTS, max_size=4), st.integers(1, 4))
def test_engine_fits_exactly_if_enough_nodes_have_all_that_it_needs(
    needed: dict[str, float], totals: list[dict[str, float]], count: int
) -> None:
    nodes = [Node(f"n{n}", total, {}) for n, total in enumerate(totals)]
    fits = [all(t.get(k, 0) >= v for k, v in needed.items()) for t in totals]
    assert (placement_fault(needed, nodes, count) is None) == (sum(fits) >= count)
