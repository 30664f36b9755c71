"""The check for an engine that is to start alongside the one that it replaces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from app.fleet.engine_plan import EngineConfig
from app.fleet.takeover import (
    PEAK_FACTOR,
    EngineSnapshot,
    MachineResources,
    check_overlap,
    estimate_memory_gib,
)
from engines.gpu import Device
from engines.spec import EngineSpec

SPEC: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)
GPU = Device(0, "GPU-0", "H100", 80.0, 80.0)
CPU = MachineResources((), on_cpu=True, free_gib=10.0)


def config(**fields: Any) -> EngineConfig:
    return EngineConfig("demo-0", SPEC.validate_python({"kind": "process", "model": "m", **fields}))


def obstacle(
    old: EngineConfig,
    new: EngineConfig,
    machine: MachineResources = CPU,
    memory_gib: float | None = 2.0,
) -> str | None:
    return check_overlap(old, new, EngineSnapshot(True, memory_gib), machine).obstacle


def args(**flags: Any) -> EngineConfig:
    return config(args={name.replace("_", "-"): value for name, value in flags.items()})


class TestObstacles:
    def test_none_when_memory_suffices(self) -> None:
        assert obstacle(config(), args(max_model_len=4096)) is None

    def test_host_memory(self) -> None:
        tight = MachineResources((), on_cpu=True, free_gib=2.4)
        assert obstacle(config(), config(), tight) == (
            "no memory for both: it takes up to 2.5 GiB to start, 2.4 are free"
        )

    def test_memory_budget(self) -> None:
        tight = MachineResources((), on_cpu=True, free_gib=100.0, budget_gib=1.5)
        assert obstacle(config(), config(), tight) == (
            "no memory for both: it takes 2.0 GiB, server.memory_budget_gib leaves 1.5"
        )
        spent = MachineResources((GPU,), on_cpu=False, free_gib=100.0, budget_gib=-3.0)
        assert obstacle(config(), config(), spent) == (
            "no memory for both: it takes 2.0 GiB, server.memory_budget_gib leaves 0.0"
        )

    def test_unknown_memory(self) -> None:
        assert obstacle(config(), config(), memory_gib=None) == (
            "the memory that it takes is unknown: set memory_gib"
        )
        assert obstacle(config(), config(), MachineResources((), on_cpu=True, free_gib=None)) == (
            "the free memory of this machine is unknown"
        )
        budget = MachineResources((GPU,), on_cpu=False, free_gib=9.0, budget_gib=9.0)
        assert obstacle(config(), config(), budget, None) == (
            "its share of server.memory_budget_gib is unknown: set memory_gib"
        )

    def test_unknown_accelerator(self) -> None:
        assert obstacle(config(), config(), MachineResources((), on_cpu=False, free_gib=100.0)) == (
            "the free memory of its accelerator is unknown"
        )
        assert obstacle(
            config(), config(), MachineResources(None, on_cpu=False, free_gib=100.0)
        ) == ("the GPUs of this machine are unknown")

    def test_host_memory_does_not_matter_on_a_gpu(self) -> None:
        assert obstacle(config(), config(), MachineResources((GPU,), False, 0.1), None) is None

    def test_remote_predecessor_is_no_obstacle(self) -> None:
        old = EngineConfig("demo-0", SPEC.validate_python({"kind": "remote", "url": "http://h"}))
        assert obstacle(old, config(memory_gib=50), MachineResources((), True, 0.1), None) is None

    def test_in_process_engine(self) -> None:
        assert obstacle(config(), config(kind="in_process")) == (
            "an engine of kind in_process is not started alongside another"
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
    def test_same_port(self, fields: dict[str, Any], place: str) -> None:
        one = config(**fields)
        assert obstacle(one, one) == f"both would use the same port ({place})"
        assert obstacle(config(), one) is None

    def test_port_from_which_vllm_searches_is_no_conflict(self) -> None:
        both = config(env={"VLLM_PORT": "9000", "SUPPORTED": "1", "VIEWPORTS": "1"})
        assert obstacle(both, both) is None

    def test_switch_whose_name_has_the_word_is_no_conflict(self) -> None:
        both = args(enable_tokenizer_info_endpoint=True)
        assert obstacle(both, both) is None

    def test_connector_between_engines(self) -> None:
        new = args(kv_transfer_config={"kv_connector": "NixlConnector"})
        reason = "kv-transfer-config may need a port that only one engine can have"
        assert obstacle(config(), new) == reason
        assert obstacle(config(), config(args={"kv-transfer-config.kv_role": "kv_both"})) == reason

    def test_several_machines(self) -> None:
        assert obstacle(config(), args(nnodes=2)) == "it runs on several machines"


class TestMemoryEstimate:
    def test_declared_memory_comes_first(self) -> None:
        assert (
            estimate_memory_gib(config(), config(memory_gib=7, model="other"), 2.0, on_cpu=True)
            == 7
        )

    def test_measured_memory_counts_when_no_relevant_flag_differs(self) -> None:
        assert (
            estimate_memory_gib(
                config(), args(max_model_len=1, enforce_eager=True), 2.0, on_cpu=True
            )
            == 2.0
        )

    @pytest.mark.parametrize(
        "new",
        [config(model="other"), args(dtype="float32"), args(tensor_parallel_size=2)],
    )
    def test_unknown_for_another_model_or_size(self, new: EngineConfig) -> None:
        assert estimate_memory_gib(config(), new, 2.0, on_cpu=True) is None

    @given(st.integers(0, 64), st.integers(0, 64))
    def test_larger_cache_is_added_and_a_smaller_one_not_subtracted(
        self, old: int, new: int
    ) -> None:
        before, after = (config(env={"VLLM_CPU_KVCACHE_SPACE": str(n)}) for n in (old, new))
        assert estimate_memory_gib(before, after, 2.0, on_cpu=True) == 2.0 + max(new - old, 0)

    @pytest.mark.parametrize("env", [{}, {"VLLM_CPU_KVCACHE_SPACE": "much"}])
    def test_unknown_for_an_invalid_cache_size(self, env: dict[str, str]) -> None:
        before = config(env={"VLLM_CPU_KVCACHE_SPACE": "1"})
        assert estimate_memory_gib(before, config(env=env), 2.0, on_cpu=True) is None
        assert estimate_memory_gib(before, config(env=env), 2.0, on_cpu=False) == 2.0


@given(
    st.floats(0.1, 100),
    st.floats(0, 200),
    st.none() | st.floats(-50, 200),
)
def test_overlap_needs_memory_for_the_peak_and_within_the_budget(
    need_gib: float, free_gib: float, budget_gib: float | None
) -> None:
    overlap = check_overlap(
        config(),
        config(),
        EngineSnapshot(True, need_gib),
        MachineResources((), True, free_gib, budget_gib),
    )
    fits = need_gib * PEAK_FACTOR <= free_gib and (budget_gib is None or need_gib <= budget_gib)
    assert (overlap.obstacle is None) is fits
    assert overlap.need_gib == need_gib
