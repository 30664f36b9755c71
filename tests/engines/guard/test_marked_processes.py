"""Finding and killing marked processes, with real ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.guard import marked_processes
from engines.guard.marked_processes import find_marked, kill_marked
from engines.guard.process_tree import MARKER_VARIABLE

# A parent, and a child in its own session; both wait for ever. The child reports itself before its
# PID is printed: until its exec is over it has no environment.
FAMILY = """
import os, subprocess, sys, time
program = "import time; print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True,
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


class Family:
    """Two marked processes."""

    def __init__(self, value: str) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-S", "-c", FAMILY],
            stdout=subprocess.PIPE,
            env={**os.environ, MARKER_VARIABLE: value},
        )
        assert self.parent.stdout is not None
        self.pids = [int(word) for word in self.parent.stdout.readline().split()]

    def kill(self) -> None:
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.parent.wait()
        assert self.parent.stdout is not None
        self.parent.stdout.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    processes = Family(str(tmp_path))
    yield processes
    processes.kill()


def test_children_in_another_session_are_found(family: Family, tmp_path: Path) -> None:
    assert sorted(find_marked(str(tmp_path))) == sorted(family.pids)


def test_marker_value_is_compared_whole(family: Family, tmp_path: Path) -> None:
    assert find_marked(str(tmp_path)[:-1]) == []
    assert find_marked(f"{tmp_path}/") == []
    assert all(alive(pid) for pid in family.pids)


def test_only_marked_processes_are_killed(family: Family, tmp_path: Path) -> None:
    other = Family(f"{tmp_path}-other")
    try:
        assert kill_marked(str(tmp_path)) == []
        assert find_marked(str(tmp_path)) == []
        assert not any(alive(pid) for pid in family.pids)
        assert all(alive(pid) for pid in other.pids)
    finally:
        other.kill()


def test_stopped_process_is_killed(family: Family, tmp_path: Path) -> None:
    for pid in family.pids:
        os.kill(pid, signal.SIGSTOP)
    assert kill_marked(str(tmp_path)) == []


def test_process_that_does_not_vanish_in_time_is_returned(family: Family, tmp_path: Path) -> None:
    assert sorted(kill_marked(str(tmp_path), timeout_s=0.0)) == sorted(family.pids)


def test_no_marked_processes_is_no_error(tmp_path: Path) -> None:
    assert kill_marked(str(tmp_path)) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, None])
def test_sentinel_kills_when_its_pipe_closes_and_ignores_signals(
    family: Family, tmp_path: Path, signum: signal.Signals | None
) -> None:
    command = [sys.executable, "-I", "-S", marked_processes.__file__, str(tmp_path)]
    sentinel = subprocess.Popen(command, stdin=subprocess.PIPE, env={})
    assert sentinel.stdin is not None
    if signum is not None:
        # It ignores both from its first lines on; wait for them.
        while not _ignores(sentinel.pid, signum):
            assert sentinel.poll() is None
        sentinel.send_signal(signum)
    assert all(alive(pid) for pid in family.pids)
    sentinel.stdin.close()
    assert sentinel.wait(20) == 0
    assert not any(alive(pid) for pid in family.pids)


def _ignores(pid: int, signum: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signum - 1) & 1)
