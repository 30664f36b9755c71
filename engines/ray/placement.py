"""The resources that an engine needs and that the nodes of a cluster have. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.gpu import count_gpus
from engines.spec import RaySpec

# Ray gives a node this resource for the type of its accelerators, and actors take a little of it.
TYPE_PREFIX = "accelerator_type:"
TYPE_SHARE = 0.001
# Of no use to an engine, as are those of nodes (node:ADDRESS) and of placement groups.
_HIDDEN = frozenset({"object_store_memory"})
# Nodes that a message names, the ones with the most GPUs first.
MAX_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of a cluster: its address, what it has and what of that is free."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def needed_resources(spec: RaySpec) -> dict[str, float]:
    """Return what one engine takes of each node. Raises ValueError for a wrong parallel size."""
    needed = {"CPU": 1.0, **spec.resources}
    if spec.gpus is not None:
        args = {**spec.args, "nnodes": spec.nodes}
        needed["GPU"] = float(count_gpus(args)[0] if spec.gpus == "auto" else spec.gpus)
    if spec.accelerator_type is not None:
        needed[f"{TYPE_PREFIX}{spec.accelerator_type}"] = TYPE_SHARE
    return needed


def placement_fault(
    needed: Mapping[str, float], nodes: Sequence[Node], count: int = 1
) -> str | None:
    """Return why an engine over `count` nodes can never have a place, with what there is.

    None: there are as many nodes that can hold it.
    """
    able = sum(_holds(node.total, needed) for node in nodes)
    if able >= count:
        return None
    need = place_words(needed, count)
    if count == 1 or not able:
        return f"no node of the Ray cluster can hold it: it needs {need}; {_shown(nodes)}"
    return f"{_partly(able)} can hold a part of it: it needs {need}; {_shown(nodes)}"


def occupied(needed: Mapping[str, float], nodes: Sequence[Node], count: int = 1) -> str:
    """Return the message for an engine that fits the cluster, but not what is free of it now."""
    able = sum(_holds(node.free, needed) for node in nodes)
    have = "no node of the Ray cluster has room for it"
    if count > 1 and able:
        have = f"{_partly(able)} {'has' if able == 1 else 'have'} room for a part of it"
    free = _listed([(node.address, node.free) for node in nodes])
    return f"{have} now: it needs {place_words(needed, count)}; free: {free}"


def place_words(needed: Mapping[str, float], count: int) -> str:
    """Return what an engine over `count` nodes needs, in words."""
    words = resource_words(needed)
    return words if count == 1 else f"{count} nodes with {words} each"


def resource_words(resources: Mapping[str, float]) -> str:
    """Return resources in words; sizes of memory in GiB."""
    words = []
    for name, amount in sorted(resources.items()):
        if name in _HIDDEN or name.startswith("node:") or "_group_" in name:
            continue
        if name.startswith(TYPE_PREFIX):
            words.append(f"type {name.removeprefix(TYPE_PREFIX)}")
        elif name == "memory":
            words.append(f"memory {amount / 1024**3:.1f} GiB")
        else:
            words.append(f"{name} {amount:g}")
    return ", ".join(words) or "nothing"


def _partly(able: int) -> str:
    return f"only {able} node{'' if able == 1 else 's'} of the Ray cluster"


def _holds(there: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in needed.items())


def _shown(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "the cluster has no node"
    return f"there is {_listed([(node.address, node.total) for node in nodes])}"


def _listed(nodes: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    largest = sorted(nodes, key=lambda node: (-node[1].get("GPU", 0.0), -node[1].get("CPU", 0.0)))
    shown = [f"{address} ({resource_words(there)})" for address, there in largest[:MAX_SHOWN]]
    more = len(nodes) - MAX_SHOWN
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])
