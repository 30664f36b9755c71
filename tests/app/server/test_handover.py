"""Two gateways' ends of the hand-over, on a real Unix socket."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from app.server.handover import NAME, Predecessor, SocketOffer, find_predecessor


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A listening port of the gateway that stops."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@asynccontextmanager
async def offered(run_dir: Path, *sockets: socket.socket) -> AsyncIterator[SocketOffer]:
    """Offer sockets as a gateway does that stops; its own are closed, as after `stop_accepting`."""
    offer = SocketOffer(run_dir, sockets)

    async def hand_over() -> None:
        await offer.wait_until_asked()
        for sock in sockets:
            sock.close()
        await offer.send()

    task = asyncio.create_task(hand_over())
    try:
        yield offer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        offer.close()


async def taken(predecessor: Predecessor | None) -> list[socket.socket]:
    assert predecessor is not None
    return await asyncio.to_thread(predecessor.take_sockets)


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=20)


async def test_a_connection_waits_for_the_next_gateway(tmp_path: Path, port: socket.socket) -> None:
    address = port.getsockname()
    async with offered(tmp_path, port):
        with find_predecessor(tmp_path) as predecessor:
            [sock] = await taken(predecessor)
            with sock, connect(address) as client:
                client.sendall(b"hello")
                assert not sock.get_inheritable()
                sock.setblocking(True)
                served, _ = sock.accept()
                with served:
                    assert served.recv(5) == b"hello"


async def test_confirmation_closes_the_sockets_of_the_old_gateway(
    tmp_path: Path, port: socket.socket
) -> None:
    address = port.getsockname()
    async with offered(tmp_path, port):
        with find_predecessor(tmp_path) as predecessor:
            [sock] = await taken(predecessor)
            assert predecessor is not None
            sock.close()
            connect(address).close()  # the old gateway still has it
            await asyncio.to_thread(predecessor.dismiss)
            with pytest.raises(ConnectionRefusedError):
                connect(address)
    assert find_nothing(tmp_path)


def find_nothing(run_dir: Path) -> bool:
    with find_predecessor(run_dir) as predecessor:
        return predecessor is None


async def test_a_successor_that_fails_loses_nothing(tmp_path: Path, port: socket.socket) -> None:
    async with offered(tmp_path, port):
        with find_predecessor(tmp_path):
            pass  # before it asks
        with find_predecessor(tmp_path) as predecessor:
            for sock in await taken(predecessor):
                sock.close()  # and after
        with find_predecessor(tmp_path) as predecessor:
            [sock] = await taken(predecessor)
            with sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            assert predecessor is not None
            predecessor.confirm()
            assert not (tmp_path / NAME).exists()


async def test_offer_without_a_taker_leaves_nothing(tmp_path: Path, port: socket.socket) -> None:
    address = port.getsockname()
    async with offered(tmp_path, port) as offer:
        assert not offer.awaited
        port.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConnectionRefusedError):
        connect(address)


def test_no_gateway_that_stops_is_no_predecessor(tmp_path: Path) -> None:
    assert find_nothing(tmp_path / "missing")
    assert find_nothing(tmp_path)
    with closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(str(tmp_path / NAME))
    assert find_nothing(tmp_path)  # of a gateway that was killed


async def test_a_gateway_that_is_killed_leaves_a_file_that_is_replaced(
    tmp_path: Path, port: socket.socket
) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(str(tmp_path / NAME))
    async with offered(tmp_path, port):
        assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
        assert not find_nothing(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
async def test_another_user_gets_no_socket(port: socket.socket) -> None:
    """Though the modes of directory and file would let it connect."""
    program = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b'?')\n"
        "print(socket.recv_fds(s, 1, 8)[:2])"
    )
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        run_dir.chmod(0o711)
        async with offered(run_dir, port):
            (run_dir / NAME).chmod(0o666)
            ended = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-I", "-c", program, str(run_dir / NAME)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
    assert ended.stdout in ("", "(b'', [])\n"), ended.stdout
    assert "PermissionError" not in ended.stderr, "it has to get as far as the check"
