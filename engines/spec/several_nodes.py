"""Engines over several nodes: their flags and parallel sizes. Pure."""

from collections.abc import Mapping

# Ranks of one replica: ParallelConfig.world_size of vLLM 0.32.
WORLD_FLAGS = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
EXECUTOR_FLAG = "distributed-executor-backend"

_OTHER_RANKS = "cannot be set for kind: ray, whose engines have no ranks elsewhere; use replicas"
_SET = "is set by the gateway"
_REFUSED = {
    "nnodes": "is set by nodes of the engine",
    "node-rank": _SET,
    "master-addr": _SET,
    "master-port": _SET,
    "data-parallel-address": _OTHER_RANKS,
    "data-parallel-backend": _OTHER_RANKS,
}
# Values that change nothing.
_ACCEPTED = {"nnodes": "1", "data-parallel-backend": "mp", "data-parallel-size": "1"}
_DATA_PARALLEL = "data-parallel-"


def parallel_size(args: Mapping[str, object], name: str) -> int:
    """Return a parallel size of an engine's flags; default: 1.

    Raises ValueError if it is no whole number above 0.
    """
    value = args.get(name)
    if value is None:
        return 1
    text = "" if isinstance(value, bool) else str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text)):
        raise ValueError(f"{name} must be a whole number above 0, not {value}")
    return int(text)


def flag_fault(name: str, value: object, nodes: int) -> str | None:
    """Return why a flag cannot be set for an engine over that many nodes; None: it can."""
    stem = name.partition(".")[0]
    if stem == EXECUTOR_FLAG:
        accepted = ("mp",) if nodes > 1 else ("mp", "uni")
        return None if value in accepted else f"must be {' or '.join(accepted)} for kind: ray"
    if nodes > 1 and stem.startswith(_DATA_PARALLEL):
        off = value is None or value is False or str(value) == _ACCEPTED.get(stem)
        return None if off else "cannot be set for an engine over several nodes; use replicas"
    # vLLM accepts unambiguous abbreviations.
    meant = [flag for flag in _REFUSED if flag.startswith(stem)]
    if len(meant) != 1 or str(value) == _ACCEPTED.get(stem):
        return None
    return _REFUSED[meant[0]]


def nodes_fault(nodes: int, args: Mapping[str, object], gpus: object) -> str | None:
    """Return why an engine of these parallel sizes cannot run on that many nodes; None: it can.

    `gpus` is the number on each node, if it is one. Raises ValueError for a wrong parallel size.
    """
    if nodes == 1:
        return None
    sizes = {name: parallel_size(args, name) for name in WORLD_FLAGS}
    world = 1
    for size in sizes.values():
        world *= size
    said = " and ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
    if world % nodes:
        have = f"{said} make {world} ranks" if said else "without a parallel size, it has 1 rank"
        return f"vLLM's ranks must divide evenly among {nodes} nodes: {have}"
    if isinstance(gpus, int) and gpus < (local := world // nodes):
        return f"{said} on {nodes} nodes needs {local} GPUs of each, not {gpus} (gpus)"
    return None
