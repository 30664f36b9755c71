"""Processes as Linux shows them in /proc. Standard library only: the guardian uses it too."""

import os
import signal
from typing import NamedTuple

KILL_TIMEOUT_S = 10.0  # killed processes vanish later only in uninterruptible sleep
# For resource trackers to clean up: a tenth of a second as a rule, seconds on a busy machine.
TRACKER_TIMEOUT_S = 8.0
# A guardian reports within KILL_TIMEOUT_S after the grace of a stop; later than this it is stuck.
GUARDIAN_SLACK_S = 15.0
PR_SET_PDEATHSIG = 1  # prctl(2)

# In the environment of every process of an engine, with that engine's directory as its value. vLLM
# warns of unknown variables that begin with VLLM_, and those with GATEWAY_ are gateway settings.
MARKER_VARIABLE = "ENGINE_OF_GATEWAY"


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends.

    Returns False if `parent` has ended before. Raises OSError.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)). Raises OSError."""
    import ctypes  # of the users of this module, few need it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# No dataclass: importing that takes a guardian longer than all of its own modules.
class ProcessStat(NamedTuple):
    """A line of /proc/PID/stat (proc(5))."""

    state: str
    parent: int
    session: int
    # Clock ticks since boot. PIDs are reused: only the PID and this together identify a process.
    start_time: int


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, zombies included; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None  # it exited meanwhile
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def read_all_stats() -> dict[int, ProcessStat]:
    """Return the state of every process, by PID."""
    found = ((int(name), read_stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid, stat in found if stat is not None}


def descendants(root: int) -> dict[int, ProcessStat]:
    """Return every process below `root`, except zombies."""
    stats = read_all_stats()
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        if stat.state != "Z":
            children.setdefault(stat.parent, []).append(pid)
    found: dict[int, ProcessStat] = {}
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            found[pid] = stats[pid]
            todo.append(pid)
    return found


def is_alive(pid: int, start_time: int) -> bool:
    """Return whether the process with this PID and start time still runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat.start_time == start_time and stat.state != "Z"


def has_variable(pid: int, name: str, value: str) -> bool:
    """Return whether a process was started with this environment variable.

    Children inherit it across sessions, groups and parents. A process that sets its own title
    (setproctitle, as vLLM's EngineCore does) overwrites what the kernel shows of its environment.
    """
    return os.fsencode(f"{name}={value}") in _read(f"/proc/{pid}/environ").split(b"\0")


def handles(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal (SigCgt of proc(5))."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def read_title(pid: int) -> str:
    """Return a process's command line, or the title it gave itself; "" when it has none."""
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # it exited meanwhile, or belongs to another user


def is_resource_tracker(pid: int) -> bool:
    """Return whether a running process is a resource tracker of Python's multiprocessing.

    After its clients have exited, for any reason, a tracker removes what they left in /dev/shm and
    exits. Nothing else can remove it: the names are random and known only to the tracker.
    """
    return "multiprocessing.resource_tracker import main" in read_title(pid)


def boot_id() -> str:
    """Return the identifier of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
