"""The environment of engines on a node, and the addresses that they use."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engines.ray.actor import _LogReader, node_environment, take_priority_of_raylet
from engines.ray.addresses import free_port, has_listener, interface_of


def test_engine_inherits_from_its_raylet_and_nothing_of_rays() -> None:
    raylet = {"PATH": "/bin", "RAY_AUTH_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "4,5"}
    own = {**raylet, "OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "5"}
    assert node_environment(own, raylet, with_gpus=False) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    assert node_environment(own, raylet, with_gpus=True)["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("raylet", "engine"),
    [
        ("/venv/ray/core/libjemalloc.so", None),
        ("/venv/ray/core/libjemalloc.so:/opt/tcmalloc.so", "/opt/tcmalloc.so"),
        ("/opt/one.so  /venv/ray/core/libjemalloc.so /opt/two.so", "/opt/one.so:/opt/two.so"),
        ("/opt/libjemalloc.so", "/opt/libjemalloc.so"),
        ("", None),
    ],
)
def test_engine_does_not_get_the_allocator_of_ray(raylet: str, engine: str | None) -> None:
    found = node_environment({}, {"LD_PRELOAD": raylet}, with_gpus=False)
    assert found.get("LD_PRELOAD") == engine


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lower a nice value")
def test_process_takes_the_priority_of_its_parent() -> None:
    code = (
        "import os, subprocess, threading\n"
        "from engines.ray.actor import take_priority_of_raylet\n"
        "os.nice(15)\n"
        "thread = threading.Thread(target=threading.Event().wait, daemon=True)\n"
        "thread.start()\n"
        "ours = take_priority_of_raylet()\n"
        "other = os.getpriority(os.PRIO_PROCESS, thread.native_id)\n"
        "child = subprocess.run(['nice'], capture_output=True, text=True).stdout\n"
        "print(ours, other, child)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    nice = str(os.getpriority(os.PRIO_PROCESS, 0))
    assert run.stdout.split() == [nice] * 3


def test_priority_that_cannot_be_changed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert take_priority_of_raylet() == os.getpriority(os.PRIO_PROCESS, 0)


def test_interface_has_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None


def test_free_port_can_be_listened_on() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port("127.0.0.1")))
        one.listen()


def test_only_a_listener_of_this_user_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        assert not has_listener(port)
        one.listen()
        assert has_listener(port)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not has_listener(port)


class TestLogReader:
    def test_reads_on_from_the_place_of_the_previous_call(self, tmp_path: Path) -> None:
        file = tmp_path / "engine.log"
        first = _LogReader(file, None)
        assert first.read() == ""
        file.write_text("one\n")
        assert first.read() == "one\n"
        file.write_text("one\ntwo\n")
        assert _LogReader(file, first.place).read() == "two\n"

    def test_new_file_is_read_from_its_beginning(self, tmp_path: Path) -> None:
        file = tmp_path / "engine.log"
        file.write_text("a long line of the first file\n")
        reader = _LogReader(file, None)
        reader.read()
        file.rename(tmp_path / "engine.log.1")
        file.write_text("new\n")
        assert reader.read() == "new\n"

    def test_call_returns_a_bounded_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engines.ray.actor.LOG_BYTES", 4)
        file = tmp_path / "engine.log"
        file.write_text("abcdefghij")
        reader = _LogReader(file, None)
        assert [reader.read(), reader.read()] == ["ghij", ""]

    def test_character_is_not_cut_between_two_calls(self, tmp_path: Path) -> None:
        file = tmp_path / "engine.log"
        file.write_bytes("aé".encode()[:-1])
        reader = _LogReader(file, None)
        first = reader.read()
        file.write_bytes("aéb".encode())
        assert first + reader.read() == "aéb"

    def test_gateway_far_behind_goes_on_at_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engines.ray.actor.LOG_BYTES", 4)
        monkeypatch.setattr("engines.ray.actor.MAX_BEHIND", 8)
        file = tmp_path / "engine.log"
        file.touch()
        reader = _LogReader(file, None)
        reader.read()
        file.write_text("0123456789abcdef")
        assert reader.read() == "cdef"
