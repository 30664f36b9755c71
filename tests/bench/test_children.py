import os
import sys
from pathlib import Path

import psutil
import pytest

from bench import children, proc
from bench.children import StartError, child, environment, wait_until

SLEEP = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORK", tmp_path)
    monkeypatch.setattr(children, "ROOT", tmp_path)


def test_child_is_ended_however_the_block_is_left() -> None:
    pids = []

    def interrupted() -> None:
        with child("c", [sys.executable, "-c", SLEEP]) as running:
            pids.append(running.pid)
            assert not running.ended
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not psutil.pid_exists(pids[0])


@pytest.mark.slow
def test_process_group_is_ended_with_the_child(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
    )
    with child("c", [sys.executable, "-c", program]) as running:
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        grandchild = int((tmp_path / "log" / "c.log").read_text())
        assert psutil.pid_exists(grandchild)

    assert _is_gone(grandchild)


def test_child_that_exits_before_it_is_ready_is_named() -> None:
    with (
        child("peer", [sys.executable, "-c", ""]) as running,
        pytest.raises(StartError, match=r"peer ended; see log/peer\.log"),
    ):
        wait_until(lambda: False, running, 10)


def test_developer_settings_do_not_reach_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_SERVER__PORT", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    env = environment(GATEWAY_API_KEYS="k")

    assert {name for name in env if name.startswith("GATEWAY_")} == {"GATEWAY_API_KEYS"}
    assert "PYTHONDONTWRITEBYTECODE" not in env


def test_memory_and_cpu_time_of_a_process_tree() -> None:
    with child("c", [sys.executable, "-c", SLEEP]) as running:
        assert running.pid in proc.family(os.getpid())
        assert proc.rss_kib([running.pid]) > 0
        assert (proc.cpu_clock(running.pid) or 0) > 0
    assert proc.rss_kib([running.pid]) == 0
    assert proc.cpu_clock(running.pid) is None
    assert proc.peak_rss_kib([running.pid]) == 0


def test_cpu_time_includes_threads_that_have_ended(tmp_path: Path) -> None:
    # The thread's own clock goes with it, so it tells what it spent before it ends.
    program = """
import pathlib, threading, time
def burn():
    while time.thread_time_ns() < 20_000_000: pass
    spent.append(time.thread_time_ns())
spent = []
thread = threading.Thread(target=burn)
thread.start()
thread.join()
pathlib.Path("spent").write_text(str(spent[0]))
time.sleep(60)
"""
    with child("c", [sys.executable, "-c", program], cwd=tmp_path) as running:
        wait_until(lambda: bool(_text(tmp_path / "spent")), running, 10)

        assert proc.cpu_clocks([running.pid])[running.pid] >= int(_text(tmp_path / "spent")) / 1e9


def test_cpu_time_is_that_of_the_processes_alive_at_the_end() -> None:
    before = {1: 5.0, 2: 1.0}

    assert proc.cpu_spent(before, {1: 5.5, 3: 0.25}) == 0.75
    assert proc.cpu_spent({}, {}) == 0


def test_memory_peak_restarts_after_a_reset() -> None:
    pids = [os.getpid()]
    large = bytearray(64 << 20)
    proc.reset_peak_rss(pids)
    assert proc.peak_rss_kib(pids) > 64 << 10
    before = proc.peak_rss_kib(pids)

    del large
    proc.reset_peak_rss(pids)

    assert proc.peak_rss_kib(pids) < before - (48 << 10)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _is_gone(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        # It was killed; who reaps it is not ours to say.
        return process.status() == psutil.STATUS_ZOMBIE or process.wait(10) is None
    except psutil.NoSuchProcess:
        return True
