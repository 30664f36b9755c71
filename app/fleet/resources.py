"""What is free on this machine for one more engine, as of now. Blocks, except where it says so."""

import asyncio
from collections.abc import Iterator, Sequence

from app.fleet.deployment import IDLE_STATES, DeployedEngine, memory_gib
from app.fleet.engine_plan import EngineConfig
from app.fleet.fleet import Fleet
from app.fleet.takeover import EngineSnapshot, MachineResources, OverlapCheck, check_overlap
from engines.base import EngineState
from engines.gpu import AcceleratorError, Device, available_host_gib
from engines.process import vllm_runs_on_cpu
from engines.spec import ProcessSpec


async def check_overlap_now(fleet: Fleet, old: DeployedEngine, new: EngineConfig) -> OverlapCheck:
    """Return whether an engine can start alongside another. Does not block."""
    budget_gib = fleet.in_force.settings.server.memory_budget_gib
    machine = await asyncio.to_thread(free_resources, fleet, budget_gib)
    return check_overlap(old.config, new, _take_snapshot(old), machine)


def free_resources(fleet: Fleet, budget_gib: float | None) -> MachineResources:
    """Return the resources that are free; `budget_gib` is server.memory_budget_gib."""
    try:
        devices: Sequence[Device] | None = fleet.builder.devices()
    except AcceleratorError:
        devices = None
    if budget_gib is not None:
        budget_gib -= _budgeted_gib(fleet)
    free_gib = available_host_gib()
    if free_gib is not None:
        # How much of it starting engines have taken already is unknown.
        starting = (
            memory_gib(one.engine)
            for one in _configured_engines(fleet)
            if one.engine.state is EngineState.STARTING
        )
        free_gib = max(free_gib - sum(starting), 0.0)
    return MachineResources(devices, _all_on_cpu(fleet), free_gib, budget_gib)


def take_snapshots(fleet: Fleet) -> dict[str, EngineSnapshot]:
    """Return the state of every engine of the configuration, by name."""
    return {one.config.name: _take_snapshot(one) for one in _configured_engines(fleet)}


def _take_snapshot(deployed: DeployedEngine) -> EngineSnapshot:
    """Return the state of an engine."""
    engine = deployed.engine
    ready = engine.state is EngineState.READY
    return EngineSnapshot(ready, engine.memory_gib, engine.last_start_s())


def _configured_engines(fleet: Fleet) -> Iterator[DeployedEngine]:
    """Yield the engines of the configuration, without discovered servers."""
    return (engine for one in fleet.deployments.values() for engine in one.engines)


def _all_on_cpu(fleet: Fleet) -> bool:
    """Return whether the vLLM of every engine is built for CPUs."""
    specs = (one.config.spec for one in _configured_engines(fleet))
    pythons = {spec.python for spec in specs if isinstance(spec, ProcessSpec)}
    return all(map(vllm_runs_on_cpu, pythons or {None}))


def _budgeted_gib(fleet: Fleet) -> float:
    """Return the part of server.memory_budget_gib that is not available to a new engine.

    That is what is loaded, and at least the eager models plus the largest on-demand model:
    otherwise that one could not be loaded until the old engine has stopped.
    """
    eager = loaded = largest = 0.0
    for one in fleet.deployments.values():
        running = (e.engine for e in one.engines if e.engine.state not in IDLE_STATES)
        taken = sum(map(memory_gib, running))
        if one.settings.load == "eager":
            eager += taken
        else:
            loaded += taken
            largest = max(largest, sum(memory_gib(each.engine) for each in one.engines))
    return eager + max(loaded, largest) + fleet.detached.uncounted_gib
