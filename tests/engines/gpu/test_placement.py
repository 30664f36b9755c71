"""Placement on GPUs, and the messages for engines that do not fit."""

import importlib.util
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engines.gpu.accelerator import Device
from engines.gpu.placement import (
    DEFAULT_SHARE,
    Placement,
    PlacementError,
    PlacementRequest,
    count_gpus,
    memory_share,
    place,
    place_additional,
    visible_devices,
)
from engines.spec import ProcessSpec


def gpus(number: int, *, total: float | None = 80.0, mig: Sequence[int] = ()) -> list[Device]:
    return [
        Device(index, f"GPU-{index:02d}aa", "H100", total, total, index in mig)
        for index in range(number)
    ]


def request(engine: str, *, on_demand: bool = False, **fields: Any) -> PlacementRequest:
    """Return a request; flags are given with underscores, next to the fields of the spec."""
    known = set(ProcessSpec.model_fields)
    args = {name: fields.pop(name) for name in list(fields) if name not in known}
    spec = ProcessSpec(kind="process", model="m", **fields, args=args)
    return PlacementRequest(engine, engine.rpartition("-")[0], spec, on_demand)


def share(of: Any) -> dict[str, Any]:
    return {"gpu_memory_utilization": of}


def placed(*requests: PlacementRequest, on: Sequence[Device]) -> dict[str, tuple[int, ...]]:
    return {engine: placement.devices for engine, placement in place(requests, on).items()}


def at(*gpus: int) -> Placement:
    return Placement(gpus, {})


def refused(*requests: PlacementRequest, on: Sequence[Device]) -> list[str]:
    with pytest.raises(PlacementError) as caught:
        place(requests, on)
    assert str(caught.value) == "\n".join(caught.value.faults)
    return caught.value.faults


class TestPlaces:
    def test_list_is_taken_as_is(self) -> None:
        found = place([request("m-0", gpus=[3, 1], tensor_parallel_size=2)], gpus(4))
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"}
        assert found == {"m-0": Placement((3, 1), env)}

    def test_request_without_gpus_gets_no_placement(self) -> None:
        assert placed(request("m-0"), on=gpus(1)) == {}
        assert placed(request("m-0"), on=()) == {}

    def test_auto_takes_the_gpus_of_the_parallel_sizes(self) -> None:
        asked = request("m-0", gpus="auto", tensor_parallel_size=2, pipeline_parallel_size=2)
        assert placed(asked, on=gpus(8)) == {"m-0": (0, 1, 2, 3)}

    def test_small_engines_share_a_gpu_and_parallel_ones_get_free_gpus(self) -> None:
        found = placed(
            request("a-0", gpus="auto", **share(0.4)),
            request("b-0", gpus="auto", **share(0.5)),
            request("c-0", gpus="auto", tensor_parallel_size=2),
            on=gpus(3),
        )
        assert found == {"a-0": (2,), "b-0": (2,), "c-0": (0, 1)}

    def test_replicas_are_spread(self) -> None:
        replicas = [request(f"m-{n}", gpus="auto", **share(0.4)) for n in range(3)]
        assert placed(*replicas, on=gpus(2)) == {"m-0": (0,), "m-1": (1,), "m-2": (0,)}

    def test_number_of_gpus_is_placed(self) -> None:
        found = placed(
            request("a-0", gpus=[0]), request("b-0", gpus=2, tensor_parallel_size=2), on=gpus(3)
        )
        assert found == {"a-0": (0,), "b-0": (1, 2)}

    def test_ranks_go_on_gpus_of_one_kind(self) -> None:
        small = [Device(0, "GPU-s", "L4", 24.0, 24.0), *gpus(3)[1:]]
        assert placed(request("m-0", gpus="auto", tensor_parallel_size=2), on=small) == {
            "m-0": (1, 2)
        }
        assert placed(request("m-0", gpus="auto", tensor_parallel_size=3), on=small) == {
            "m-0": (0, 1, 2)
        }

    def test_too_small_gpu_is_skipped(self) -> None:
        mixed = [Device(0, "GPU-s", "L4", 24.0, 24.0), *gpus(2)[1:]]
        assert placed(request("m-0", gpus="auto", memory_gib=30), on=mixed) == {"m-0": (1,)}

    def test_gpu_of_unknown_memory_is_used(self) -> None:
        assert placed(request("m-0", gpus="auto", memory_gib=300), on=gpus(1, total=None)) == {
            "m-0": (0,)
        }

    def test_gpu_with_mig_instances_is_skipped(self) -> None:
        assert placed(request("m-0", gpus="auto"), on=gpus(2, mig=[0])) == {"m-0": (1,)}

    def test_on_demand_models_are_spread_and_share_gpus_if_necessary(
        self,
    ) -> None:
        models = [request(f"{name}-0", gpus="auto", on_demand=True) for name in "abc"]
        assert placed(*models, on=gpus(2)) == {"a-0": (0,), "b-0": (1,), "c-0": (0,)}

    def test_engines_without_gpus_occupy_the_gpus_they_see(self) -> None:
        named = request("old-0", env={"CUDA_VISIBLE_DEVICES": "1"})
        by_flag = request("flag-0", device_ids=2)
        found = placed(request("new-0", gpus="auto"), named, by_flag, on=gpus(4))
        assert found == {"new-0": (0,)}
        assert placed(request("new-0", gpus="auto"), request("old-0"), on=gpus(2)) == {
            "new-0": (1,)
        }


