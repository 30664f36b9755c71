"""Decides whether an engine can start alongside the one that it replaces. Pure.

Alongside, which leaves no gap:

               new engine             old engine               serves
    start      STARTING, listed       READY, listed            the old one
    ready      READY, listed          READY, listed            both
    take over  READY, listed          READY, not listed        the new one; the old one finishes its
                                                               requests
    drain      READY, listed          DRAINING                 the new one
    stop       READY, listed          STOPPED                  the new one

"Listed" means: in the catalogue, from which each request takes the engines of its model at the
moment when it chooses one, without a task switch in between. The catalogue is replaced in one step,
and the new engine is READY before that. So a READY engine is among the candidates of every choice.
A policy prefers READY engines, so the new one gets nothing while it is STARTING. The old one
refuses requests only after the last one has left it.

If the new engine fails to start, it is unlisted and stopped, and nothing else has changed. If the
old engine dies meanwhile, its supervisor restarts it, and the takeover continues. If the gateway
stops, both engines do; with `keep_engines` both keep running, and the next gateway adopts the one
that runs what its configuration says (`app.fleet.engine_plan.initial_engines`) and stops the other.

In place, the old engine is drained and stopped before the new one starts under its name; meanwhile
the model is down unless it has another engine. This is the way where both cannot run at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.fleet.engine_plan import EngineConfig, flatten
from engines.gpu import Device, Placement, PlacementError, PlacementRequest, place_additional
from engines.spec import ContainerSpec, LocalSpec, ProcessSpec

# Peak memory of a start, relative to a running engine: weights are read into buffers that are freed
# afterwards.
PEAK_FACTOR = 1.25
# Flags that determine how much memory an engine takes on a CPU.
MEMORY_FLAGS = (
    "dtype", "quantization", "load-format", "tensor-parallel-size", "pipeline-parallel-size",
    "data-parallel-size", "data-parallel-size-local", "kv-cache-memory-bytes", "kv-cache-dtype",
    "gpu-memory-utilization", "max-num-batched-tokens", "enable-lora", "max-loras",
    "max-lora-rank", "speculative-config", "swap-space",
)  # fmt: skip
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
# Connectors between engines listen on ports, some of them on fixed ones without a setting.
CONNECTOR_FLAGS = frozenset({"kv-transfer-config", "kv-events-config", "ec-transfer-config"})
# vLLM takes the next free port from this one on.
FIRST_PORTS = frozenset({"env.VLLM_PORT"})


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of an existing engine."""

    ready: bool
    # Memory that it takes; None: unknown.
    memory_gib: float | None = None
    # Duration of its latest load; None: it was never loaded here.
    load_s: float | None = None


@dataclass(frozen=True, slots=True)
class MachineResources:
    """Resources that engines share."""

    # GPUs that the gateway may use, () where there are none; None: the driver does not say.
    devices: Sequence[Device] | None
    # Without a GPU engines run on the CPU; otherwise on an accelerator that cannot be queried.
    on_cpu: bool
    # Host memory that is available; None: unknown.
    free_gib: float | None
    # What is left of server.memory_budget_gib; None: no budget.
    budget_gib: float | None = None


@dataclass(frozen=True, slots=True)
class OverlapCheck:
    """Verdict on two engines that are to run at once, GPUs not considered."""

    # Why they cannot; None: they can.
    obstacle: str | None
    # Memory that the new engine is going to take; None: unknown.
    need_gib: float | None = None


def check_overlap(
    old: EngineConfig, new: EngineConfig, snapshot: EngineSnapshot, machine: MachineResources
) -> OverlapCheck:
    """Return whether `new` can start while `old` runs, GPUs not considered."""
    if not isinstance(new.spec, ProcessSpec | ContainerSpec):
        return OverlapCheck(f"an engine of kind {new.spec.kind} is not started alongside another")
    if not isinstance(old.spec, LocalSpec):
        return OverlapCheck(None, new.spec.memory_gib)  # it runs elsewhere
    if (conflict := _find_conflict(old, new)) is not None:
        return OverlapCheck(conflict)
    if machine.devices is None:
        return OverlapCheck("the GPUs of this machine are unknown")
    need_gib = estimate_memory_gib(old, new, snapshot.memory_gib, on_cpu=not machine.devices)
    obstacle = _over_budget(need_gib, machine)
    if obstacle is None and not machine.devices:
        obstacle = _over_host_memory(need_gib, machine)
    return OverlapCheck(obstacle, need_gib)


