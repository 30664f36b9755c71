"""Notifications to the service manager, on a real socket."""

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

from app.server.notify import ServiceManager
from tests.e2e.deployment import ROOT, environment, write_config
from tests.forked import ForkedCommand
from tests.gateway import free_port, remote


@contextmanager
def manager_socket(address: str) -> Iterator[socket.socket]:
    """The socket of a service manager that waits at most two minutes for a message."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sock:
        sock.bind(address)
        sock.settimeout(120)
        yield sock


def heard(sock: socket.socket) -> dict[str, str]:
    """The next message's assignments."""
    text = sock.recv(65536).decode()
    return dict(line.split("=", 1) for line in text.split("\n"))


def test_without_a_service_manager_there_is_none() -> None:
    assert ServiceManager.take_from({}) is None
    assert ServiceManager.take_from({"WATCHDOG_USEC": "1000000"}) is None


def test_variables_are_removed_from_the_environment_of_engines() -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "", "A": "b"}
    assert ServiceManager.take_from(environ) == ServiceManager(b"/x", 2.0)
    assert environ == {"A": "b"}


@pytest.mark.parametrize(
    ("usec", "pid", "watchdog_s"),
    [
        ("30000000", "its own", 30.0),
        ("30000000", "", 30.0),
        ("30000000", "1", None),  # another process is watched
        ("0", "", None),
        ("soon", "", None),
        ("-1", "", None),
    ],
)
def test_watchdog_applies_to_the_process_that_is_named(
    usec: str, pid: str, watchdog_s: float | None
) -> None:
    watched = str(os.getpid()) if pid == "its own" else pid
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": usec, "WATCHDOG_PID": watched}
    manager = ServiceManager.take_from(environ)
    assert manager is not None
    assert manager.watchdog_s == watchdog_s


def test_a_socket_of_another_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert ServiceManager.take_from({"NOTIFY_SOCKET": "vsock:2:1234"}) is None
    assert [record.getMessage() for record in caplog.records] == [
        "NOTIFY_SOCKET=vsock:2:1234 is neither a path nor an abstract socket"
    ]


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_messages_are_those_of_sd_notify(kind: str, tmp_path: Path) -> None:
    name = str(tmp_path / "notify") if kind == "path" else f"@gateway-{secrets.token_hex(8)}"
    manager = ServiceManager.take_from({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"})
    assert manager is not None
    with manager_socket(name.replace("@", "\0", 1)) as sock:
        assert manager.ready("2 of 2\nengines")
        assert heard(sock) == {"READY": "1", "STATUS": "2 of 2 engines"}
        manager.alive("fine")
        assert heard(sock) == {"WATCHDOG": "1", "STATUS": "fine"}
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        manager.reloading()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        message = heard(sock)
        assert message["RELOADING"] == "1"
        assert before <= int(message["MONOTONIC_USEC"]) <= after
        manager.stopping("bye", 50.5)
        assert heard(sock) == {
            "STOPPING": "1",
            "EXTEND_TIMEOUT_USEC": "50500000",
            "STATUS": "bye",
        }


def test_without_a_watchdog_only_the_status_is_sent(tmp_path: Path) -> None:
    with manager_socket(str(tmp_path / "notify")) as sock:
        ServiceManager(bytes(tmp_path / "notify")).alive("fine")
        assert heard(sock) == {"STATUS": "fine"}


def test_a_service_manager_that_does_not_read_blocks_nothing(tmp_path: Path) -> None:
    gone = ServiceManager(bytes(tmp_path / "gone"))
    assert not gone.ready("fine")
    gone.alive("fine")
    with manager_socket(str(tmp_path / "full")):
        full = ServiceManager(bytes(tmp_path / "full"))
        # The kernel's queue has an end (net.unix.max_dgram_qlen).
        assert not all(full.ready("fine") for _ in range(10_000))


@pytest.mark.slow
def test_the_gateway_reports_its_state_to_the_service_manager(
    fake_url: str, tmp_path: Path
) -> None:
    """Ready though no engine is; alive; reloading and ready again; stopping."""
    dead = {"name": "demo", "engines": [remote(f"http://127.0.0.1:{free_port()}")]}
    file = write_config(tmp_path, dead, drain_timeout_s=7)
    with manager_socket(str(tmp_path / "notify")) as sock:
        process = ForkedCommand(
            *("serve", "--config", str(file)),
            env=environment(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="400000"),
            cwd=ROOT,
            output=Path(os.devnull),
        )
        try:
            idle = "0 of 1 engines ready, 0 requests in flight"
            assert heard(sock) == {"READY": "1", "STATUS": idle}
            for _ in range(2):
                assert heard(sock) == {"WATCHDOG": "1", "STATUS": idle}

            settings = yaml.safe_load(file.read_text())
            settings["models"].append({"name": "other", "engines": [remote(fake_url)]})
            file.write_text(yaml.safe_dump(settings))
            process.send_signal(signal.SIGHUP)
            messages = iter(lambda: heard(sock), {})
            reloading = next(m for m in messages if "WATCHDOG" not in m)
            assert reloading["RELOADING"] == "1"
            ready = next(m for m in messages if "WATCHDOG" not in m)
            assert ready["READY"] == "1"
            assert ready["STATUS"] == "1 of 2 engines ready, 0 requests in flight"

            process.send_signal(signal.SIGTERM)
            stopping = next(m for m in messages if "WATCHDOG" not in m)
            assert stopping["STOPPING"] == "1"
            assert float(stopping["EXTEND_TIMEOUT_USEC"]) > 7e6
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
