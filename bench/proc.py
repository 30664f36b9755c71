"""CPU time and memory of a process and its children, from /proc. Linux only, as vLLM is."""

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


def family(pid: int) -> list[int]:
    """Return the process and all of its descendants, those alive now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += children.get(one, [])
    return found


def cpu_clock(pid: int) -> float | None:
    """Return the CPU seconds of one process to the nanosecond, or None if it is gone."""
    try:
        # The kernel's clock of another process, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return None


def cpu_clocks(pids: Sequence[int]) -> dict[int, float]:
    """Return the CPU seconds of each process that is alive, to the nanosecond.

    Unlike the sum over /proc/PID/task, they include threads that have ended.
    """
    return {pid: clock for pid in pids if (clock := cpu_clock(pid)) is not None}


def cpu_spent(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the CPU seconds that the processes alive at the end spent since the beginning."""
    return sum(clock - before.get(pid, 0.0) for pid, clock in after.items())


def rss_kib(pids: Sequence[int]) -> int:
    """Return the resident memory of the processes in KiB; shared pages count for each."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it ended meanwhile
    return pages * PAGE_KIB


def reset_peak_rss(pids: Sequence[int]) -> None:
    """Reset the peak of resident memory to its current value."""
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss_kib(pids: Sequence[int]) -> int:
    """Return the sum of the processes' peaks of resident memory in KiB since their last reset."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            found += sum(
                int(kib) for kib in re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
            )
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields behind the command's name, the state being the first; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
