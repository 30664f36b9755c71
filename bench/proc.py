"""What /proc says of a process and its children. Linux only, as vLLM is."""

import os
from collections.abc import Sequence
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system seconds that the processes have used, all threads together."""
    ticks = 0
    for pid in pids:
        if fields := _stat(pid):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def rss_kib(pids: Sequence[int]) -> int:
    """Return the resident memory of the processes in KiB; what they share counts for each."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it ended meanwhile
    return pages * PAGE_KIB


def _stat(pid: int) -> list[str]:
    """Return the fields behind the command's name, the state being the first; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
