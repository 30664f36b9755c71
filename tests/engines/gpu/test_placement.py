"""Who gets which GPU, and in which words what does not fit is refused."""

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
    gpus_needed,
    memory_share,
    place,
    place_beside,
    visible,
)
from engines.spec import ProcessSpec


def gpus(number: int, *, total: float | None = 80.0, mig: Sequence[int] = ()) -> list[Device]:
    return [
        Device(index, f"GPU-{index:02d}aa", "H100", total, total, index in mig)
        for index in range(number)
    ]


def wish(engine: str, *, on_demand: bool = False, **fields: Any) -> PlacementRequest:
    """What an engine asks for; args are given with underscores, beside the fields of the spec."""
    known = set(ProcessSpec.model_fields)
    args = {name: fields.pop(name) for name in list(fields) if name not in known}
    spec = ProcessSpec(kind="process", model="m", **fields, args=args)
    return PlacementRequest(engine, engine.rpartition("-")[0], spec, on_demand)


def share(of: Any) -> dict[str, Any]:
    return {"gpu_memory_utilization": of}


def placed(*wishes: PlacementRequest, on: Sequence[Device]) -> dict[str, tuple[int, ...]]:
    return {engine: placement.devices for engine, placement in place(wishes, on).items()}


def at(*gpus: int) -> Placement:
    return Placement(gpus, {})


def refused(*wishes: PlacementRequest, on: Sequence[Device]) -> list[str]:
    with pytest.raises(PlacementError) as caught:
        place(wishes, on)
    assert str(caught.value) == "\n".join(caught.value.faults)
    return caught.value.faults


class TestPlaces:
    def test_a_list_is_taken_as_it_stands(self) -> None:
        found = place([wish("m-0", gpus=[3, 1], tensor_parallel_size=2)], gpus(4))
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"}
        assert found == {"m-0": Placement((3, 1), env)}

    def test_a_wish_without_gpus_is_left_alone(self) -> None:
        assert placed(wish("m-0"), on=gpus(1)) == {}
        assert placed(wish("m-0"), on=()) == {}

    def test_auto_takes_what_the_parallel_sizes_need(self) -> None:
        asked = wish("m-0", gpus="auto", tensor_parallel_size=2, pipeline_parallel_size=2)
        assert placed(asked, on=gpus(8)) == {"m-0": (0, 1, 2, 3)}

    def test_small_engines_share_a_gpu_and_a_parallel_one_finds_whole_ones(self) -> None:
        found = placed(
            wish("a-0", gpus="auto", **share(0.4)),
            wish("b-0", gpus="auto", **share(0.5)),
            wish("c-0", gpus="auto", tensor_parallel_size=2),
            on=gpus(3),
        )
        assert found == {"a-0": (2,), "b-0": (2,), "c-0": (0, 1)}

    def test_replicas_keep_apart_where_they_can(self) -> None:
        replicas = [wish(f"m-{n}", gpus="auto", **share(0.4)) for n in range(3)]
        assert placed(*replicas, on=gpus(2)) == {"m-0": (0,), "m-1": (1,), "m-2": (0,)}

    def test_a_number_is_a_number_of_gpus(self) -> None:
        found = placed(
            wish("a-0", gpus=[0]), wish("b-0", gpus=2, tensor_parallel_size=2), on=gpus(3)
        )
        assert found == {"a-0": (0,), "b-0": (1, 2)}

    def test_ranks_go_on_gpus_of_one_kind(self) -> None:
        small = [Device(0, "GPU-s", "L4", 24.0, 24.0), *gpus(3)[1:]]
        assert placed(wish("m-0", gpus="auto", tensor_parallel_size=2), on=small) == {"m-0": (1, 2)}
        assert placed(wish("m-0", gpus="auto", tensor_parallel_size=3), on=small) == {
            "m-0": (0, 1, 2)
        }

    def test_a_gpu_that_is_too_small_is_passed_over(self) -> None:
        mixed = [Device(0, "GPU-s", "L4", 24.0, 24.0), *gpus(2)[1:]]
        assert placed(wish("m-0", gpus="auto", memory_gib=30), on=mixed) == {"m-0": (1,)}

    def test_a_gpu_that_does_not_tell_its_memory_is_given_the_benefit(self) -> None:
        assert placed(wish("m-0", gpus="auto", memory_gib=300), on=gpus(1, total=None)) == {
            "m-0": (0,)
        }

    def test_a_gpu_in_mig_instances_is_passed_over(self) -> None:
        assert placed(wish("m-0", gpus="auto"), on=gpus(2, mig=[0])) == {"m-0": (1,)}

    def test_models_on_demand_make_room_for_each_other_and_have_their_own_gpu_while_there_is_one(
        self,
    ) -> None:
        models = [wish(f"{name}-0", gpus="auto", on_demand=True) for name in "abc"]
        assert placed(*models, on=gpus(2)) == {"a-0": (0,), "b-0": (1,), "c-0": (0,)}

    def test_who_is_there_without_gpus_is_seen_where_it_runs(self) -> None:
        named = wish("old-0", env={"CUDA_VISIBLE_DEVICES": "1"})
        by_flag = wish("flag-0", device_ids=2)
        found = placed(wish("new-0", gpus="auto"), named, by_flag, on=gpus(4))
        assert found == {"new-0": (0,)}
        assert placed(wish("new-0", gpus="auto"), wish("old-0"), on=gpus(2)) == {"new-0": (1,)}


