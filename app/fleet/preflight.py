"""Finds engines that evidently cannot start, for `check` and for a reload.

Checks model paths, the length of socket paths, interpreters and their packages, vLLM's flags and
parser names, sleep mode, parallel sizes that this machine cannot have, and whether a node of the
Ray cluster can hold an engine. `Builder.place` checks the GPUs of a spec.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from app.errors import SHUTTING_DOWN
from app.fleet.builder import Builder
from app.fleet.engine_plan import EngineConfig
from app.settings import Settings
from engines import interpreter
from engines.container import DaemonError, find_socket, missing_image
from engines.flags import FlagTable, ParserUnavailable, check_flags
from engines.gpu import (
    VISIBLE_DEVICES,
    AcceleratorError,
    count_gpus,
    count_memory_nodes,
    memory_share,
    visible_devices,
)
from engines.guard import scratch
from engines.hub import uses_modelscope
from engines.interpreter import Installation, InterpreterFault, InterpreterTimeout
from engines.plan import find_adapter_fault
from engines.process import SOCKET
from engines.ray import (
    Cluster,
    ClusterError,
    needed_resources,
    placement_fault,
    ray_is_installed,
)
from engines.spec import ContainerSpec, InProcessSpec, LocalSpec, ManagedSpec, ProcessSpec, RaySpec

# Interval at which a check that waits looks whether it is given up.
ENDED_POLL_S = 0.2
# Executors whose ranks may run on other machines.
REMOTE_EXECUTORS = ("ray", "external_launcher")


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """One line for each fault, and one for each check that was not possible."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def run_preflight(
    settings: Settings,
    configs: Sequence[EngineConfig],
    builder: Builder,
    ended: threading.Event | None = None,
    *,
    with_adapters: Collection[str] = (),
) -> PreflightResult:
    """Check the engines of `settings` that are to be started. Blocks.

    The adapters of the models named in `with_adapters` are checked too. Flags are not checked for
    another launcher than vLLM's; the check is given up when `ended` is set.
    """
    local = [(config.name, config.spec) for config in configs if isinstance(config.spec, LocalSpec)]
    specs = list({id(spec): spec for _, spec in local}.values())
    faults = [
        settings.engine_fault(spec, fault, _place_of_model(spec))
        for spec in specs
        if (fault := spec.missing_model())
    ]
    faults += _unusable_adapters(settings, with_adapters)
    on_sockets = [name for name, spec in local if not isinstance(spec, InProcessSpec)]
    faults += _long_paths(settings, on_sockets)
    notes = [
        settings.engine_fault(spec, note, "model")
        for spec in specs
        if (note := spec.doubtful_model())
    ]
    on_ray = list({id(s.spec): s.spec for s in configs if isinstance(s.spec, RaySpec)}.values())
    if on_ray:
        try:
            faults += asyncio.run(_unplaceable(settings, on_ray, ended))
        except ClusterError as error:
            notes.append(f"engines of kind: ray were not placed: {error}")
    try:
        faults += _missing_images(settings, specs)
    except DaemonError as error:
        notes.append(f"images of engines of kind: container were not looked for: {error}")
    if builder.runs_vllm:
        faults += [
            settings.engine_fault(spec, fault, "model")
            for spec in specs
            if (fault := spec.incomplete_model())
        ]
    # The flags of a container are those of its image's vLLM.
    with_flags = [spec for spec in specs if not isinstance(spec, ContainerSpec)]
    if builder.runs_vllm:
        for python, group in _by_interpreter([*with_flags, *on_ray]).items():
            of = "" if python is None else f" of {python}"
            try:
                faults += _flags(settings, group, python, builder, ended)
            except ParserUnavailable as error:
                notes.append(f"flags of engines{of} were not checked: {error}")
    return PreflightResult(tuple(faults), tuple(notes))


def _long_paths(settings: Settings, engines: Sequence[str]) -> Iterator[str]:
    """Yield a fault if the longest socket path exceeds the limit of unix(7)."""
    if not engines:
        return
    run_dir = settings.server.run_dir.absolute()
    path = run_dir / max(engines, key=len) / SOCKET
    if (length := len(os.fsencode(path))) > scratch.MAX_SOCKET_PATH:
        yield settings.source.fault(
            ("server", "run_dir"),
            f"the path of a socket, {path}, has {length} bytes, at most "
            f"{scratch.MAX_SOCKET_PATH} are possible: choose a shorter directory",
        )


def _unusable_adapters(settings: Settings, models: Collection[str]) -> Iterator[str]:
    """Yield the faults of adapters that engines here cannot load."""
    for number, model in enumerate(settings.models):
        if model.name not in models:
            continue
        specs = [spec for spec in model.engines if isinstance(spec, LocalSpec)]
        for place, adapter in enumerate(model.adapters or ()):
            faults = (
                fault
                for spec in specs
                if adapter.source is not None
                if (fault := find_adapter_fault(spec, adapter.source)) is not None
            )
            if (first := next(faults, None)) is not None:
                yield settings.source.fault(("models", number, "adapters", place, "source"), first)


def _place_of_model(spec: LocalSpec) -> str:
    return "volumes" if isinstance(spec, ContainerSpec) else "model"


def _missing_images(settings: Settings, specs: Sequence[LocalSpec]) -> list[str]:
    """Return the faults of images that are not here and are not pulled. Raises DaemonError."""
    contained = [spec for spec in specs if isinstance(spec, ContainerSpec)]
    if not contained:
        return []
    socket = find_socket(settings.containers.socket, os.environ)
    return [
        settings.engine_fault(spec, fault, "image")
        for spec in contained
        if (fault := missing_image(spec, socket))
    ]


