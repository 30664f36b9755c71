"""Places engines on GPUs before anything starts: pure, no I/O, no clock.

An engine needs as many GPUs as it has ranks on this machine, and a share of each: vLLM takes
`gpu-memory-utilization` of the whole GPU, whatever else runs there. Engines that are loaded at
start-up must fit on a GPU together. One that is loaded on demand must fit next to those, with the
other engines of its model; models that are loaded on demand make room for each other.

Lists are placed first. `auto` and a number follow, larger engines first, each on the GPUs with the
least memory left: small engines share a GPU, parallel ones find free GPUs, replicas are spread. The
algorithm does not search: if it finds no room where there is some, the operator writes a list.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Self

from engines.gpu.accelerator import Device
from engines.spec import WORLD_FLAGS, FlagValue, LocalSpec, parallel_size

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Without it CUDA numbers the fastest GPU first; NVML and nvidia-smi number by bus order.
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
# Of vLLM 0.32; before, it was 0.9, which needs less than is reserved here.
DEFAULT_SHARE = Fraction("0.92")
SHARE_FLAGS = ("gpu-memory-utilization", "device-memory-utilization")


class PlacementError(Exception):
    """At least one engine does not fit; `faults` has one line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The placement that one engine requests; engines of a `model` are loaded together."""

    engine: str
    model: str
    spec: LocalSpec
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of one engine, and the environment that gives it these and no others."""

    devices: tuple[int, ...]
    env: Mapping[str, str]

    @classmethod
    def on(cls, gpus: Sequence[int]) -> Self:
        """Return the placement on these GPUs."""
        return cls(
            tuple(gpus), {DEVICE_ORDER: "PCI_BUS_ID", VISIBLE_DEVICES: ",".join(map(str, gpus))}
        )


@dataclass(frozen=True, slots=True)
class _Need:
    """A request in numbers; `text` names the flags behind `gpus`."""

    request: PlacementRequest
    gpus: int
    text: str
    share: Fraction

    @property
    def size(self) -> tuple[int, Fraction, str]:
        """A sort key: larger engines first, equal ones in a fixed order."""
        return (-self.gpus, -self.share, self.request.engine)


@dataclass(slots=True)
class _Plan:
    """The engines on each GPU; shares are of whole GPUs."""

    devices: Sequence[Device]
    on: dict[int, list[_Need]] = field(default_factory=dict)

    def put(self, need: _Need, gpus: Collection[int]) -> None:
        for gpu in gpus:
            self.on.setdefault(gpu, []).append(need)

    def permanent(self, gpu: int) -> list[_Need]:
        """Return the engines that are always on this GPU."""
        return [n for n in self.on.get(gpu, ()) if not n.request.on_demand]

    def together(self, gpu: int, model: str) -> list[_Need]:
        """Return the engines on this GPU while an on-demand model is loaded."""
        others = [
            n for n in self.on.get(gpu, ()) if n.request.on_demand and n.request.model == model
        ]
        return self.permanent(gpu) + others

    def groups(self, gpu: int) -> list[list[_Need]]:
        """Return every set of engines that is on this GPU at the same time."""
        models = {n.request.model for n in self.on.get(gpu, ()) if n.request.on_demand}
        return [self.together(gpu, m) for m in sorted(models)] or [self.permanent(gpu)]

    def fits(self, need: _Need, gpu: int) -> bool:
        """Return whether an engine fits on a GPU at all times."""
        mine = need.request.model
        models = {n.request.model for n in self.on.get(gpu, ()) if n.request.on_demand}
        # A permanent engine must leave room for each on-demand model.
        loaded = {mine} if need.request.on_demand else models | {mine}
        return all(_sum(self.together(gpu, model)) + need.share <= 1 for model in loaded)

    def used(self, gpu: int) -> Fraction:
        return _sum(self.on.get(gpu, ()))


