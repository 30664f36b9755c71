"""Finds and kills every process of an engine by a variable in its environment.

Every process that an engine starts inherits the marker variable, whatever process group, session or
parent it moves to, and /proc/PID/environ (proc(5)) keeps the environment of its start. If no
process has the variable, no process of the engine is left. Exception: a process forked without exec
from one without the variable.

Run as a script it is the sentinel of a gateway with engines inside itself:
`python -I -S marked_processes.py VALUE`. Its standard input is a pipe from the gateway. When the
pipe closes, the gateway has ended, for whatever reason: the sentinel kills the marked processes and
removes the engine's temporary files.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from engines.guard import process_tree, scratch


def find_marked(value: str) -> list[int]:
    """Return the PIDs of the marked processes, except this one and zombies."""
    found = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [
        pid
        for pid in found
        if pid != os.getpid()
        and process_tree.has_variable(pid, process_tree.MARKER_VARIABLE, value)
    ]


def kill_marked(value: str, timeout_s: float = process_tree.KILL_TIMEOUT_S) -> list[int]:
    """Kill every marked process; return those that have not vanished in time.

    Blocks until they have, normally for milliseconds.
    """
    deadline = time.monotonic() + timeout_s
    empty_scans = 0  # in a row: during exec a process shows no environment
    while empty_scans < 2:
        left = find_marked(value)
        if left and time.monotonic() >= deadline:
            return left
        empty_scans = 0 if left else empty_scans + 1
        for pid in left:
            _kill(pid, value)
        time.sleep(0.01)
    return []


def _kill(pid: int, value: str) -> None:
    """Kill a process if it is still marked, and not a new process with the same PID."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if process_tree.has_variable(pid, process_tree.MARKER_VARIABLE, value):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def main(value: str) -> int:
    """Wait for the end of standard input, then kill; return the exit code."""
    # The gateway handles Ctrl-C and SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    left = kill_marked(value)
    scratch.remove(Path(value))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