class TestKeeps:
    def test_running_engine_keeps_its_gpu_when_a_larger_one_is_added(self) -> None:
        requests = [request("old-0", gpus="auto", **share(0.5)), request("new-0", gpus="auto")]
        assert placed(*requests, on=gpus(2)) == {"new-0": (0,), "old-0": (1,)}
        found = place(requests, gpus(2), {"old-0": at(0)})
        assert {engine: p.devices for engine, p in found.items()} == {"new-0": (1,), "old-0": (0,)}

    def test_running_engine_moves_if_otherwise_not_all_fit(self) -> None:
        requests = [
            request("a-0", gpus="auto", **share(0.5)),
            request("b-0", gpus="auto", **share(0.5)),
            request("c-0", gpus="auto"),
        ]
        found = place(requests, gpus(2), {"a-0": at(0), "b-0": at(1)})
        assert found == place(requests, gpus(2))

    @pytest.mark.parametrize("kept", [at(7), at(0, 1), at()])
    def test_earlier_placement_that_no_longer_matches_is_ignored(self, kept: Placement) -> None:
        requests = [request("a-0", gpus="auto")]
        assert place(requests, gpus(2), {"a-0": kept, "gone-0": at(0)}) == place(requests, gpus(2))

    def test_list_overrides_an_earlier_placement(self) -> None:
        found = place([request("a-0", gpus=[1])], gpus(2), {"a-0": at(0)})
        assert found["a-0"].devices == (1,)


