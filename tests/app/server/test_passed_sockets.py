"""Sockets that a parent passes as systemd does: the variables, and real descriptors."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.server.passed_sockets import MAX_FDS, VARIABLES, passed_fds, take_sockets
from app.settings import ConfigError

SOCKET_ACTIVATION = Path(__file__).parents[3] / "bench" / "socket_activation.py"


def variables(count: str, names: str | None = None, pid: str = "7") -> dict[str, str]:
    found = {"LISTEN_PID": pid, "LISTEN_FDS": count}
    return found if names is None else {**found, "LISTEN_FDNAMES": names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (variables("2", "api:metrics"), {3: "api", 4: "metrics"}),
        (variables("2", "api"), {3: "api", 4: "unknown"}),
        (variables("1"), {3: "unknown"}),
        (variables("1", "a:b"), {3: "a"}),
        (variables("1", pid="8"), {}),  # another process's
        ({"LISTEN_FDS": "1"}, {}),
        (variables("0"), {}),
        (variables("-1"), {}),
        (variables("one"), {}),
        (variables("²"), {}),
        (variables(str(MAX_FDS + 1)), {}),
        (variables("9" * 5000), {}),
    ],
)
def test_descriptors_and_names_are_read_as_sd_listen_fds_does(
    environ: dict[str, str], expected: dict[int, str]
) -> None:
    assert passed_fds(environ, 7) == expected


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=9)))
def test_nonsense_in_the_variables_passes_at_most_what_they_say(environ: dict[str, str]) -> None:
    found = passed_fds(environ, 7)
    assert len(found) <= MAX_FDS
    assert not found or environ["LISTEN_PID"] == "7"


def test_variables_are_removed_though_they_are_for_another_process() -> None:
    environ = {**variables("1", "api", pid="1"), "LISTEN_PIDFDID": "5", "A": "b"}
    assert take_sockets(environ) == []
    assert environ == {"A": "b"}


def taken_by_child(*sockets: socket.socket) -> list[str]:
    """Return what a child is passed: per socket its name, whether children inherit it, its port."""
    program = (
        "import os; from app.server.passed_sockets import take_sockets\n"
        "for name, s in take_sockets(os.environ):"
        " print(name, s.get_inheritable(), s.getsockname()[1])\n"
        "print(sum(name.startswith('LISTEN_') for name in os.environ))"
    )
    fds = [sock.fileno() for sock in sockets]
    numbers = ",".join(map(str, fds))
    command = [sys.executable, str(SOCKET_ACTIVATION), numbers, sys.executable, "-c", program]
    ended = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_a_child_takes_the_sockets_of_its_parent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
    ):
        ports = [one.getsockname()[1], two.getsockname()[1]]
        name = "vllm-gateway.socket"
        assert taken_by_child(one, two) == [*(f"{name} False {port}" for port in ports), "0"]


@pytest.mark.parametrize("kind", ["datagram", "unix", "connected", "file"])
def test_what_does_not_listen_on_tcp_is_a_configuration_error(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        match kind:
            case "datagram":
                fd = socket.socket(type=socket.SOCK_DGRAM).detach()
            case "unix":
                fd = socket.socket(socket.AF_UNIX).detach()
            case "connected":
                fd = socket.create_connection(server.getsockname()).detach()
            case _:
                fd = os.open(tmp_path / "file", os.O_CREAT)
    monkeypatch.setattr("app.server.passed_sockets.FIRST_FD", fd)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "api"}
    with pytest.raises(ConfigError, match="api"):
        take_sockets(environ)
    if kind == "file":  # it is not ours to close
        os.close(fd)