class TestKeeps:
    def test_an_engine_that_runs_stays_when_a_larger_one_comes(self) -> None:
        wishes = [wish("old-0", gpus="auto", **share(0.5)), wish("new-0", gpus="auto")]
        assert placed(*wishes, on=gpus(2)) == {"new-0": (0,), "old-0": (1,)}
        found = place(wishes, gpus(2), {"old-0": at(0)})
        assert {engine: p.devices for engine, p in found.items()} == {"new-0": (1,), "old-0": (0,)}

    def test_it_moves_when_only_then_everything_fits(self) -> None:
        wishes = [
            wish("a-0", gpus="auto", **share(0.5)),
            wish("b-0", gpus="auto", **share(0.5)),
            wish("c-0", gpus="auto"),
        ]
        found = place(wishes, gpus(2), {"a-0": at(0), "b-0": at(1)})
        assert found == place(wishes, gpus(2))

    @pytest.mark.parametrize("kept", [at(7), at(0, 1), at()])
    def test_what_it_had_is_no_more_what_it_asks_for(self, kept: Placement) -> None:
        wishes = [wish("a-0", gpus="auto")]
        assert place(wishes, gpus(2), {"a-0": kept, "gone-0": at(0)}) == place(wishes, gpus(2))

    def test_a_list_is_followed_all_the_same(self) -> None:
        found = place([wish("a-0", gpus=[1])], gpus(2), {"a-0": at(0)})
        assert found["a-0"].devices == (1,)


