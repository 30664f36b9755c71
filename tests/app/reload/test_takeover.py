"""Whether two engines can run at once, and how that is told."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from app.fleet.slots import Slot
from app.reload.takeover import PEAK, Machine, Present, Takeover, need, prospect
from engines.gpu.accelerator import Device
from engines.spec import EngineSpec

SPEC: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)
GPU = Device(0, "GPU-0", "H100", 80.0, 80.0)
CPU = Machine((), on_cpu=True, free_gib=10.0)


def slot(**fields: Any) -> Slot:
    return Slot("demo-0", SPEC.validate_python({"kind": "process", "model": "m", **fields}))


def obstacle(
    old: Slot, new: Slot, machine: Machine = CPU, memory_gib: float | None = 2.0
) -> str | None:
    return prospect(old, new, Present(True, memory_gib), machine).obstacle


def args(**flags: Any) -> Slot:
    return slot(args={name.replace("_", "-"): value for name, value in flags.items()})


class TestObstacles:
    def test_there_is_none_where_memory_allows(self) -> None:
        assert obstacle(slot(), args(max_model_len=4096)) is None

    def test_memory_of_the_machine(self) -> None:
        tight = Machine((), on_cpu=True, free_gib=2.4)
        assert obstacle(slot(), slot(), tight) == (
            "no memory for both: it takes up to 2.5 GiB to start, 2.4 are free"
        )

    def test_the_budget_of_the_gateway(self) -> None:
        tight = Machine((), on_cpu=True, free_gib=100.0, budget_gib=1.5)
        assert obstacle(slot(), slot(), tight) == (
            "no memory for both: it takes 2.0 GiB, server.memory_budget_gib leaves 1.5"
        )
        spent = Machine((GPU,), on_cpu=False, free_gib=100.0, budget_gib=-3.0)
        assert obstacle(slot(), slot(), spent) == (
            "no memory for both: it takes 2.0 GiB, server.memory_budget_gib leaves 0.0"
        )

    def test_memory_that_is_not_known(self) -> None:
        assert obstacle(slot(), slot(), memory_gib=None) == (
            "how much memory it takes is not known: set memory_gib"
        )
        assert obstacle(slot(), slot(), Machine((), on_cpu=True, free_gib=None)) == (
            "how much memory is free is not known"
        )
        budget = Machine((GPU,), on_cpu=False, free_gib=9.0, budget_gib=9.0)
        assert obstacle(slot(), slot(), budget, None) == (
            "what it takes of server.memory_budget_gib is not known: set memory_gib"
        )

    def test_accelerators_that_cannot_be_asked(self) -> None:
        assert obstacle(slot(), slot(), Machine((), on_cpu=False, free_gib=100.0)) == (
            "how much memory its accelerator has left is not known"
        )
        assert obstacle(slot(), slot(), Machine(None, on_cpu=False, free_gib=100.0)) == (
            "which GPUs there are is not known"
        )

    def test_memory_of_the_machine_says_nothing_of_an_engine_on_a_gpu(self) -> None:
        assert obstacle(slot(), slot(), Machine((GPU,), False, 0.1), None) is None

    def test_an_engine_that_runs_elsewhere_gives_nothing_back(self) -> None:
        old = Slot("demo-0", SPEC.validate_python({"kind": "remote", "url": "http://h"}))
        assert obstacle(old, slot(memory_gib=50), Machine((), True, 0.1), None) is None

    def test_an_engine_in_this_process(self) -> None:
        assert obstacle(slot(), slot(kind="in_process")) == (
            "an engine of kind in_process is not started beside another"
        )

    @pytest.mark.parametrize(
        ("fields", "place"),
        [
            ({"args": {"data-parallel-rpc-port": 29550}}, "args.data-parallel-rpc-port"),
            ({"args": {"x-config": {"side_port": 1}}}, "args.x-config.side_port"),
            ({"args": {"x-config": {"endpoint": "tcp://*:1"}}}, "args.x-config.endpoint"),
            ({"env": {"VLLM_DP_MASTER_PORT": "1"}}, "env.VLLM_DP_MASTER_PORT"),
        ],
    )
    def test_a_port_that_only_one_can_have(self, fields: dict[str, Any], place: str) -> None:
        one = slot(**fields)
        assert obstacle(one, one) == f"both would use the same port ({place})"
        assert obstacle(slot(), one) is None

    def test_a_port_that_vllm_looks_for_above_is_none(self) -> None:
        both = slot(env={"VLLM_PORT": "9000", "SUPPORTED": "1", "VIEWPORTS": "1"})
        assert obstacle(both, both) is None

    def test_connectors_between_engines(self) -> None:
        new = args(kv_transfer_config={"kv_connector": "NixlConnector"})
        told = "kv-transfer-config may need a port that only one engine can have"
        assert obstacle(slot(), new) == told
        assert obstacle(slot(), slot(args={"kv-transfer-config.kv_role": "kv_both"})) == told

    def test_several_machines(self) -> None:
        assert obstacle(slot(), args(nnodes=2)) == "it runs on several machines"


class TestNeed:
    def test_what_is_declared_counts_first(self) -> None:
        assert need(slot(), slot(memory_gib=7, model="other"), 2.0, on_cpu=True) == 7

    def test_what_the_old_one_takes_counts_where_nothing_differs_that_matters(self) -> None:
        assert need(slot(), args(max_model_len=1, enforce_eager=True), 2.0, on_cpu=True) == 2.0

    @pytest.mark.parametrize(
        "new",
        [slot(model="other"), args(dtype="float32"), args(tensor_parallel_size=2)],
    )
    def test_nothing_is_known_of_another_model_or_size(self, new: Slot) -> None:
        assert need(slot(), new, 2.0, on_cpu=True) is None

    @given(st.integers(0, 64), st.integers(0, 64))
    def test_space_for_the_cache_is_added_and_never_taken_off(self, old: int, new: int) -> None:
        before, after = (slot(env={"VLLM_CPU_KVCACHE_SPACE": str(n)}) for n in (old, new))
        assert need(before, after, 2.0, on_cpu=True) == 2.0 + max(new - old, 0)

    @pytest.mark.parametrize("env", [{}, {"VLLM_CPU_KVCACHE_SPACE": "much"}])
    def test_space_that_is_no_number_is_not_known(self, env: dict[str, str]) -> None:
        before = slot(env={"VLLM_CPU_KVCACHE_SPACE": "1"})
        assert need(before, slot(env=env), 2.0, on_cpu=True) is None
        assert need(before, slot(env=env), 2.0, on_cpu=False) == 2.0


@given(
    st.floats(0.1, 100),
    st.floats(0, 200),
    st.none() | st.floats(-50, 200),
)
def test_no_engine_starts_beside_another_with_less_than_it_needs(
    need_gib: float, free_gib: float, budget_gib: float | None
) -> None:
    there = prospect(
        slot(), slot(), Present(True, need_gib), Machine((), True, free_gib, budget_gib)
    )
    fits = need_gib * PEAK <= free_gib and (budget_gib is None or need_gib <= budget_gib)
    assert (there.obstacle is None) is fits
    assert there.need_gib == need_gib


class TestTold:
    @pytest.mark.parametrize(
        ("takeover", "told"),
        [
            (
                Takeover("demo-0", "demo-1", None, covered=False, held=False, start_s=57.0),
                "demo-1 starts beside demo-0 and takes over when it is ready",
            ),
            (
                Takeover("demo-0", "demo-0", "no memory for both", False, False, 57.1),
                "demo-0 ends before its successor starts, about 59 s without demo: "
                "no memory for both; last load took 57 s",
            ),
            (
                Takeover("demo-0", "demo-0", "no memory for both", False, False, None),
                "demo-0 ends before its successor starts, without demo for an unknown time, it was "
                "never loaded here: no memory for both",
            ),
            (
                Takeover("demo-0", "demo-0", "no memory for both", True, False, 57.0),
                "demo-0 ends before its successor starts, the others serve meanwhile: "
                "no memory for both; last load took 57 s",
            ),
            (
                Takeover("demo-0", "demo-0", "no memory for both", False, True, 57.0),
                "demo-0 ends before its successor starts, about 59 s in which requests wait: "
                "no memory for both; last load took 57 s",
            ),
        ],
    )
    def test_says_for_how_long_nobody_serves(self, takeover: Takeover, told: str) -> None:
        assert takeover.told("demo") == told
