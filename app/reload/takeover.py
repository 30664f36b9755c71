"""How an engine makes way for its successor: the new one beside the old one, or the old one first.

Beside, which leaves no gap:

               the new engine         the old engine            who serves
    start      STARTING, listed       READY, listed             the old one
    ready      READY, listed          READY, listed             both
    take over  READY, listed          READY, listed no more     the new one; the old one ends what
                                                                it has
    drain      READY, listed          DRAINING                  the new one
    end        READY, listed          STOPPED                   the new one

"Listed" is to be in the catalogue, from which each request takes the engines of its model at the
moment when it chooses one, without a task switch between the two. The catalogue is replaced in one
step, and before it is, the new engine is READY: so whenever a request chooses, a READY engine is
among those it chooses from. A policy prefers a READY one, so the new engine gets nothing while it
is STARTING. The old one refuses requests only when none has it any more.

If the new engine does not start, it is taken off the list and ended, and nothing else has happened.
If the old engine dies meanwhile, its supervisor starts it again, and the takeover goes on. If the
gateway ends, both engines do; with `keep_engines` both go on, and the next gateway takes over the
one that runs what its configuration says (`app.fleet.slots.initial_slots`) and ends the other.

In place, the old engine is drained and ended, and the new one started under its name: nobody serves
for as long as that takes unless the model has another engine. That is the way where both cannot
run at once, which is all that this module decides: pure, no I/O, no clock.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.fleet.slots import Slot
from app.reload.shown import flat
from engines.gpu.accelerator import Device
from engines.gpu.placement import Placement, PlacementError, PlacementRequest, place_beside
from engines.spec import LocalSpec, ProcessSpec

# What a start may take at its height, in parts of what it takes when it is up: weights are read
# into memory that is given back afterwards.
PEAK = 1.25
# To end the old engine, once it has nothing to do: vLLM takes a second or two.
STOP_S = 2.0
# Flags on which it depends how much memory an engine takes on a CPU.
SIZES = (
    "dtype", "quantization", "load-format", "tensor-parallel-size", "pipeline-parallel-size",
    "data-parallel-size", "data-parallel-size-local", "kv-cache-memory-bytes", "kv-cache-dtype",
    "gpu-memory-utilization", "max-num-batched-tokens", "enable-lora", "max-loras",
    "max-lora-rank", "speculative-config", "swap-space",
)  # fmt: skip
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
# Connectors between engines listen on ports, some of them on fixed ones that no setting names.
CONNECTORS = frozenset({"kv-transfer-config", "kv-events-config", "ec-transfer-config"})
# vLLM takes the next free port above this one.
SEARCHED_PORTS = frozenset({"env.VLLM_PORT"})


@dataclass(frozen=True, slots=True)
class Present:
    """What is known of an engine that is there."""

    # It is READY.
    serves: bool
    # What it takes, as far as that is known.
    memory_gib: float | None = None
    # How long its last load took; None: it was never loaded here.
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What engines share."""

    # GPUs that the gateway may use, () where there are none; None: the driver does not say.
    devices: Sequence[Device] | None
    # Engines run on the CPU where there is no GPU; else on something that cannot be asked.
    on_cpu: bool
    # What processes may still take; None: not known.
    free_gib: float | None
    # What server.memory_budget_gib leaves; None: no bound.
    budget_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Takeover:
    """How one engine makes way for another."""

    old: str
    new: str
    # Why not both at once, where that is so; None: the new one starts beside the old one.
    obstacle: str | None
    # Another engine of the model is READY all along.
    covered: bool
    # Requests wait until the model is loaded again.
    held: bool
    start_s: float | None

    def told(self, model: str) -> str:
        """Return it in one line, as far as nobody serves with an estimate of how long."""
        if self.obstacle is None:
            return f"{self.new} starts beside {self.old} and takes over when it is ready"
        if self.covered:
            away = "the others serve meanwhile"
        elif self.start_s is None:
            away = f"{self._without(model)} for an unknown time, it was never loaded here"
        else:
            away = f"about {self.start_s + STOP_S:.0f} s {self._without(model)}"
        last = "" if self.start_s is None else f"; last load took {self.start_s:.0f} s"
        return f"{self.old} ends before its successor starts, {away}: {self.obstacle}{last}"

    def _without(self, model: str) -> str:
        return "in which requests wait" if self.held else f"without {model}"


