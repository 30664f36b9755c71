"""Acquires the ports of a gateway: passed by systemd, from the previous gateway, or bound here.

A socket is identified by its address, not by its name: one .socket unit may have the ports of API
and metrics, and a successor may be configured for other ports than its predecessor.
"""

import contextlib
import logging
import socket
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from app.server.handover import Predecessor
from app.server.listen import listen
from app.server.passed_sockets import PassedSocket
from app.settings import ConfigError, MetricsSettings, ServerSettings, Settings

log = logging.getLogger(__name__)

METRICS_EXAMPLE = "GATEWAY_METRICS__PORT=8002"
ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listening socket; `both` for an IPv6 wildcard that serves IPv4 as well."""

    host: str
    port: int
    both: bool = False

    @classmethod
    def of(cls, sock: socket.socket) -> Self:
        """Return the address of a bound TCP socket."""
        host, port = sock.getsockname()[:2]
        both = sock.family == socket.AF_INET6 and not sock.getsockopt(
            socket.IPPROTO_IPV6, socket.IPV6_V6ONLY
        )
        return cls(host, port, both and host == ANY_IPV6)

    def serves(self, hosts: Collection[str], port: int) -> bool:
        """Return whether clients of a port at any of `hosts` reach the socket; 0 is any port."""
        reached = self.host in hosts or (self.both and ANY_IPV4 in hosts)
        return reached and port in (0, self.port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Ports:
    """The listening sockets of a gateway. `metrics` is None if the metrics are on the main port."""

    main: socket.socket
    metrics: socket.socket | None
    # systemd has the main port as well: connections wait there while no gateway runs.
    held: bool
    # Others had the main port before: connections may wait already.
    inherited: bool

    @property
    def all(self) -> tuple[socket.socket, ...]:
        return (self.main,) if self.metrics is None else (self.main, self.metrics)


def open_ports(
    settings: Settings,
    passed: Iterable[PassedSocket],
    predecessor: Predecessor | None,
    stack: ExitStack,
) -> Ports:
    """Return the configured ports, which the stack closes.

    Raises ConfigError if an address is not available, or systemd passes a socket whose address is
    not configured: nothing would accept its connections, and the gateway might be reachable from
    where it should not be.
    """
    units = {sock: name for name, sock in passed}
    inherited = predecessor.take_sockets() if predecessor is not None else []
    offered = [*units, *inherited]
    for sock in offered:
        stack.enter_context(contextlib.closing(sock))
    server, metrics = settings.server, settings.metrics
    main = _take(offered, server)
    held, taken = main in units, main is not None
    metrics_sock = _take(offered, metrics) if metrics.port is not None else None
    for sock in offered:
        if (name := units.get(sock)) is not None:
            raise ConfigError([_contradiction(name, Address.of(sock), settings)])
        log.info("closing %s of the previous gateway: no longer configured", Address.of(sock))
        sock.close()
    if offered and predecessor is not None:
        predecessor.dismiss()  # while it has those open, overlapping addresses cannot be bound
    if main is None:
        main = stack.enter_context(listen(server.host, server.port, run_dir=server.run_dir))
    if metrics.port is not None and metrics_sock is None:
        bound = listen(metrics.host, metrics.port, METRICS_EXAMPLE, run_dir=server.run_dir)
        metrics_sock = stack.enter_context(bound)
    return Ports(main, metrics_sock, held, inherited=taken)


def _take(
    offered: list[socket.socket], wanted: ServerSettings | MetricsSettings
) -> socket.socket | None:
    """Remove the socket that serves a configured address and return it, if there is one."""
    assert wanted.port is not None
    hosts = _resolve(wanted.host)
    for sock in offered:
        if Address.of(sock).serves(hosts, wanted.port):
            offered.remove(sock)
            return sock
    return None


def _resolve(host: str) -> set[str]:
    """Return the addresses of a host; none if it has no address."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host or ANY_IPV4, None, type=socket.SOCK_STREAM)
        return {str(address[0]) for *_, address in found}
    return set()


def _contradiction(name: str, passed: Address, settings: Settings) -> str:
    server, metrics = settings.server, settings.metrics
    configured = f"server.host and server.port say {Address(server.host, server.port)}"
    if metrics.port is not None:
        configured += f", those of metrics {Address(metrics.host, metrics.port)}"
    return f"{name} passes a socket on {passed}, but {configured}: change the unit or the setting"