def place(
    requests: Sequence[PlacementRequest],
    devices: Sequence[Device],
    keep: Mapping[str, Placement] | None = None,
) -> dict[str, Placement]:
    """Return the GPUs of every engine whose spec has `gpus`, by the engine's name.

    `devices` are the GPUs that the gateway may use. Requests without `gpus` get no placement, and
    count where CUDA_VISIBLE_DEVICES of their `env`, or its absence, puts them. The order of the
    requests does not matter. An engine in `keep` stays where it is while that matches its request,
    unless everything fits only if it moves. Raises PlacementError with every fault, sorted.
    """
    if keep:
        with contextlib.suppress(PlacementError):
            return _place(requests, devices, keep)
    return _place(requests, devices, {})


def _place(
    requests: Sequence[PlacementRequest], devices: Sequence[Device], keep: Mapping[str, Placement]
) -> dict[str, Placement]:
    needs, faults = _read_needs(requests)
    plan = _Plan(devices)
    placed: dict[str, tuple[int, ...]] = {}
    free: list[_Need] = []
    for need in sorted(needs, key=lambda need: need.size):
        if need.request.spec.gpus is None:
            plan.put(need, _implicit_gpus(need, devices))
        elif wrong := _fault(need, devices):
            faults.append(f"{need.request.engine}: {wrong}")
        elif isinstance(gpus := need.request.spec.gpus, list):
            plan.put(need, gpus)
            placed[need.request.engine] = tuple(gpus)
        else:
            free.append(need)
    faults += [fault for gpu in sorted(plan.on) if (fault := _overcommitted(plan, gpu))]
    # Engines that keep their GPUs come first; then permanent ones, since they block every other.
    free.sort(key=lambda need: (need.request.engine not in keep, need.request.on_demand))
    for need in free:
        kept = keep.get(need.request.engine)
        if (found := _stay(need, plan, kept) or _choose(need, plan)) is None:
            faults.append(f"{need.request.engine}: {_no_room(need, plan)}")
            continue
        plan.put(need, found)
        placed[need.request.engine] = found
    if faults:
        raise PlacementError(sorted(faults))
    return {engine: Placement.on(gpus) for engine, gpus in placed.items()}


def place_additional(
    request: PlacementRequest,
    others: Sequence[PlacementRequest],
    devices: Sequence[Device],
    keep: Mapping[str, Placement],
) -> Placement | None:
    """Return the GPUs for an engine that starts while all others keep theirs.

    It must leave room for every on-demand model, as a permanent engine does: any of them may be
    loaded while it starts. None if its spec has no `gpus` and there is room on those it uses.
    Raises PlacementError with one line.
    """
    try:
        need = _need(request)
    except ValueError as error:
        raise PlacementError([f"{request.engine}: {error}"]) from None
    if request.spec.gpus is None and len(_implicit_gpus(need, devices)) < need.gpus:
        raise PlacementError([f"{request.engine}: which GPUs it uses is not known, set gpus"])
    found = _place([*others, replace(request, on_demand=False)], devices, keep)
    for engine, placement in keep.items():
        if engine in found and found[engine].devices != placement.devices:
            raise PlacementError([f"{request.engine}: there is room only if {engine} moves"])
    return found.get(request.engine)