@dataclass(frozen=True, slots=True)
class Prospect:
    """The verdict on an engine that is to start beside another; GPUs are judged apart."""

    # Why it cannot; None: it can.
    obstacle: str | None
    # What it is going to take; None: not known.
    need_gib: float | None = None


def prospect(old: Slot, new: Slot, present: Present, machine: Machine) -> Prospect:
    """Return whether two engines can run at once, as far as GPUs do not matter."""
    if not isinstance(new.spec, ProcessSpec):
        return Prospect(f"an engine of kind {new.spec.kind} is not started beside another")
    if not isinstance(old.spec, LocalSpec):
        return Prospect(None, new.spec.memory_gib)  # it runs elsewhere
    if (exclusive := _exclusive(old, new)) is not None:
        return Prospect(exclusive)
    if machine.devices is None:
        return Prospect("which GPUs there are is not known")
    need_gib = need(old, new, present.memory_gib, on_cpu=not machine.devices)
    obstacle = _over_budget(need_gib, machine)
    if obstacle is None and not machine.devices:
        obstacle = _over_host(need_gib, machine)
    return Prospect(obstacle, need_gib)


def _exclusive(old: Slot, new: Slot) -> str | None:
    """Return what only one of two engines can have."""
    assert isinstance(new.spec, LocalSpec)
    flags = {flag.partition(".")[0] for flag in new.spec.args}
    if connectors := sorted(flags & CONNECTORS):
        return f"{connectors[0]} may need a port that only one engine can have"
    if shared := next(_same_ports(old, new), None):
        return f"both would use the same port ({shared})"
    if str(new.spec.args.get("nnodes") or 1) != "1":
        return "it runs on several machines"
    return None


def _over_budget(need_gib: float | None, machine: Machine) -> str | None:
    if machine.budget_gib is None:
        return None
    if need_gib is None:
        return "what it takes of server.memory_budget_gib is not known: set memory_gib"
    if need_gib > machine.budget_gib:
        return (
            f"no memory for both: it takes {need_gib:.1f} GiB, server.memory_budget_gib leaves "
            f"{max(machine.budget_gib, 0.0):.1f}"
        )
    return None


def _over_host(need_gib: float | None, machine: Machine) -> str | None:
    if not machine.on_cpu:
        return "how much memory its accelerator has left is not known"
    if need_gib is None:
        return "how much memory it takes is not known: set memory_gib"
    if machine.free_gib is None:
        return "how much memory is free is not known"
    if need_gib * PEAK > machine.free_gib:
        return (
            f"no memory for both: it takes up to {need_gib * PEAK:.1f} GiB to start, "
            f"{machine.free_gib:.1f} are free"
        )
    return None


def room(
    new: PlacementRequest,
    others: Sequence[PlacementRequest],
    machine: Machine,
    keep: Mapping[str, Placement],
) -> Placement | None:
    """Return the GPUs for an engine beside those of all others, None where it gets none.

    Raises PlacementError with one line.
    """
    if not machine.devices:
        return None
    try:
        return place_beside(new, others, machine.devices, keep)
    except PlacementError as error:
        raise PlacementError([f"no memory for both: {error.faults[0]}"]) from None


def need(old: Slot, new: Slot, measured_gib: float | None, *, on_cpu: bool) -> float | None:
    """Return the GiB that the new engine takes, None where that cannot be said.

    It is what is declared; else what the old one takes, where nothing differs that matters for it.
    """
    if not isinstance(new.spec, LocalSpec) or not isinstance(old.spec, LocalSpec):
        return None
    if new.spec.memory_gib is not None:
        return new.spec.memory_gib
    before, after = old.spec, new.spec
    same = before.model == after.model and all(
        before.args.get(flag) == after.args.get(flag) for flag in SIZES
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


def _same_ports(old: Slot, new: Slot) -> Iterator[str]:
    """Return the settings by which both engines would listen on the same port."""
    before = _ports(old)
    return (place for place, port in _ports(new).items() if before.get(place) == port)


def _ports(slot: Slot) -> dict[str, str]:
    assert isinstance(slot.spec, LocalSpec)
    settings = flat({"args": slot.spec.args, "env": slot.spec.env})
    return {
        place: str(value)
        for place, value in settings.items()
        if place not in SEARCHED_PORTS
        and {"port", "endpoint"} & set(re.split(r"[^a-z]+", place.lower()))
    }
