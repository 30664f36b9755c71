"""Memory of this host: what is available, and on how many NUMA nodes. Standard library only."""

import contextlib
from pathlib import Path

GIB = 1024**3
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
# A container's own control group, version 2 (cgroups(7)).
CGROUP = Path("/sys/fs/cgroup")


def available_host_gib(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> float | None:
    """Return the GiB that are available without swapping, None where Linux does not report it.

    The smaller of the machine's and of what a control group's limit leaves: a container that
    exceeds its limit is killed even if the machine has free memory. File pages count as free.
    """
    machine = _machine_bytes(meminfo)
    group = _group_bytes(cgroup)
    found = [free for free in (machine, group) if free is not None]
    return max(min(found), 0) / GIB if found else None


def _machine_bytes(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, LookupError):
        found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(found["MemAvailable"].removesuffix("kB")) * 1024
    return None


def _group_bytes(cgroup: Path) -> int | None:
    """Return the bytes that the control group's limit leaves, None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number: no limit
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    return None


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