class TestRefuses:
    def test_more_gpus_than_there_are(self) -> None:
        many = request("m-0", gpus=4)
        assert refused(many, on=gpus(2)) == ["m-0: asks for 4 GPUs, there are 2"]
        assert refused(many, on=gpus(1)) == ["m-0: asks for 4 GPUs, there is 1"]
        assert refused(many, on=()) == ["m-0: asks for 4 GPUs, there are none"]
        auto = request("m-0", gpus="auto")
        assert refused(auto, on=()) == ["m-0: asks for 1 GPU, there are none"]
        assert refused(request("m-0", gpus=[0, 1]), on=()) == [
            "m-0: asks for 2 GPUs, there are none"
        ]
        assert refused(auto, on=gpus(1, mig=[0])) == [
            "m-0: asks for 1 GPU, there are none, not counting those that are split into MIG "
            "instances"
        ]

    def test_a_gpu_that_does_not_exist(self) -> None:
        asked = request("m-0", gpus=[0, 7], tensor_parallel_size=2)
        assert refused(asked, on=gpus(3)) == ["m-0: asks for GPU 7, there is only 0, 1 and 2"]

    def test_a_gpu_that_is_named_twice(self) -> None:
        asked = request("m-0", gpus=[1, 1], tensor_parallel_size=2)
        assert refused(asked, on=gpus(3)) == ["m-0: gpus names GPU 1 more than once"]

    @pytest.mark.parametrize(
        ("asked", "line"),
        [
            (
                request("m-0", gpus=2),
                "m-0: gpus gives it 2 GPUs, it uses 1 (no parallel size in args): "
                "set gpus: auto, or change its parallel sizes in args",
            ),
            (
                request("m-0", gpus=[0], tensor_parallel_size=2, pipeline_parallel_size=2),
                "m-0: gpus gives it 1 GPU, it uses 4 (tensor-parallel-size 2, "
                "pipeline-parallel-size 2): set gpus: auto, or change its parallel sizes in args",
            ),
        ],
    )
    def test_another_number_than_the_parallel_sizes_use(
        self, asked: PlacementRequest, line: str
    ) -> None:
        assert refused(asked, on=gpus(4)) == [line]

    def test_two_settings_that_choose_gpus(self) -> None:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            line = f"m-0: gpus sets {name}, and so does env: remove one of them"
            assert refused(request("m-0", gpus=[0], env={name: "0"}), on=gpus(1)) == [line]
        assert refused(request("m-0", gpus="auto", device_ids="0"), on=gpus(1)) == [
            "m-0: gpus and device-ids in args both choose GPUs: remove one of them"
        ]

    def test_engines_that_exceed_a_gpu_together(self) -> None:
        two = [request("b-0", gpus=[0]), request("a-0", gpus=[0], **share(0.5))]
        assert refused(*two, on=gpus(1)) == [
            "GPU 0: gpu-memory-utilization of a-0 (0.5) and b-0 (0.92) is 1.42 together, above 1"
        ]

    def test_shares_are_added_as_they_are_written(self) -> None:
        parts = [
            request(f"{n}-0", gpus=[0], **share(part)) for n, part in enumerate([0.7, 0.1, 0.2])
        ]
        assert len(placed(*parts, on=gpus(1))) == 3

    def test_no_room_next_to_other_engines(self) -> None:
        models = [request(f"{name}-0", gpus="auto") for name in "abc"]
        assert refused(*models, on=gpus(2)) == [
            "c-0: no room for it: none of 2 GPUs has gpu-memory-utilization 0.92 left next to "
            "a-0 and b-0"
        ]
        parallel = request("p-0", gpus="auto", tensor_parallel_size=2)
        assert refused(parallel, request("a-0", gpus=[1]), on=gpus(2)) == [
            "p-0: no room for it: fewer than 2 of 2 GPUs have gpu-memory-utilization 0.92 left "
            "next to a-0"
        ]

    def test_on_demand_model_that_never_fits_next_to_permanent_ones(self) -> None:
        stays = request("a-0", gpus=[0], **share(0.5))
        comes = request("b-0", gpus=[0], **share(0.6), on_demand=True)
        assert refused(stays, comes, on=gpus(1)) == [
            "GPU 0: gpu-memory-utilization of a-0 (0.5) and b-0 (0.6) is 1.1 together, above 1"
        ]

    def test_replicas_on_demand_are_loaded_together(self) -> None:
        pair = [request(f"m-{n}", gpus="auto", on_demand=True) for n in range(2)]
        assert placed(*pair, on=gpus(2)) == {"m-0": (0,), "m-1": (1,)}
        assert len(refused(*pair, on=gpus(1))) == 1

    def test_more_memory_than_a_gpu_has(self) -> None:
        assert refused(request("m-0", gpus=[1], memory_gib=100), on=gpus(2)) == [
            "m-0: memory_gib is 100, 100 on each of 1 GPU; GPU 1 has at most 80.0 GiB"
        ]
        both = request("m-0", gpus="auto", tensor_parallel_size=2, memory_gib=200)
        assert refused(both, on=gpus(2)) == [
            "m-0: memory_gib is 200, 100 on each of 2 GPUs; GPU 0 and 1 has at most 80.0 GiB"
        ]

    def test_a_gpu_in_mig_instances_by_number(self) -> None:
        assert refused(request("m-0", gpus=[1]), on=gpus(2, mig=[1])) == [
            "m-0: GPU 1 is split into MIG instances: instead of gpus, set CUDA_VISIBLE_DEVICES in "
            "env to the UUID of one"
        ]

    @pytest.mark.parametrize("value", ["two", 0, -1, 1.5, True, [2], "9" * 5000, "²"])
    def test_invalid_parallel_size(self, value: Any) -> None:
        [line] = refused(request("m-0", gpus="auto", tensor_parallel_size=value), on=gpus(2))
        assert line == f"m-0: tensor-parallel-size must be a whole number above 0, not {value}"

    @pytest.mark.parametrize("value", ["half", 0, 1.01, -0.5, True, "nan", "inf", "1e999999999"])
    def test_invalid_share(self, value: Any) -> None:
        [line] = refused(request("m-0", gpus="auto", **share(value)), on=gpus(2))
        assert line == (f"m-0: gpu-memory-utilization must be above 0 and at most 1, not {value}")

    def test_every_fault_at_once(self) -> None:
        faults = refused(
            request("c-0", gpus=[9]),
            request("a-0", gpus=3),
            request("b-0", gpus="auto"),
            on=gpus(1),
        )
        assert faults == [
            "a-0: asks for 3 GPUs, there is 1",
            "c-0: asks for GPU 9, there is only 0",
        ]


