"""NUMA nodes of this machine, as vLLM's CPU backend counts them. Standard library only."""

from pathlib import Path

STATUS = Path("/proc/self/status")


def count_memory_nodes(status: Path = STATUS) -> int | None:
    """Return the number of NUMA nodes this process may allocate on, None if it is not reported.

    From Mems_allowed_list of proc(5), such as `0-1,3`.
    """
    try:
        text = status.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, nodes = line.partition(":")
        if name == "Mems_allowed_list":
            return sum(map(_length, nodes.strip().split(","))) if nodes.strip() else None
    return None


def _length(part: str) -> int:
    first, dash, last = part.partition("-")
    return int(last) - int(first) + 1 if dash else 1