class TestRefuses:
    def test_more_gpus_than_there_are(self) -> None:
        many = wish("m-0", gpus=4)
        assert refused(many, on=gpus(2)) == ["m-0: asks for 4 GPUs, there are 2"]
        assert refused(many, on=gpus(1)) == ["m-0: asks for 4 GPUs, there is 1"]
        assert refused(many, on=()) == ["m-0: asks for 4 GPUs, there are none"]
        auto = wish("m-0", gpus="auto")
        assert refused(auto, on=()) == ["m-0: asks for 1 GPU, there are none"]
        assert refused(wish("m-0", gpus=[0, 1]), on=()) == ["m-0: asks for 2 GPUs, there are none"]
        assert refused(auto, on=gpus(1, mig=[0])) == [
            "m-0: asks for 1 GPU, there are none, not counting those that are split into MIG "
            "instances"
        ]

    def test_a_gpu_that_does_not_exist(self) -> None:
        asked = wish("m-0", gpus=[0, 7], tensor_parallel_size=2)
        assert refused(asked, on=gpus(3)) == ["m-0: asks for GPU 7, there is only 0, 1 and 2"]

    def test_a_gpu_that_is_named_twice(self) -> None:
        asked = wish("m-0", gpus=[1, 1], tensor_parallel_size=2)
        assert refused(asked, on=gpus(3)) == ["m-0: gpus names GPU 1 more than once"]

    @pytest.mark.parametrize(
        ("asked", "line"),
        [
            (
                wish("m-0", gpus=2),
                "m-0: gpus gives it 2 GPUs, it uses 1 (no parallel size in args): "
                "set gpus: auto, or change its parallel sizes in args",
            ),
            (
                wish("m-0", gpus=[0], tensor_parallel_size=2, pipeline_parallel_size=2),
                "m-0: gpus gives it 1 GPU, it uses 4 (tensor-parallel-size 2, "
                "pipeline-parallel-size 2): set gpus: auto, or change its parallel sizes in args",
            ),
        ],
    )
    def test_another_number_than_the_parallel_sizes_use(
        self, asked: PlacementRequest, line: str
    ) -> None:
        assert refused(asked, on=gpus(4)) == [line]

    def test_two_who_choose(self) -> None:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            line = f"m-0: gpus sets {name}, and so does env: remove one of them"
            assert refused(wish("m-0", gpus=[0], env={name: "0"}), on=gpus(1)) == [line]
        assert refused(wish("m-0", gpus="auto", device_ids="0"), on=gpus(1)) == [
            "m-0: gpus and device-ids in args both choose GPUs: remove one of them"
        ]

    def test_engines_that_take_more_than_a_gpu_together(self) -> None:
        two = [wish("b-0", gpus=[0]), wish("a-0", gpus=[0], **share(0.5))]
        assert refused(*two, on=gpus(1)) == [
            "GPU 0: gpu-memory-utilization of a-0 (0.5) and b-0 (0.92) is 1.42 together, above 1"
        ]

    def test_shares_are_added_as_they_are_written(self) -> None:
        parts = [wish(f"{n}-0", gpus=[0], **share(part)) for n, part in enumerate([0.7, 0.1, 0.2])]
        assert len(placed(*parts, on=gpus(1))) == 3

    def test_an_engine_for_which_the_others_leave_no_room(self) -> None:
        models = [wish(f"{name}-0", gpus="auto") for name in "abc"]
        assert refused(*models, on=gpus(2)) == [
            "c-0: no room for it: none of 2 GPUs has gpu-memory-utilization 0.92 left beside "
            "a-0 and b-0"
        ]
        parallel = wish("p-0", gpus="auto", tensor_parallel_size=2)
        assert refused(parallel, wish("a-0", gpus=[1]), on=gpus(2)) == [
            "p-0: no room for it: fewer than 2 of 2 GPUs have gpu-memory-utilization 0.92 left "
            "beside a-0"
        ]

    def test_a_model_on_demand_that_could_never_be_loaded_beside_those_that_stay(self) -> None:
        stays = wish("a-0", gpus=[0], **share(0.5))
        comes = wish("b-0", gpus=[0], **share(0.6), on_demand=True)
        assert refused(stays, comes, on=gpus(1)) == [
            "GPU 0: gpu-memory-utilization of a-0 (0.5) and b-0 (0.6) is 1.1 together, above 1"
        ]

    def test_replicas_on_demand_are_loaded_together(self) -> None:
        pair = [wish(f"m-{n}", gpus="auto", on_demand=True) for n in range(2)]
        assert placed(*pair, on=gpus(2)) == {"m-0": (0,), "m-1": (1,)}
        assert len(refused(*pair, on=gpus(1))) == 1

    def test_more_memory_than_a_gpu_has(self) -> None:
        assert refused(wish("m-0", gpus=[1], memory_gib=100), on=gpus(2)) == [
            "m-0: memory_gib is 100, 100 on each of 1 GPU; GPU 1 has at most 80.0 GiB"
        ]
        both = wish("m-0", gpus="auto", tensor_parallel_size=2, memory_gib=200)
        assert refused(both, on=gpus(2)) == [
            "m-0: memory_gib is 200, 100 on each of 2 GPUs; GPU 0 and 1 has at most 80.0 GiB"
        ]

    def test_a_gpu_in_mig_instances_by_number(self) -> None:
        assert refused(wish("m-0", gpus=[1]), on=gpus(2, mig=[1])) == [
            "m-0: GPU 1 is split into MIG instances: instead of gpus, set CUDA_VISIBLE_DEVICES in "
            "env to the UUID of one"
        ]

    @pytest.mark.parametrize("value", ["two", 0, -1, 1.5, True, [2], "9" * 5000, "²"])
    def test_a_parallel_size_that_is_none(self, value: Any) -> None:
        [line] = refused(wish("m-0", gpus="auto", tensor_parallel_size=value), on=gpus(2))
        assert line == f"m-0: tensor-parallel-size must be a whole number above 0, not {value}"

    @pytest.mark.parametrize("value", ["half", 0, 1.01, -0.5, True, "nan", "inf", "1e999999999"])
    def test_a_share_that_is_none(self, value: Any) -> None:
        [line] = refused(wish("m-0", gpus="auto", **share(value)), on=gpus(2))
        assert line == (f"m-0: gpu-memory-utilization must be above 0 and at most 1, not {value}")

    def test_every_fault_at_once(self) -> None:
        faults = refused(
            wish("c-0", gpus=[9]), wish("a-0", gpus=3), wish("b-0", gpus="auto"), on=gpus(1)
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
        assert gpus_needed(args)[0] == number

    def test_both_names_of_the_share(self) -> None:
        assert memory_share({"gpu-memory-utilization": "0.1"}) == Fraction(1, 10)
        assert memory_share({"device-memory-utilization": 0.3}) == Fraction(3, 10)
        assert memory_share({"gpu-memory-utilization": None}) == DEFAULT_SHARE

    def test_both_spellings_of_a_flag(self) -> None:
        dashes = ProcessSpec(kind="process", model="m", args={"--tensor-parallel-size": 2})
        below = ProcessSpec(kind="process", model="m", args={"tensor_parallel_size": 2})
        assert gpus_needed(dashes.args) == gpus_needed(below.args) == (2, "tensor-parallel-size 2")

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
    def test_what_cuda_would_see(self, value: str | None, left: list[int]) -> None:
        assert [device.index for device in visible(gpus(4), value)] == left


SHARES = st.sampled_from([0.1, 0.2, 0.3, 0.45, 0.5, 0.55, 0.7, 0.92, 1.0, None])
SMALL_SHARES = st.sampled_from([0.1, 0.2, 0.3, 0.45])
SIZES = st.sampled_from([1, 1, 1, 2, 3, 4])
MEMORY = st.sampled_from([None, 10.0, 90.0, 200.0])


@st.composite
def wishes(draw: st.DrawFn, *, sensible: bool = False) -> list[PlacementRequest]:
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
                wish(f"m{model}-{number}", on_demand=on_demand, gpus=asked, **fields, **args)
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
@given(wishes() | wishes(sensible=True), boxes() | FULL)
def test_what_is_placed_fits(asked: list[PlacementRequest], on: list[Device]) -> None:
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
        assert len(placement.devices) == len(set(placement.devices)) == gpus_needed(w.spec.args)[0]
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
@given(wishes() | wishes(sensible=True), boxes() | FULL, st.randoms(use_true_random=False))
def test_the_order_of_the_wishes_does_not_matter(
    asked: list[PlacementRequest], on: list[Device], order: random.Random
) -> None:
    shuffled = asked[:]
    order.shuffle(shuffled)
    assert outcome(shuffled, on) == outcome(asked, on)


@pytest.mark.slow
@given(wishes(), boxes())
def test_what_is_refused_is_told_in_lines(asked: list[PlacementRequest], on: list[Device]) -> None:
    found = outcome(asked, on)
    names = {w.engine for w in asked} | {f"GPU {device.index}" for device in on}
    for line in found if isinstance(found, list) else ():
        assert line == line.strip()
        assert len(line.splitlines()) == 1
        assert line.partition(":")[0] in names


@pytest.mark.slow
@given(SIZES, SHARES, MEMORY, boxes())
def test_one_engine_alone_is_refused_only_for_what_it_asks_itself(
    size: int, part: float | None, memory: float | None, on: list[Device]
) -> None:
    w = wish("m-0", gpus="auto", tensor_parallel_size=size, memory_gib=memory, **share(part))
    each = (memory or 0.0) / size
    able = [d for d in on if not d.mig and (d.total_gib is None or each <= d.total_gib)]
    assert isinstance(outcome([w], on), dict) == (len(able) >= size)


@pytest.mark.slow
@given(wishes(sensible=True))
def test_what_was_placed_stays_as_it_was(asked: list[PlacementRequest]) -> None:
    found = outcome(asked, gpus(6))
    if isinstance(found, dict):
        assert place(asked, gpus(6), found) == found


class TestBeside:
    def test_others_stay_exactly_where_they_are(self) -> None:
        others = [wish("a-0", gpus="auto", **share(0.5)), wish("b-0", gpus="auto", **share(0.5))]
        keep = {"a-0": at(0), "b-0": at(1)}
        small = wish("a-1", gpus="auto", **share(0.5))
        found = place_beside(small, others, gpus(2), keep)
        assert found is not None
        assert found.devices == (1,)
        large = wish("a-1", gpus="auto", **share(0.9))
        with pytest.raises(PlacementError, match="a-1: no room for it: none of 2 GPUs has"):
            place_beside(large, others, gpus(2), keep)

    def test_room_that_is_there_only_if_another_moves_is_none(self) -> None:
        other = wish("a-0", gpus="auto", **share(0.5))
        listed = wish("a-1", gpus=[0], **share(0.9))
        with pytest.raises(PlacementError, match="a-1: there is room only if a-0 moves"):
            place_beside(listed, [other], gpus(2), {"a-0": at(0)})

    def test_one_on_demand_leaves_room_for_the_other_models_on_demand(self) -> None:
        others = [wish("lazy-0", on_demand=True, gpus=[0], **share(0.6))]
        one = wish("a-1", on_demand=True, gpus=[0], **share(0.5))
        assert place([*others, one], gpus(1))  # they take turns
        with pytest.raises(PlacementError):
            place_beside(one, others, gpus(1), {})

    def test_one_that_is_left_alone_gets_no_gpus_and_needs_room(self) -> None:
        other = wish("a-0", **share(0.5))
        assert place_beside(wish("a-1", **share(0.5)), [other], gpus(1), {}) is None
        with pytest.raises(PlacementError, match="together, above 1"):
            place_beside(wish("a-1", **share(0.6)), [other], gpus(1), {})
        with pytest.raises(PlacementError, match="which GPUs it uses is not known, set gpus"):
            place_beside(wish("a-1", **share(0.5)), [], gpus(1, mig=[0]), {})

    def test_flags_that_make_no_sense_are_told(self) -> None:
        with pytest.raises(PlacementError, match="a-1: gpu-memory-utilization must be above 0"):
            place_beside(wish("a-1", **share(2)), [], gpus(1), {})