class TestFlags:
    @pytest.mark.parametrize(
        ("args", "number"),
        [
            ({}, 1),
            ({"tensor-parallel-size": "4"}, 4),
            ({"tensor-parallel-size": 2, "pipeline-parallel-size": 3}, 6),
            ({"prefill-context-parallel-size": 2}, 2),
            ({"tensor-parallel-size": 2, "data-parallel-size": 4}, 8),
            ({"data-parallel-size": 8, "data-parallel-size-local": 2}, 2),
            ({"data-parallel-size": 8, "data-parallel-rank": 3}, 1),
            ({"data-parallel-size": 8, "data-parallel-external-lb": True}, 1),
            ({"tensor-parallel-size": 8, "nnodes": 2}, 4),
            ({"tensor-parallel-size": None, "max-model-len": 7}, 1),
        ],
    )
    def test_ranks_on_this_machine(self, args: dict[str, Any], number: int) -> None:
        assert count_gpus(args)[0] == number

    def test_both_names_of_the_share(self) -> None:
        assert memory_share({"gpu-memory-utilization": "0.1"}) == Fraction(1, 10)
        assert memory_share({"device-memory-utilization": 0.3}) == Fraction(3, 10)
        assert memory_share({"gpu-memory-utilization": None}) == DEFAULT_SHARE

    def test_both_spellings_of_a_flag(self) -> None:
        dashes = ProcessSpec(kind="process", model="m", args={"--tensor-parallel-size": 2})
        below = ProcessSpec(kind="process", model="m", args={"tensor_parallel_size": 2})
        assert count_gpus(dashes.args) == count_gpus(below.args) == (2, "tensor-parallel-size 2")

    def test_the_default_share_is_that_of_the_vllm_that_is_installed(self) -> None:
        # Read, not imported: that would take half a minute.
        found = importlib.util.find_spec("vllm")
        assert found is not None
        assert found.origin is not None
        source = (Path(found.origin).parent / "config" / "cache.py").read_text()
        default = re.search(r"gpu_memory_utilization: float = Field\(default=([0-9.]+)", source)
        assert default is not None
        assert Fraction(default[1]) == DEFAULT_SHARE


class TestVisible:
    @pytest.mark.parametrize(
        ("value", "left"),
        [
            (None, [0, 1, 2, 3]),
            ("", []),
            ("-1", []),
            ("NoDevFiles", []),
            ("2", [2]),
            ("3, 1", [3, 1]),
            ("1,7,2", [1]),
            ("1,1,2", [1]),
            ("GPU-02aa", [2]),
            ("GPU-02,0", [2, 0]),
            ("GPU-", []),
            ("MIG-02aa", []),
        ],
    )
    def test_devices_are_selected_as_by_cuda(self, value: str | None, left: list[int]) -> None:
        assert [device.index for device in visible_devices(gpus(4), value)] == left