def _find_conflict(old: EngineConfig, new: EngineConfig) -> str | None:
    """Return the reason if something can belong to only one of the engines."""
    assert isinstance(new.spec, LocalSpec)
    flags = {flag.partition(".")[0] for flag in new.spec.args}
    if connectors := sorted(flags & CONNECTOR_FLAGS):
        return f"{connectors[0]} may need a port that only one engine can have"
    if shared := next(_same_ports(old, new), None):
        return f"both would use the same port ({shared})"
    if str(new.spec.args.get("nnodes") or 1) != "1":
        return "it runs on several machines"
    return None


def _over_budget(need_gib: float | None, machine: MachineResources) -> str | None:
    if machine.budget_gib is None:
        return None
    if need_gib is None:
        return "its share of server.memory_budget_gib is unknown: set memory_gib"
    if need_gib > machine.budget_gib:
        return (
            f"no memory for both: it takes {need_gib:.1f} GiB, server.memory_budget_gib leaves "
            f"{max(machine.budget_gib, 0.0):.1f}"
        )
    return None


def _over_host_memory(need_gib: float | None, machine: MachineResources) -> str | None:
    if not machine.on_cpu:
        return "the free memory of its accelerator is unknown"
    if need_gib is None:
        return "the memory that it takes is unknown: set memory_gib"
    if machine.free_gib is None:
        return "the free memory of this machine is unknown"
    if need_gib * PEAK_FACTOR > machine.free_gib:
        return (
            f"no memory for both: it takes up to {need_gib * PEAK_FACTOR:.1f} GiB to start, "
            f"{machine.free_gib:.1f} are free"
        )
    return None


def place_alongside(
    new: PlacementRequest,
    others: Sequence[PlacementRequest],
    machine: MachineResources,
    keep: Mapping[str, Placement],
) -> Placement | None:
    """Return the GPUs for an engine that starts while all others run; None if it gets none.

    Raises PlacementError with one line.
    """
    if not machine.devices:
        return None
    try:
        return place_additional(new, others, machine.devices, keep)
    except PlacementError as error:
        raise PlacementError([f"no memory for both: {error.faults[0]}"]) from None


def estimate_memory_gib(
    old: EngineConfig, new: EngineConfig, measured_gib: float | None, *, on_cpu: bool
) -> float | None:
    """Return the memory that the new engine is going to take; None: unknown.

    This is the declared figure; else that of the old one, if no flag that affects it differs.
    """
    if not isinstance(new.spec, LocalSpec) or not isinstance(old.spec, LocalSpec):
        return None
    if new.spec.memory_gib is not None:
        return new.spec.memory_gib
    before, after = old.spec, new.spec
    same = before.model == after.model and all(
        before.args.get(flag) == after.args.get(flag) for flag in MEMORY_FLAGS
    )
    if measured_gib is None or not same:
        return None
    if not on_cpu or before.env.get(KV_SPACE) == after.env.get(KV_SPACE):
        return measured_gib
    try:
        grown = float(after.env[KV_SPACE]) - float(before.env[KV_SPACE])
    except (KeyError, ValueError):
        return None
    return measured_gib + max(grown, 0.0)


def _same_ports(old: EngineConfig, new: EngineConfig) -> Iterator[str]:
    """Return the settings that make both engines listen on the same port."""
    before = _ports(old)
    return (place for place, port in _ports(new).items() if before.get(place) == port)


def _ports(config: EngineConfig) -> dict[str, str]:
    assert isinstance(config.spec, LocalSpec)
    settings = flatten({"args": config.spec.args, "env": config.spec.env})
    return {
        place: str(value)
        for place, value in settings.items()
        if place not in FIRST_PORTS
        and not isinstance(value, bool)  # such as enable-tokenizer-info-endpoint
        and {"port", "endpoint"} & set(re.split(r"[^a-z]+", place.lower()))
    }
