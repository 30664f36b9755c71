"""Reading /proc, with real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engines.guard import process_tree


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    # The grandchild reports itself: until its exec is over it has no environment.
    program = "import subprocess, sys; subprocess.Popen(['sh', '-c', 'echo; read _']);"
    program += " sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={"MARK": "this one"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    for pid in process_tree.descendants(process.pid):
        os.kill(pid, 9)
    process.kill()
    process.communicate()


def test_stat_has_parent_session_and_start_time(child: subprocess.Popen[bytes]) -> None:
    stat = process_tree.read_stat(child.pid)
    assert stat is not None
    assert stat.parent == os.getpid()
    assert stat.session == child.pid
    assert process_tree.is_alive(child.pid, stat.start_time)
    assert not process_tree.is_alive(child.pid, stat.start_time + 1)


def test_descendants_include_children_of_children(child: subprocess.Popen[bytes]) -> None:
    below = process_tree.descendants(os.getpid())
    assert child.pid in below
    assert len(process_tree.descendants(child.pid)) == 1
    assert set(process_tree.descendants(child.pid)) < set(below)


def test_environment_variable_is_inherited(child: subprocess.Popen[bytes]) -> None:
    (grandchild,) = process_tree.descendants(child.pid)
    assert process_tree.has_variable(grandchild, "MARK", "this one")
    assert not process_tree.has_variable(grandchild, "MARK", "this")
    assert not process_tree.has_variable(os.getpid(), "MARK", "this one")


def test_zombie_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    stat = process_tree.read_stat(child.pid)
    assert stat is not None
    for pid in process_tree.descendants(child.pid):
        os.kill(pid, 9)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process_tree.is_alive(child.pid, stat.start_time)


def test_missing_process_has_no_stat_title_or_variables() -> None:
    assert process_tree.read_stat(2**22 + 1) is None
    assert process_tree.read_title(2**22 + 1) == ""
    assert not process_tree.has_variable(2**22 + 1, "A", "b")
