"""The script that runs a container, with a daemon that is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.guard.container_run import ContainerRun

PLAN = {"socket": "/none", "name": "demo", "image": "i", "pull": "missing", "body": {}}


class Daemon:
    """Calls `when` at the first request to a path, and runs the container until it is killed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.when: Callable[[], None] = lambda: None
        self.asked: list[str] = []

    def call(self, _method: str, path: str, **_options: Any) -> dict[str, Any]:
        self.asked.append(path)
        if path == self._path and self.asked.count(path) == 1:
            self.when()
        assert path != "/containers/x/wait" or "/containers/x/kill" in self.asked
        return {"Id": "x", "State": {"Running": False, "ExitCode": 0, "Pid": 0}}

    def open(self, *_: Any, **_options: Any) -> None:
        raise OSError


def run_until(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the daemon is asked for when SIGTERM comes during the request to a path."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run, daemon = ContainerRun(tmp_path, PLAN), Daemon(path)
    run.api, daemon.when = daemon, run.stop  # type: ignore[assignment]
    run.run()
    return daemon.asked


@pytest.mark.parametrize("request_", ["start", "json"])
def test_signal_that_comes_while_a_container_starts_is_passed_on(
    request_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/containers/x/kill" in run_until(f"/containers/x/{request_}", tmp_path, monkeypatch)


def test_signal_that_comes_before_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = run_until("/containers/create", tmp_path, monkeypatch)
    assert asked[-1] == "/containers/create"
    with pytest.raises(SystemExit):
        run_until("/images/i/json", tmp_path, monkeypatch)
