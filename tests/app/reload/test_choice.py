"""The choice of engines that are replaced by one alongside them."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hypothesis import event, given, reject
from hypothesis import strategies as st

from app.fleet.engine_plan import initial_engines
from app.fleet.takeover import EngineSnapshot, MachineResources
from app.reload.choice import EngineLayout, choose_takeovers, placement_request
from app.reload.difference import Difference, difference
from engines.gpu import Device, Placement, PlacementError, place
from tests.gateway import WrittenSettings

CPU = MachineResources((), on_cpu=True, free_gib=100.0)
READY = EngineSnapshot(ready=True, memory_gib=1.0, load_s=57.0)
STOPPED = EngineSnapshot(ready=False, memory_gib=1.0, load_s=57.0)


def gpus(number: int) -> MachineResources:
    devices = [Device(index, f"GPU-{index}", "H100", 80.0, 80.0) for index in range(number)]
    return MachineResources(devices, on_cpu=False, free_gib=100.0)


def process(replicas: int = 1, share: float | None = None, **fields: Any) -> dict[str, Any]:
    args = {} if share is None else {"gpu-memory-utilization": share}
    args |= fields.pop("args", {})
    return {"kind": "process", "model": "m", "replicas": replicas, "args": args, **fields}


def model(name: str, *engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": list(engines), **fields}


def chosen(
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    machine: MachineResources = CPU,
    *,
    idle: Sequence[str] = (),
    obstacle: str | None = None,
) -> tuple[Difference, dict[str, Placement]]:
    """Choose for a gateway that runs `before` and reloads `after`."""
    old, new = WrittenSettings(models=before), WrittenSettings(models=after)
    running = initial_engines(old)
    configs = [(one, running[one.name]) for one in old.models]
    requests = [placement_request(one, config) for one, engines in configs for config in engines]
    placements = place(requests, machine.devices) if machine.devices else {}
    snapshots = {
        config.name: STOPPED if config.name in idle else READY
        for engines in running.values()
        for config in engines
    }
    layout = EngineLayout.of(configs, placements)
    return choose_takeovers(difference(old, new), layout, machine, snapshots, obstacle=obstacle)


def takeovers(found: Difference) -> list[tuple[str, str, bool]]:
    """Return old and new engine of each takeover, and whether they overlap."""
    return [
        (one.old, one.new, one.obstacle is None)
        for change in found.changed
        for one in change.takeovers
    ]


LONGER: dict[str, Any] = {"args": {"max-model-len": 4096}}


class TestNames:
    def test_overlapping_successor_has_a_new_name(self) -> None:
        found, _ = chosen([model("a", process(2))], [model("a", process(2, **LONGER))])
        assert takeovers(found) == [("a-0", "a-2", True), ("a-1", "a-3", True)]
        [change] = found.changed
        assert [config.name for config in change.plan.after] == ["a-2", "a-3"]
        assert [(old.name, new.name) for old, new in change.plan.replaced] == [
            ("a-0", "a-2"),
            ("a-1", "a-3"),
        ]
        assert change.overlaps

    def test_new_name_is_not_that_of_an_added_engine(self) -> None:
        """org/a and org-a make the same name."""
        before = [model("org/a", process())]
        found, _ = chosen(before, [model("org/a", process(2, **LONGER)), model("org-a", process())])
        [change] = found.changed
        names = [config.name for config in change.plan.after]
        assert names == ["org-a-3", "org-a-1"]
        assert [config.name for config in found.added[0].configs] == ["org-a-2"]
        assert not change.overlaps, "an engine is added as well"

    def test_successor_in_place_keeps_the_name(self) -> None:
        found, _ = chosen(
            [model("a", process())], [model("a", process(**LONGER))], obstacle="crowded"
        )
        assert takeovers(found) == [("a-0", "a-0", False)]
        assert list(found.lines()) == [
            "~ model a: args.max-model-len added: 4096 (restarts a-0)",
            "~ model a: a-0 ends before its successor starts, about 59 s without a: crowded; "
            "last load took 57 s",
        ]


class TestTakeovers:
    def test_engine_that_is_not_ready_has_no_takeover(self) -> None:
        found, _ = chosen(
            [model("a", process(2))], [model("a", process(2, **LONGER))], idle=["a-0"]
        )
        assert takeovers(found) == [("a-1", "a-2", True)]
        assert [config.name for config in found.changed[0].plan.after] == ["a-0", "a-2"]

    def test_other_ready_replica_serves_during_a_replacement_in_place(self) -> None:
        found, _ = chosen(
            [model("a", process(2, env={"A_PORT": "1"}))],
            [model("a", process(2, env={"A_PORT": "1"}, **LONGER))],
        )
        assert [one.others_serve for one in found.changed[0].takeovers] == [True, True]

    def test_removed_replica_does_not_serve_meanwhile(self) -> None:
        found, _ = chosen(
            [model("a", process(2, env={"A_PORT": "1"}))],
            [model("a", process(env={"A_PORT": "1"}, **LONGER))],
        )
        assert [one.others_serve for one in found.changed[0].takeovers] == [False]

    def test_remote_server_has_no_takeover(self) -> None:
        found, _ = chosen(
            [model("a", process())], [model("a", {"kind": "remote", "url": "http://h"})]
        )
        assert takeovers(found) == []
        assert list(found.lines()) == ["~ model a: kind process → remote (replaces a-0)"]

    def test_on_demand_model_is_unloaded_as_a_whole(self) -> None:
        before = [model("a", process(2), process(env={"B_PORT": "1"}), load="on_demand")]
        after = [
            model("a", process(2, **LONGER), process(env={"B_PORT": "1"}, **LONGER), load="eager")
        ]
        found, _ = chosen(before, after)
        assert takeovers(found) == [(name, name, False) for name in ("a-0", "a-1", "a-2")]
        [change] = found.changed
        assert {one.obstacle for one in change.takeovers} == {
            "both would use the same port (env.B_PORT)"
        }
        assert all(one.requests_wait and not one.others_serve for one in change.takeovers)
        fewer, _ = chosen(
            [model("a", process(2), load="on_demand")],
            [model("a", process(**LONGER), load="on_demand")],
        )
        assert [one.obstacle for one in fewer.changed[0].takeovers] == [
            "all engines of the model are unloaded for the change"
        ]


class TestGpus:
    def test_free_gpu_is_used(self) -> None:
        found, placements = chosen(
            [model("a", process(gpus="auto"))],
            [model("a", process(gpus="auto", **LONGER))],
            gpus(2),
        )
        assert takeovers(found) == [("a-0", "a-1", True)]
        assert {name: one.devices for name, one in placements.items()} == {"a-1": (1,)}

    def test_full_gpu_is_the_obstacle(self) -> None:
        found, placements = chosen(
            [model("a", process(gpus=[0]))], [model("a", process(gpus=[0], **LONGER))], gpus(2)
        )
        assert takeovers(found) == [("a-0", "a-0", False)]
        assert placements == {}
        assert found.changed[0].takeovers[0].obstacle == (
            "no memory for both: GPU 0: gpu-memory-utilization of a-0 (0.92) and a-1 (0.92) is "
            "1.84 together, above 1"
        )

    def test_shares_of_one_gpu(self) -> None:
        found, _ = chosen(
            [model("a", process(gpus=[0], share=0.3))],
            [model("a", process(gpus=[0], share=0.7))],
            gpus(1),
        )
        assert takeovers(found) == [("a-0", "a-1", True)]

    def test_engine_without_gpus_counts_on_the_first_gpu(self) -> None:
        small, large = model("a", process(share=0.4)), model("a", process(share=0.4, **LONGER))
        assert takeovers(chosen([small], [large], gpus(1))[0]) == [("a-0", "a-1", True)]
        full = model("b", process(share=0.3))
        assert takeovers(chosen([small, full], [large, full], gpus(1))[0]) == [
            ("a-0", "a-0", False)
        ]

    def test_engine_on_an_unknown_gpu_is_the_obstacle(self) -> None:
        env = {"CUDA_VISIBLE_DEVICES": "MIG-1"}
        found, _ = chosen(
            [model("a", process(env=env))], [model("a", process(env=env, **LONGER))], gpus(1)
        )
        assert found.changed[0].takeovers[0].obstacle == (
            "no memory for both: a-1: which GPUs it uses is not known, set gpus"
        )

    def test_replica_uses_the_gpu_freed_by_the_one_before_it(self) -> None:
        found, placements = chosen(
            [model("a", process(2, gpus="auto"))],
            [model("a", process(2, gpus="auto", **LONGER))],
            gpus(3),
        )
        assert takeovers(found) == [("a-0", "a-2", True), ("a-1", "a-3", True)]
        assert {name: one.devices for name, one in placements.items()} == {"a-2": (2,), "a-3": (0,)}

    def test_memory_is_left_for_on_demand_models(self) -> None:
        lazy = model("lazy", process(gpus=[0], share=0.5), load="on_demand")
        found, _ = chosen(
            [model("a", process(gpus=[0], share=0.4)), lazy],
            [model("a", process(gpus=[0], share=0.3)), lazy],
            gpus(1),
        )
        assert takeovers(found) == [("a-0", "a-0", False)]


shares = st.sampled_from([0.2, 0.3, 0.45, 0.92])
engines = st.builds(
    process, st.integers(1, 2), shares, gpus=st.sampled_from(["auto", [0], [1]]), args=st.just({})
)
models = st.lists(engines, min_size=1, max_size=3)


@given(models, models, st.integers(2, 3), st.booleans())
def test_no_gpu_is_ever_overcommitted(
    before: list[dict[str, Any]], after: list[dict[str, Any]], number: int, demanded: bool
) -> None:
    machine = gpus(number)
    load = "on_demand" if demanded else "eager"
    old = [model(f"m{n}", engine) for n, engine in enumerate(before)]
    new = [model(f"m{n}", engine, load=load) for n, engine in enumerate(after)]
    try:
        found, placements = chosen(old, new, machine)
    except PlacementError:
        reject()  # the first configuration does not fit
    event(f"{len(placements)} start beside others")
    settings = WrittenSettings(models=old)
    configs = initial_engines(settings)
    requests = [
        placement_request(one, config) for one in settings.models for config in configs[one.name]
    ]
    where = place(requests, machine.devices or ())
    held = {
        config.name: (config, where[config.name].devices)
        for each in configs.values()
        for config in each
    }
    for name in found.removed:
        for config in configs[name]:
            del held[config.name]
    for change in found.changed:
        for config in change.plan.removed:
            del held[config.name]
        for was, now in change.plan.replaced:
            if was.name != now.name:
                held[now.name] = (now, placements[now.name].devices)
                _assert_fits(held)
                del held[was.name]
            else:  # it goes wherever there is room by then, so it is not followed
                del held[was.name]


def _assert_fits(held: dict[str, Any]) -> None:
    taken: dict[int, Fraction] = {}
    for config, devices in held.values():
        for gpu in devices:
            share = Fraction(str(config.spec.args["gpu-memory-utilization"]))
            taken[gpu] = taken.get(gpu, Fraction()) + share
    assert all(share <= 1 for share in taken.values()), held
