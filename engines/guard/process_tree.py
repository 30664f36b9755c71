"""What Linux tells of processes in /proc. Standard library only: the guardian uses it too."""

import os
from dataclasses import dataclass

# In the environment of every process of an engine: the directory of that engine. vLLM warns of
# unknown variables that begin with VLLM_, and those with GATEWAY_ are settings of the gateway.
MARK = "ENGINE_OF_GATEWAY"


@dataclass(frozen=True, slots=True)
class Stat:
    """A line of /proc/PID/stat (proc(5))."""

    state: str
    parent: int
    session: int
    # Clock ticks since boot: with the pid it names one process, which a pid alone does not.
    started: int


def stat(pid: int) -> Stat | None:
    """Return what a process is, or None when there is none; a zombie is there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None  # it ended meanwhile
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def all_stats() -> dict[int, Stat]:
    """Return every process that there is."""
    found = ((int(name), stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: one for pid, one in found if one is not None}


def descendants(root: int) -> dict[int, Stat]:
    """Return every process below `root`, zombies left out."""
    everybody = all_stats()
    children: dict[int, list[int]] = {}
    for pid, one in everybody.items():
        if one.state != "Z":
            children.setdefault(one.parent, []).append(pid)
    found: dict[int, Stat] = {}
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            found[pid] = everybody[pid]
            todo.append(pid)
    return found


def lives(pid: int, started: int) -> bool:
    """Whether the process of that pid is still the one that began at `started`, and no zombie."""
    one = stat(pid)
    return one is not None and one.started == started and one.state != "Z"


def carries(pid: int, variable: str, value: str) -> bool:
    """Whether a process was started with an environment variable of that value.

    Children inherit it over sessions, groups and parents; one that gives itself a title
    (setproctitle, as vLLM's EngineCore does) writes over what the kernel shows of it.
    """
    return os.fsencode(f"{variable}={value}") in _read(f"/proc/{pid}/environ").split(b"\0")


def title(pid: int) -> str:
    """Return a process's command line, or the title it gave itself; "" when it tells none."""
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # it ended meanwhile, or is somebody else's


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker of Python's multiprocessing, and has not ended.

    When those that it works for have ended, however they did, it removes what they left in
    /dev/shm and ends. Nobody else knows what that was: such names are random.
    """
    return "multiprocessing.resource_tracker import main" in title(pid)


def boot_id() -> str:
    """Return what distinguishes this boot of the machine from every other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
