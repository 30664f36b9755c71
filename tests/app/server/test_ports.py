"""Which socket serves which port, and what happens to those that serve none."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.server.passed_sockets import PassedSocket
from app.server.ports import Address, Ports, open_ports
from app.settings import ConfigError, Settings
from tests.gateway import free_port, remote, settings_for

UNIT = "vllm-gateway.socket"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("bound", "hosts", "port", "serves"),
    [
        (Address("127.0.0.1", 8000), {"127.0.0.1"}, 8000, True),
        (Address("127.0.0.1", 8000), {"127.0.0.1"}, 0, True),
        (Address("127.0.0.1", 8000), {"127.0.0.1"}, 8001, False),
        (Address("127.0.0.1", 8000), {"127.0.0.1", "::1"}, 8000, True),  # localhost
        (Address("0.0.0.0", 8000), {"127.0.0.1"}, 8000, False),  # more than is configured
        (Address("::", 8000, both=True), {"0.0.0.0"}, 8000, True),
        (Address("::", 8000), {"0.0.0.0"}, 8000, False),
        (Address("::", 8000, both=True), {"127.0.0.1"}, 8000, False),
        (Address("127.0.0.1", 8000), set(), 8000, False),  # a host without an address
    ],
)
def test_a_socket_serves_the_address_that_it_is_bound_to(
    bound: Address, hosts: set[str], port: int, *, serves: bool
) -> None:
    assert bound.serves(hosts, port) is serves


def settings(tmp_path: Path, port: int, metrics: int | None = None, **server: Any) -> Settings:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    fields = {"port": port, **server}
    return settings_for(model, run_dir=tmp_path, server=fields, metrics={"port": metrics})


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def number(sock: socket.socket | None) -> int | None:
    return None if sock is None else Address.of(sock).port


def passed(tmp_path: Path, stack: ExitStack, *sockets: socket.socket, **ports: Any) -> Ports:
    given = [PassedSocket(UNIT, sock) for sock in sockets]
    return open_ports(settings(tmp_path, **ports), given, None, stack)


def test_without_sockets_the_ports_are_bound(tmp_path: Path, stack: ExitStack) -> None:
    ports = passed(tmp_path, stack, port=0)
    assert number(ports.main)
    assert (ports.metrics, ports.held, ports.inherited) == (None, False, False)


def test_passed_sockets_are_told_apart_by_their_address(tmp_path: Path, stack: ExitStack) -> None:
    metrics, main = listening(), listening()
    one, two = number(main), number(metrics)
    ports = passed(tmp_path, stack, metrics, main, port=one, metrics=two)
    assert (ports.main, ports.metrics, ports.held) == (main, metrics, True)


def test_a_port_that_is_not_passed_is_bound(tmp_path: Path, stack: ExitStack) -> None:
    main = listening()
    ports = passed(tmp_path, stack, main, port=number(main), metrics=0)
    assert ports.main is main
    assert number(ports.metrics)


def test_a_passed_socket_of_another_address_is_a_configuration_error(
    tmp_path: Path, stack: ExitStack
) -> None:
    main, port = listening(), free_port()
    with pytest.raises(ConfigError) as raised:
        passed(tmp_path, stack, main, port=port)
    assert raised.value.faults == [
        f"{UNIT} passes a socket on 127.0.0.1:{Address.of(main).port}, but server.host and "
        f"server.port say 127.0.0.1:{port}: change the unit or the setting"
    ]


def test_two_passed_sockets_for_one_port_are_a_configuration_error(
    tmp_path: Path, stack: ExitStack
) -> None:
    with pytest.raises(ConfigError, match="change the unit or the setting"):
        passed(tmp_path, stack, listening(), listening(), port=0)


def test_an_ipv6_wildcard_serves_all_ipv4_addresses(tmp_path: Path, stack: ExitStack) -> None:
    both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    ports = passed(tmp_path, stack, both, port=Address.of(both).port, host="0.0.0.0")
    assert ports.main is both
