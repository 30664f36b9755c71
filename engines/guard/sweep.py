"""Finding and killing every process of an engine by a mark in its environment.

What an engine starts inherits the mark, whatever process group, session or parent it moves to, and
/proc/PID/environ (proc(5)) keeps what a process was started with. So "nobody carries the mark" is
proof that nothing of the engine is left. A process that was forked without exec from one without
the mark does not carry it.

Run as a script it is the sentinel of a gateway that holds engines inside itself:
`python -I -S sweep.py VALUE`. Its standard input is a pipe from the gateway; when that ends, the
gateway has ended, however it did: what carries the mark is killed, and the engine's temporary files
are removed.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from engines.guard import process_tree, scratch

SWEEP_S = 10.0  # how long killed processes may take to vanish (uninterruptible sleep)


def marked(value: str) -> list[int]:
    """Return every process that carries the mark, this one and zombies left out."""
    found = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [
        pid
        for pid in found
        if pid != os.getpid() and process_tree.carries(pid, process_tree.MARK, value)
    ]


def sweep(value: str, within_s: float = SWEEP_S) -> list[int]:
    """Kill every process that carries the mark; return those that have not vanished in time.

    Blocks for as long as that takes, milliseconds as a rule.
    """
    deadline = time.monotonic() + within_s
    looks = 0  # one after the other that found nothing: a process amid exec shows no environment
    while looks < 2:
        left = marked(value)
        if left and time.monotonic() >= deadline:
            return left
        looks = 0 if left else looks + 1
        for pid in left:
            _kill(pid, value)
        time.sleep(0.01)
    return []


def _kill(pid: int, value: str) -> None:
    """Kill a process if it is still the one that carries the mark, not a heir of its number."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if process_tree.carries(pid, process_tree.MARK, value):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def main(value: str) -> int:
    """Wait for the end of standard input, then sweep; return the exit code."""
    # Ctrl-C and SIGTERM are the gateway's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    left = sweep(value)
    scratch.remove(Path(value))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
