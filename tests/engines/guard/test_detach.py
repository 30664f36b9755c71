"""Commands that run detached from the process that starts them."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import engines

DETACH = Path(engines.__path__[0]) / "guard" / "detach.py"
REPORT = (
    "import json, os, sys; print(json.dumps("
    "[os.getpid(), os.getsid(0), dict(os.environ), sys.argv[1:]]), flush=True); "
    "print('to stderr', file=sys.stderr)"
)


def command(log: Path, *argv: str, parent: int | None = None) -> list[str]:
    """Return the command line that runs a command detached."""
    parent = os.getpid() if parent is None else parent
    script = [sys.executable, "-I", "-S", str(DETACH)]
    return [*script, str(parent), "MARK=a=b", str(log), '["GATEWAY_ADMIN_KEY", "MISSING"]', *argv]


def test_command_has_own_session_marker_and_log_without_dropped_variables(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    child = subprocess.Popen(
        command(log, sys.executable, "-S", "-c", REPORT, "one", "--two"),
        env={"GATEWAY_ADMIN_KEY": "secret", "OTHER": "kept"},
    )
    assert child.wait(20) == 0
    earlier, report, error = log.read_text().splitlines()
    pid, session, environment, arguments = json.loads(report)
    assert (earlier, error) == ("earlier", "to stderr")
    assert pid == session == child.pid
    assert environment["MARK"] == "a=b"
    assert environment["OTHER"] == "kept"
    assert "GATEWAY_ADMIN_KEY" not in environment
    assert arguments == ["one", "--two"]


def test_command_dies_with_the_thread_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import time; print('up', flush=True); time.sleep(600)"
    started: list[subprocess.Popen[bytes]] = []
    up = threading.Event()
    over = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(command(log, sys.executable, "-S", "-c", script)))
        up.set()
        over.wait()

    thread = threading.Thread(target=start)
    thread.start()
    up.wait()
    while not (log.exists() and "up" in log.read_text()):
        assert started[0].poll() is None
    over.set()
    thread.join()
    assert started[0].wait(20) == -signal.SIGKILL


def test_command_with_a_dead_parent_does_not_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = subprocess.Popen(command(log, sys.executable, "-S", "-c", REPORT, parent=1))
    assert child.wait(20) == 1
    assert not log.exists()
