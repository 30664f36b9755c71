"""What /proc tells of real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engines.guard import process_tree


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    # The grandchild itself says that it is there: until its exec is over it has no environment.
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


def test_a_process_is_told_with_its_parent_and_session(child: subprocess.Popen[bytes]) -> None:
    one = process_tree.stat(child.pid)
    assert one is not None
    assert one.parent == os.getpid()
    assert one.session == child.pid
    assert process_tree.lives(child.pid, one.started)
    assert not process_tree.lives(child.pid, one.started + 1)


def test_descendants_are_children_of_children_too(child: subprocess.Popen[bytes]) -> None:
    below = process_tree.descendants(os.getpid())
    assert child.pid in below
    assert len(process_tree.descendants(child.pid)) == 1
    assert set(process_tree.descendants(child.pid)) < set(below)


def test_a_mark_is_inherited(child: subprocess.Popen[bytes]) -> None:
    (grandchild,) = process_tree.descendants(child.pid)
    assert process_tree.carries(grandchild, "MARK", "this one")
    assert not process_tree.carries(grandchild, "MARK", "this")
    assert not process_tree.carries(os.getpid(), "MARK", "this one")


def test_a_zombie_does_not_live(child: subprocess.Popen[bytes]) -> None:
    one = process_tree.stat(child.pid)
    assert one is not None
    for pid in process_tree.descendants(child.pid):
        os.kill(pid, 9)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process_tree.lives(child.pid, one.started)


def test_nothing_is_told_of_what_is_not_there() -> None:
    assert process_tree.stat(2**22 + 1) is None
    assert process_tree.title(2**22 + 1) == ""
    assert not process_tree.carries(2**22 + 1, "A", "b")