SHARES = st.sampled_from([0.1, 0.2, 0.3, 0.45, 0.5, 0.55, 0.7, 0.92, 1.0, None])
SMALL_SHARES = st.sampled_from([0.1, 0.2, 0.3, 0.45])
SIZES = st.sampled_from([1, 1, 1, 2, 3, 4])
MEMORY = st.sampled_from([None, 10.0, 90.0, 200.0])


@st.composite
def requests(draw: st.DrawFn, *, sensible: bool = False) -> list[PlacementRequest]:
    """Up to four models with up to three engines each; not sensible ones may want anything."""
    found: list[PlacementRequest] = []
    for model in range(draw(st.integers(1, 4))):
        on_demand = draw(st.booleans())
        for number in range(draw(st.integers(1, 2 if sensible else 3))):
            tensor, pipeline = draw(SIZES), 1 if sensible else draw(st.sampled_from([1, 1, 2]))
            need, first = tensor * pipeline, draw(st.integers(0, 5))
            kinds = ["auto", "number", "list", "alone"]
            kind = draw(st.sampled_from(kinds if sensible else [*kinds, "wrong"]))
            asked = {
                "auto": "auto",
                "number": need,
                "list": [(first + n) % 6 for n in range(need)],
                "wrong": draw(st.lists(st.integers(0, 7), max_size=4)),
                "alone": None,
            }[kind]
            fields: dict[str, Any] = {} if sensible else {"memory_gib": draw(MEMORY)}
            if asked is None and draw(st.booleans()):
                fields["env"] = {"CUDA_VISIBLE_DEVICES": draw(st.sampled_from(["0", "1,2", "x"]))}
            args = {
                "tensor_parallel_size": tensor,
                "pipeline_parallel_size": pipeline,
                "gpu_memory_utilization": draw(SMALL_SHARES if sensible else SHARES),
            }
            found.append(
                request(f"m{model}-{number}", on_demand=on_demand, gpus=asked, **fields, **args)
            )
    return found


@st.composite
def boxes(draw: st.DrawFn) -> list[Device]:
    found: list[Device] = []
    for index in range(draw(st.integers(0, 6))):
        name, total = draw(st.sampled_from([("L4", 24.0), ("H100", 80.0), ("GB10", None)]))
        mig = draw(st.integers(0, 9)) == 9
        found.append(Device(index, f"GPU-{index}", name, total, total, mig))
    return found


FULL = st.just(gpus(6))


def outcome(
    asked: Sequence[PlacementRequest], on: Sequence[Device]
) -> dict[str, Placement] | list[str]:
    try:
        return place(asked, on)
    except PlacementError as error:
        return error.faults


@pytest.mark.slow
@settings(max_examples=300)
@given(requests() | requests(sensible=True), boxes() | FULL)
def test_placements_fit(asked: list[PlacementRequest], on: list[Device]) -> None:
    found = outcome(asked, on)
    event("refused" if isinstance(found, list) else "placed")
    if isinstance(found, list):
        return
    assert set(found) == {w.engine for w in asked if w.spec.gpus is not None}
    devices = {device.index: device for device in on}
    stays: dict[int, Fraction] = {}
    comes: dict[tuple[int, str], Fraction] = {}
    for w in asked:
        if w.spec.gpus is None:
            continue
        placement = found[w.engine]
        # Exactly what it uses, no GPU twice, none that is not there, and in its environment.
        assert len(placement.devices) == len(set(placement.devices)) == count_gpus(w.spec.args)[0]
        assert not any(devices[gpu].mig for gpu in placement.devices)
        assert placement.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, placement.devices))
        if isinstance(w.spec.gpus, list):
            assert list(placement.devices) == w.spec.gpus
        for gpu in placement.devices:
            total = devices[gpu].total_gib
            if w.spec.memory_gib is not None and total is not None:
                assert w.spec.memory_gib / len(placement.devices) <= total
            part = memory_share(w.spec.args)
            if w.on_demand:
                comes[gpu, w.model] = comes.get((gpu, w.model), Fraction()) + part
            else:
                stays[gpu] = stays.get(gpu, Fraction()) + part
    # No GPU holds more than one at a time: who stays, and any one model that comes.
    assert all(total <= 1 for total in stays.values())
    assert all(stays.get(gpu, 0) + total <= 1 for (gpu, _), total in comes.items())


