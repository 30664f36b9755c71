"""Finding and killing every process of an engine by a mark in its environment.

What an engine starts inherits the mark, whatever process group, session or parent it moves to, and
/proc/PID/environ (proc(5)) keeps what a process was started with. So "nobody carries the mark" is
proof that nothing of the engine is left. A process that was forked without exec from one without
the mark does not carry it.

Run as a script it is the sentinel of a gateway that holds engines inside itself:
`python -I -S sweep.py VALUE`. Its standard input is a pipe from the gateway; when that ends, the
gateway has ended, however it did, and what carries the mark is killed.
"""

import contextlib
import os
import signal
import sys
import time

# The variable whose value names one engine: its directory in the run directory. vLLM warns of
# unknown variables that begin with VLLM_, and those with GATEWAY_ are settings of the gateway.
MARK = "ENGINE_OF_GATEWAY"
SWEEP_S = 10.0  # how long killed processes may take to vanish (uninterruptible sleep)


def marked(value: str) -> list[int]:
    """Return every process that carries the mark, this one and zombies left out."""
    mark = _mark(value)
    found = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in found if pid != os.getpid() and _carries(pid, mark)]


def sweep(value: str, within_s: float = SWEEP_S) -> list[int]:
    """Kill every process that carries the mark; return those that have not vanished in time.

    Blocks for as long as that takes, milliseconds as a rule.
    """
    deadline = time.monotonic() + within_s
    mark = _mark(value)
    while (left := marked(value)) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid, mark)
        time.sleep(0.01)
    return left


def _mark(value: str) -> bytes:
    return b"\0" + os.fsencode(f"{MARK}={value}") + b"\0"


def _carries(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in b"\0" + file.read() + b"\0"
    except OSError:  # it ended meanwhile, or is somebody else's
        return False


def _kill(pid: int, mark: bytes) -> None:
    """Kill a process if it is still the one that carries the mark, not a heir of its number."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _carries(pid, mark):
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
    return 1 if sweep(value) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
