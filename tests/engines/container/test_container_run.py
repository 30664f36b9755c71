"""The script that runs a container, with a daemon that is none."""

import http.client
import io
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.guard import containers
from engines.guard.container_run import ContainerRun, StartError
from engines.guard.docker_api import DaemonUnavailable

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
        running = "/containers/x/kill" not in self.asked
        return {"Id": "x", "State": {"Running": running, "ExitCode": 0, "Pid": 0}}

    def open(self, *_: Any, **_options: Any) -> None:
        raise OSError


def run_until(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the daemon is asked for when SIGTERM comes during the request to a path."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("engines.guard.container_run.RETRY_S", 0.01)
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


def test_daemon_is_asked_for_nothing_while_the_container_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, daemon = ContainerRun(tmp_path, PLAN), Daemon("")
    run.api, run.path = daemon, "/containers/x"  # type: ignore[assignment]
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(
            containers, "first_process", lambda _: process.pid if process.poll() is None else None
        )
        waiting = threading.Thread(target=run.wait)
        waiting.start()
        waiting.join(0.1)
        assert daemon.asked == []
        daemon.asked.append("/containers/x/kill")
        process.kill()
        waiting.join()
    assert daemon.asked[1:] == [f"/containers/x/{last}" for last in ("json", "wait", "json")]


class Pull(io.BytesIO):
    """A daemon's answer to a pull; `ends` with the whole of it, or in the middle."""

    def __init__(self, *events: dict[str, Any], ends: bool = True) -> None:
        super().__init__(b"".join(json.dumps(event).encode() + b"\r\n" for event in events))
        self._ends = ends

    def __iter__(self) -> Iterator[bytes]:
        yield from io.BytesIO(self.getvalue())
        if not self._ends:
            raise http.client.IncompleteRead(b"")


def pull(answer: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.guard.container_run.PROGRESS_S", 0.0)
    run = ContainerRun(tmp_path, PLAN)
    run.api = SimpleNamespace(open=lambda *_, **__: answer)  # type: ignore[assignment]
    run.pull("i")


def test_layer_of_which_nothing_is_here_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Docker leaves `current` out while it is 0."""
    total = {"total": 4 * 2**20}
    first = {"status": "Downloading", "id": "a", "progressDetail": total}
    second = {**first, "id": "b", "progressDetail": {**total, "current": 2**20}}
    pull(Pull(first, second), tmp_path, monkeypatch)
    assert capsys.readouterr().out.endswith("Pulling image: 12% | 1/8 [MiB]\n")


def test_daemon_that_ends_in_a_pull_is_a_fault_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartError, match=r"^cannot pull image i: the connection to the daemon"):
        pull(Pull({"status": "Pulling"}, ends=False), tmp_path, monkeypatch)


def test_output_during_a_restart_of_the_daemon_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock, asked = ContainerRun(tmp_path, PLAN), iter(range(100, 200)), []
    monkeypatch.setattr("engines.guard.container_run.RETRY_S", 0.0)
    monkeypatch.setattr(
        "engines.guard.container_run.time", SimpleNamespace(time=lambda: next(clock))
    )

    def logs(*_: Any, query: dict[str, str], **__: Any) -> io.BytesIO:
        asked.append(query.get("since"))
        if len(asked) in (2, 3):
            raise DaemonUnavailable
        if len(asked) == 4:
            run.ended.set()
        return io.BytesIO()

    run.api = SimpleNamespace(open=logs)  # type: ignore[assignment]
    run.copy_output()
    assert asked == [None, "100", "100", "100", "101"]