@pytest.mark.slow
@given(requests() | requests(sensible=True), boxes() | FULL, st.randoms(use_true_random=False))
def test_order_of_requests_does_not_matter(
    asked: list[PlacementRequest], on: list[Device], order: random.Random
) -> None:
    shuffled = asked[:]
    order.shuffle(shuffled)
    assert outcome(shuffled, on) == outcome(asked, on)


@pytest.mark.slow
@given(requests(), boxes())
def test_faults_are_single_lines(asked: list[PlacementRequest], on: list[Device]) -> None:
    found = outcome(asked, on)
    names = {w.engine for w in asked} | {f"GPU {device.index}" for device in on}
    for line in found if isinstance(found, list) else ():
        assert line == line.strip()
        assert len(line.splitlines()) == 1
        assert line.partition(":")[0] in names


@pytest.mark.slow
@given(SIZES, SHARES, MEMORY, boxes())
def test_single_engine_is_refused_only_for_its_own_request(
    size: int, part: float | None, memory: float | None, on: list[Device]
) -> None:
    w = request("m-0", gpus="auto", tensor_parallel_size=size, memory_gib=memory, **share(part))
    each = (memory or 0.0) / size
    able = [d for d in on if not d.mig and (d.total_gib is None or each <= d.total_gib)]
    assert isinstance(outcome([w], on), dict) == (len(able) >= size)


@pytest.mark.slow
@given(requests(sensible=True))
def test_placement_is_stable(asked: list[PlacementRequest]) -> None:
    found = outcome(asked, gpus(6))
    if isinstance(found, dict):
        assert place(asked, gpus(6), found) == found


class TestAdditional:
    def test_other_engines_keep_their_gpus(self) -> None:
        others = [
            request("a-0", gpus="auto", **share(0.5)),
            request("b-0", gpus="auto", **share(0.5)),
        ]
        keep = {"a-0": at(0), "b-0": at(1)}
        small = request("a-1", gpus="auto", **share(0.5))
        found = place_additional(small, others, gpus(2), keep)
        assert found is not None
        assert found.devices == (1,)
        large = request("a-1", gpus="auto", **share(0.9))
        with pytest.raises(PlacementError, match="a-1: no room for it: none of 2 GPUs has"):
            place_additional(large, others, gpus(2), keep)

    def test_no_room_unless_another_engine_moves(self) -> None:
        other = request("a-0", gpus="auto", **share(0.5))
        listed = request("a-1", gpus=[0], **share(0.9))
        with pytest.raises(PlacementError, match="a-1: there is room only if a-0 moves"):
            place_additional(listed, [other], gpus(2), {"a-0": at(0)})

    def test_on_demand_engine_leaves_room_for_other_on_demand_models(self) -> None:
        others = [request("lazy-0", on_demand=True, gpus=[0], **share(0.6))]
        one = request("a-1", on_demand=True, gpus=[0], **share(0.5))
        assert place([*others, one], gpus(1))  # they take turns
        with pytest.raises(PlacementError):
            place_additional(one, others, gpus(1), {})

    def test_engine_without_gpus_needs_room(self) -> None:
        other = request("a-0", **share(0.5))
        assert place_additional(request("a-1", **share(0.5)), [other], gpus(1), {}) is None
        with pytest.raises(PlacementError, match="together, above 1"):
            place_additional(request("a-1", **share(0.6)), [other], gpus(1), {})
        with pytest.raises(PlacementError, match="which GPUs it uses is not known, set gpus"):
            place_additional(request("a-1", **share(0.5)), [], gpus(1, mig=[0]), {})

    def test_invalid_flags_are_an_error(self) -> None:
        with pytest.raises(PlacementError, match="a-1: gpu-memory-utilization must be above 0"):
            place_additional(request("a-1", **share(2)), [], gpus(1), {})