def visible_devices(devices: Sequence[Device], value: str | None) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects, in its order; None selects all.

    As in CUDA, the first entry that names no GPU ends the list, and a UUID may be abbreviated while
    it is unambiguous. Indexes are those of nvidia-smi.
    """
    if value is None:
        return tuple(devices)
    found: list[Device] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isdigit():
            named = [d for d in devices if d.index == int(entry)]
        else:
            named = [d for d in devices if entry.startswith("GPU-") and d.uuid.startswith(entry)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)


def count_gpus(args: Mapping[str, FlagValue]) -> tuple[int, str]:
    """Return the number of GPUs that an engine with these flags uses here, and those flags.

    Raises ValueError for a size that is no whole number above 0.
    """
    sizes = {
        name: parallel_size(args, name) for name in (*WORLD_FLAGS, "data-parallel-size", "nnodes")
    }
    world = 1
    for name in WORLD_FLAGS:
        world *= sizes[name]
    local = -(-world // sizes["nnodes"])
    if args.get("data-parallel-size-local") is not None:
        sizes["data-parallel-size-local"] = parallel_size(args, "data-parallel-size-local")
        ranks = sizes["data-parallel-size-local"]
    elif args.get("data-parallel-rank") is not None or args.get("data-parallel-external-lb"):
        ranks = 1
    else:
        ranks = sizes["data-parallel-size"]
    said = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    return local * ranks, ", ".join(said) or "no parallel size in args"


def memory_share(args: Mapping[str, FlagValue]) -> Fraction:
    """Return the share of a GPU that vLLM takes. Raises ValueError outside of 0 to 1."""
    for name in SHARE_FLAGS:
        if (value := args.get(name)) is None:
            continue
        try:
            # By way of float, which bounds the digits; then as text, so that 0.1 is a tenth.
            share = None if isinstance(value, bool) else Fraction(str(float(str(value))))
        except ValueError:
            share = None
        if share is None or not 0 < share <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, not {value}")
        return share
    return DEFAULT_SHARE


def _need(request: PlacementRequest) -> _Need:
    gpus, text = count_gpus(request.spec.args)
    return _Need(request, gpus, text, memory_share(request.spec.args))


def _read_needs(requests: Sequence[PlacementRequest]) -> tuple[list[_Need], list[str]]:
    """Return the needs, and the faults of those requests that have `gpus` and invalid flags."""
    needs: list[_Need] = []
    faults: list[str] = []
    for request in requests:
        try:
            needs.append(_need(request))
        except ValueError as error:
            if request.spec.gpus is not None:
                faults.append(f"{request.engine}: {error}")
    return needs, faults


def _implicit_gpus(need: _Need, devices: Sequence[Device]) -> list[int]:
    """Return the GPUs of an engine without `gpus`: the first ones that it sees."""
    spec = need.request.spec
    ids = spec.args.get("device-ids")
    seen = visible_devices(devices, spec.env.get(VISIBLE_DEVICES) if ids is None else str(ids))
    return [device.index for device in seen[: need.gpus] if not device.mig]


def _fault(need: _Need, devices: Sequence[Device]) -> str | None:
    """Return what is wrong with a request regardless of others."""
    return _contradiction(need) or _unknown(need, devices) or _number(need, devices)


def _contradiction(need: _Need) -> str | None:
    spec = need.request.spec
    for name in (VISIBLE_DEVICES, DEVICE_ORDER):
        if name in spec.env:
            return f"gpus sets {name}, and so does env: remove one of them"
    if spec.args.get("device-ids") is not None:
        return "gpus and device-ids in args both choose GPUs: remove one of them"
    return None


def _unknown(need: _Need, devices: Sequence[Device]) -> str | None:
    asked = need.request.spec.gpus
    if not isinstance(asked, list) or not devices:
        return None
    if twice := {gpu for gpu in asked if asked.count(gpu) > 1}:
        return f"gpus names GPU {_listed(sorted(twice))} more than once"
    there = {device.index: device for device in devices}
    if unknown := set(asked) - there.keys():
        return f"asks for GPU {_listed(sorted(unknown))}, there is only {_listed(sorted(there))}"
    if split := [gpu for gpu in asked if there[gpu].mig]:
        return (
            f"GPU {_listed(split)} is split into MIG instances: instead of gpus, set "
            f"{VISIBLE_DEVICES} in env to the UUID of one"
        )
    return None


def _number(need: _Need, devices: Sequence[Device]) -> str | None:
    asked, memory = need.request.spec.gpus, need.request.spec.memory_gib
    given = len(asked) if isinstance(asked, list) else asked
    if not isinstance(given, int):  # auto
        given = need.gpus
    whole = [d for d in devices if not d.mig]
    if given > len(whole):
        split = ", not counting those that are split into MIG instances"
        return (
            f"asks for {_gpus(given)}, there {_are(len(whole))}"
            f"{split if len(whole) < len(devices) else ''}"
        )
    if given != need.gpus:
        return (
            f"gpus gives it {_gpus(given)}, it uses {need.gpus} ({need.text}): "
            "set gpus: auto, or change its parallel sizes in args"
        )
    wanted = [d for d in whole if not isinstance(asked, list) or d.index in asked]
    large = [d for d in wanted if _holds(d, need)]
    if memory is not None and len(large) < need.gpus:
        most = max(d.total_gib for d in wanted if d not in large and d.total_gib is not None)
        return (
            f"memory_gib is {memory:g}, {memory / need.gpus:g} on each of {_gpus(need.gpus)}; "
            f"GPU {_listed(d.index for d in wanted if d not in large)} has at most {most:.1f} GiB"
        )
    return None


def _room(need: _Need, plan: _Plan) -> list[Device]:
    return [d for d in plan.devices if not d.mig and _holds(d, need) and plan.fits(need, d.index)]


def _stay(need: _Need, plan: _Plan, kept: Placement | None) -> tuple[int, ...] | None:
    """Return the GPUs that an engine has, None if it cannot keep them."""
    if kept is None or len(kept.devices) != need.gpus:
        return None
    room = {device.index for device in _room(need, plan)}
    return kept.devices if room.issuperset(kept.devices) else None


def _choose(need: _Need, plan: _Plan) -> tuple[int, ...] | None:
    """Return the best GPUs for an engine, None if there is no room."""
    room = _room(need, plan)
    if len(room) < need.gpus:
        return None

    def emptiest(device: Device) -> tuple[Fraction, int]:
        return plan.used(device.index), device.index

    def fullest(device: Device) -> tuple[bool, Fraction, int]:
        used = plan.used(device.index)
        replica = any(n.request.model == need.request.model for n in plan.on.get(device.index, ()))
        # On-demand models on the same GPU have to unload each other, so they are spread.
        return replica, used if need.request.on_demand else -used, device.index

    if need.gpus == 1:
        return (min(room, key=fullest).index,)
    # Ranks wait for the slowest one, so they go on GPUs of one kind if possible.
    kinds = [[d for d in room if d.name == name] for name in sorted({d.name for d in room})]
    alike = [kind for kind in kinds if len(kind) >= need.gpus] or [room]
    best = [sorted(kind, key=emptiest)[: need.gpus] for kind in alike]
    chosen = min(best, key=lambda kind: [emptiest(device) for device in kind])
    return tuple(sorted(device.index for device in chosen))


def _overcommitted(plan: _Plan, gpu: int) -> str | None:
    for group in plan.groups(gpu):
        if (total := _sum(group)) > 1:
            who = sorted(f"{n.request.engine} ({float(n.share):g})" for n in group)
            return (
                f"GPU {gpu}: gpu-memory-utilization of {_listed(who)} is {float(total):g} "
                "together, above 1"
            )
    return None


def _no_room(need: _Need, plan: _Plan) -> str:
    there = _gpus(len(plan.devices))
    few = f"none of {there} has" if need.gpus == 1 else f"fewer than {need.gpus} of {there} have"
    others = sorted({n.request.engine for needs in plan.on.values() for n in needs})
    next_to = f" next to {_listed(others)}" if others else ""
    return f"no room for it: {few} gpu-memory-utilization {float(need.share):g} left{next_to}"


def _holds(device: Device, need: _Need) -> bool:
    """Return whether a GPU has the engine's `memory_gib`, or does not report its memory."""
    memory = need.request.spec.memory_gib
    return memory is None or device.total_gib is None or memory / need.gpus <= device.total_gib


def _sum(needs: Iterable[_Need]) -> Fraction:
    return sum((need.share for need in needs), Fraction())


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _are(number: int) -> str:
    return {0: "are none", 1: "is 1"}.get(number, f"are {number}")


def _listed(members: Iterable[object]) -> str:
    *first, last = map(str, members)
    return f"{', '.join(first)} and {last}" if first else last
