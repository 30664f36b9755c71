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
    """Return what one engine takes of a node. Raises ValueError for a wrong parallel size."""
    needed = {"CPU": 1.0, **spec.resources}
    if spec.gpus is not None:
        needed["GPU"] = float(count_gpus(spec.args)[0] if spec.gpus == "auto" else spec.gpus)
    if spec.accelerator_type is not None:
        needed[f"{TYPE_PREFIX}{spec.accelerator_type}"] = TYPE_SHARE
    return needed


def placement_fault(needed: Mapping[str, float], nodes: Sequence[Node]) -> str | None:
    """Return why no node can ever hold an engine, with what there is; None: one can."""
    if any(_holds(node.total, needed) for node in nodes):
        return None
    need = resource_words(needed)
    return f"no node of the Ray cluster can hold it: it needs {need}; {_shown(nodes)}"


def occupied(needed: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """Return the message for an engine that fits a node, but none that has it free."""
    return (
        f"no node of the Ray cluster has room for it now: it needs {resource_words(needed)}; free: "
        f"{_listed([(node.address, node.free) for node in nodes])}"
    )


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


def _holds(there: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in needed.items())


def _shown(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "the cluster has no node"
    return f"there is {_listed([(node.address, node.total) for node in nodes])}"


def _listed(nodes: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    largest = sorted(nodes, key=lambda one: (-one[1].get("GPU", 0.0), -one[1].get("CPU", 0.0)))
    shown = [f"{address} ({resource_words(there)})" for address, there in largest[:MAX_SHOWN]]
    more = len(nodes) - MAX_SHOWN
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])
