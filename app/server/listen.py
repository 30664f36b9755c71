"""Exclusive resources of a gateway: its ports and its run directory."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from app.settings import ConfigError
from engines.guard import directories

BACKLOG = 2048
LOCK = "gateway.lock"


def listen(
    host: str, port: int, example: str = "GATEWAY_SERVER__PORT=8001", *, run_dir: Path | None = None
) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address is not available.

    `example` is a variable that sets another port; a gateway that still runs in `run_dir` is named.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Bound is not enough: two sockets may be bound with SO_REUSEADDR until one listens.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        instead = f"choose another: {example}"
        if error.errno == errno.EADDRINUSE and run_dir is not None and _is_locked(run_dir):
            instead = (
                f"a gateway runs in {run_dir}, or drains its requests for up to "
                "server.drain_timeout_s: start this one when it has ended"
            )
        raise ConfigError([f"cannot listen on {host}:{port}: {reason}; {instead}"]) from None
    return sock


def _is_locked(run_dir: Path) -> bool:
    """Return whether a gateway has locked a run directory."""
    try:
        file = os.open(run_dir / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Lock a run directory for this process.

    Raises ConfigError if another gateway has locked it, or another user controls it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        directories.make_private(run_dir)
        file = os.open(run_dir / LOCK, flags, 0o600)
    except directories.ForeignDirectory as error:
        raise ConfigError([f"server.run_dir: {error}; choose another directory"]) from None
    except OSError as error:
        raise ConfigError([f"server.run_dir {run_dir}: {error.strerror}"]) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(
            [f"server.run_dir {run_dir} is in use by another gateway; give each its own"]
        ) from None
    try:
        yield
    finally:
        os.close(file)
