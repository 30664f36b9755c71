"""Runs the gateway's command and records the pauses of its garbage collector.

    python -P bench/gc_pauses.py FILE serve --config CONFIG

Each collection appends a line to FILE: when it began and when it ended, in ns of
time.perf_counter_ns, a clock that all processes of a machine share.
"""

import gc
import os
import sys
import time
from pathlib import Path


def record(file: str) -> None:
    """Record every collection from now on."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    began = 0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        now = time.perf_counter_ns()
        if phase == "start":
            began = now
        else:
            os.write(output, b"%d %d\n" % (began, now))

    gc.callbacks.append(watch)


def longest_pause_ms(file: Path, since_ns: int) -> float:
    """Return the longest pause that began after a time; 0 if there was none."""
    pauses = (tuple(map(int, line.split())) for line in file.read_text().splitlines())
    return max((ended - began for began, ended in pauses if began >= since_ns), default=0) / 1e6


def main() -> None:
    """Entry point of the command."""
    record(sys.argv.pop(1))
    from app.cli import main

    main()


if __name__ == "__main__":
    main()