async def _unplaceable(
    settings: Settings, specs: Sequence[RaySpec], ended: threading.Event | None
) -> list[str]:
    """Return the faults of engines that no node of the Ray cluster can hold.

    Raises ClusterError if the cluster is not reached.
    """
    if not ray_is_installed():
        return []  # the builder says so
    if settings.ray.address == "local":
        raise ClusterError("the cluster starts with the gateway (ray.address: local)")
    cluster = Cluster(
        settings.ray.address, settings.ray.namespace, settings.server.run_dir.absolute()
    )
    asking = asyncio.create_task(cluster.nodes())
    try:
        while not asking.done() and not (ended is not None and ended.is_set()):
            await asyncio.wait({asking}, timeout=ENDED_POLL_S)
        if not asking.done():
            raise ClusterError(SHUTTING_DOWN)
        nodes = asking.result()
    finally:
        asking.cancel()
        await asyncio.wait({asking})
        await cluster.close()
    return [
        settings.engine_fault(spec, fault)
        for spec in specs
        if (fault := placement_fault(needed_resources(spec), nodes, spec.nodes)) is not None
    ]


def _by_interpreter(specs: Sequence[ManagedSpec]) -> Mapping[Path | None, Sequence[ManagedSpec]]:
    """Return the specs of each interpreter; None: this environment's, or the nodes'."""
    groups: dict[Path | None, list[ManagedSpec]] = {}
    for spec in specs:
        python = spec.python if isinstance(spec, ProcessSpec) else None
        groups.setdefault(python, []).append(spec)
    return groups


def _flags(
    settings: Settings,
    specs: Sequence[ManagedSpec],
    python: Path | None,
    builder: Builder,
    ended: threading.Event | None,
) -> list[str]:
    """Return the faults of one interpreter and in the flags of its engines.

    Raises ParserUnavailable.
    """
    try:
        other = None if python is None else interpreter.probe(python)
    except InterpreterTimeout as error:
        raise ParserUnavailable(str(error)) from None
    except InterpreterFault as error:
        return [settings.engine_fault(spec, str(error), "python") for spec in specs]
    found = [
        settings.engine_fault(spec, missing, "env", "VLLM_USE_MODELSCOPE")
        for spec in specs
        if isinstance(spec, LocalSpec) and (missing := _missing_package(spec, other)) is not None
    ]
    verdict = check_flags(specs, settings.server.run_dir, ended, other)
    for spec, faults in zip(specs, verdict.faults, strict=True):
        for fault in faults:
            flag = () if fault.flag is None else (fault.flag,)
            found.append(settings.engine_fault(spec, fault.message, "args", *flag))
        if not faults and isinstance(spec, LocalSpec):
            for place, message in _impossible(spec, verdict.table, builder):
                found.append(settings.engine_fault(spec, message, *place))
    return found


def _missing_package(spec: LocalSpec, other: Installation | None) -> str | None:
    """Return the fault of an engine whose environment lacks the package of its hub.

    vLLM imports it also where it downloads nothing. `other`: of another interpreter.
    """
    if not uses_modelscope({**os.environ, **spec.env}):
        return None
    found = find_spec("modelscope") is not None if other is None else other.modelscope
    if found:
        return None
    python = sys.executable if other is None else other.python
    return (
        "the engine's environment lacks the package modelscope: "
        f"uv pip install --python {python} modelscope"
    )


def _impossible(
    spec: LocalSpec, table: FlagTable, builder: Builder
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield settings that this machine cannot satisfy, each with its path."""
    on_gpu = table.device == "cuda" or builder.assumes_gpus
    if not table.sleep and not builder.assumes_gpus:
        message = f"vLLM has no sleep mode on this platform ({table.device}): leave it out"
        if isinstance(spec, ProcessSpec) and spec.sleep_level is not None:
            yield ("sleep_level",), message
        if spec.args.get("enable-sleep-mode"):
            yield ("args", "enable-sleep-mode"), message
    try:
        memory_share(spec.args)
    except ValueError as error:
        name, _, said = str(error).partition(" ")
        yield ("args", name), said
    elsewhere = spec.args.get("distributed-executor-backend") in REMOTE_EXECUTORS
    if spec.gpus is not None or elsewhere:
        return
    if on_gpu:
        yield from _ranks_on_gpus(spec, builder)
    elif table.device == "cpu":
        yield from _ranks_on_cpu(spec)


def _ranks_on_cpu(spec: LocalSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield a fault if vLLM would bind more ranks than there are NUMA nodes."""
    variables = {**os.environ, **spec.env}
    if variables.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto":
        return
    if variables.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0":
        return
    # Each replica of a data-parallel engine binds its own ranks.
    one = {name: value for name, value in spec.args.items() if not name.startswith("data-parallel")}
    ranks, said = count_gpus(one)
    nodes = count_memory_nodes()
    if nodes is not None and ranks > max(nodes, 1):
        yield (
            ("args",),
            f"needs {ranks} NUMA nodes ({said}), this machine has {nodes}: on a CPU each rank is "
            "bound to a node of its own",
        )


def _ranks_on_gpus(spec: LocalSpec, builder: Builder) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield a fault if an engine without `gpus` needs more GPUs than it can see."""
    ranks, said = count_gpus(spec.args)
    if ranks == 1:
        return
    try:
        present = builder.devices()
        if (own := spec.env.get(VISIBLE_DEVICES)) is not None:
            present = visible_devices(builder.accelerator.devices(), own)
    except AcceleratorError:
        return  # vLLM may know more
    if ranks > len(present):
        yield ("args",), f"needs {ranks} GPUs ({said}), it sees {len(present)}"
