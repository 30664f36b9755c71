import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import children
from bench.children import child
from bench.peers import Peer, Target
from bench.seats import Seat, direct


@contextlib.contextmanager
def sleeper(engine: str, directory: Path) -> Iterator[Target]:
    with child("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"]) as running:
        yield Target("sleeper", engine, running.pid)


def test_dead_target_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORK", tmp_path)
    with Seat(Peer("sleeper", "1", sleeper), "http://engine", tmp_path) as seat:
        assert not seat.alive  # not started before it is asked for
        first = seat.target()
        assert seat.target() is first

        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert not seat.alive

        second = seat.target()
        assert second.pid != first.pid
        assert seat.alive

    assert second.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)


def test_direct_engine_has_no_proxy_process(tmp_path: Path) -> None:
    with Seat(direct(), "http://engine", tmp_path) as seat:
        assert seat.target() == Target("direct", "http://engine", None)
        assert seat.alive
