"""Finding and killing what carries a mark, on real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.guard import sweep
from engines.guard.process_tree import MARK
from engines.guard.sweep import marked

# A parent, and a child in a session of its own; both wait for ever. The child says that it is
# there before its pid is told: until its exec is over it has no environment.
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
    """Two processes that carry a mark."""

    def __init__(self, mark: str) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-S", "-c", FAMILY],
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: mark},
        )
        assert self.parent.stdout is not None
        self.pids = [int(word) for word in self.parent.stdout.readline().split()]

    def end(self) -> None:
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
    one = Family(str(tmp_path))
    yield one
    one.end()


def test_marked_finds_children_whatever_session_they_moved_to(
    family: Family, tmp_path: Path
) -> None:
    assert sorted(marked(str(tmp_path))) == sorted(family.pids)


def test_mark_is_compared_whole(family: Family, tmp_path: Path) -> None:
    assert marked(str(tmp_path)[:-1]) == []
    assert marked(f"{tmp_path}/") == []
    assert all(alive(pid) for pid in family.pids)


def test_sweep_leaves_nothing_with_the_mark_and_everything_else(
    family: Family, tmp_path: Path
) -> None:
    other = Family(f"{tmp_path}-other")
    try:
        assert sweep.sweep(str(tmp_path)) == []
        assert marked(str(tmp_path)) == []
        assert not any(alive(pid) for pid in family.pids)
        assert all(alive(pid) for pid in other.pids)
    finally:
        other.end()


def test_stopped_process_is_swept_too(family: Family, tmp_path: Path) -> None:
    for pid in family.pids:
        os.kill(pid, signal.SIGSTOP)
    assert sweep.sweep(str(tmp_path)) == []


def test_process_that_does_not_vanish_in_time_is_told(family: Family, tmp_path: Path) -> None:
    assert sorted(sweep.sweep(str(tmp_path), within_s=0.0)) == sorted(family.pids)


def test_nothing_marked_is_nothing_to_do(tmp_path: Path) -> None:
    assert sweep.sweep(str(tmp_path)) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, None])
def test_sentinel_sweeps_at_the_end_of_its_pipe_and_no_sooner(
    family: Family, tmp_path: Path, signum: signal.Signals | None
) -> None:
    sentinel = subprocess.Popen(
        [sys.executable, "-I", "-S", sweep.__file__, str(tmp_path)], stdin=subprocess.PIPE, env={}
    )
    assert sentinel.stdin is not None
    if signum is not None:
        # It is deaf to both from its first lines on; they come before it can be asked anything.
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
