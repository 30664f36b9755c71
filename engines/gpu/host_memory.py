"""How much memory processes may still take here: what the machine and the container allow."""

import contextlib
from pathlib import Path

GIB = 1024**3
MEMINFO = Path("/proc/meminfo")
# Where a container sees its own control group, of version 2 (cgroups(7)).
CGROUP = Path("/sys/fs/cgroup")


def available_gib(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> float | None:
    """Return the GiB that can be taken without swapping, None where Linux does not say.

    The machine's, or what a control group's limit leaves where that is less: a container that goes
    over its limit is killed however much the machine has. File pages count as free in both.
    """
    machine = _machine(meminfo)
    group = _group(cgroup)
    found = [free for free in (machine, group) if free is not None]
    return max(min(found), 0) / GIB if found else None


def _machine(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, LookupError):
        found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(found["MemAvailable"].removesuffix("kB")) * 1024
    return None


def _group(cgroup: Path) -> int | None:
    """Return the bytes that the control group's limit leaves, None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number: no limit
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    return None
