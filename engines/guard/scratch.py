"""The temporary directory of one engine. Standard library only: the guardian uses it too.

vLLM keeps files in TMPDIR that it removes only on an orderly exit (0.32): the ZeroMQ sockets
between its processes (VLLM_RPC_BASE_PATH, by default TMPDIR), the rendezvous file of its workers
(vllm_dist_*), and files of Python's multiprocessing and of compilers. Since each engine has a
directory of its own, all of them are removed at once when the engine has ended.
"""

import contextlib
import os
import shutil
from pathlib import Path

TMPDIR = "TMPDIR"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
NAME = "tmp"
PREFIX = "vllm-gateway-engine-"
# struct sockaddr_un holds 108 bytes, the last one a zero (unix(7)).
MAX_SOCKET_PATH = 107
# A slash and a UUID, as vLLM names sockets (vllm/utils/network_utils.py); others are shorter.
SOCKET_NAME = 37


class SocketPathTooLong(Exception):
    """No directory has a path short enough for sockets; the text says what to do, in one line."""


def create(directory: Path) -> Path:
    """Create the empty temporary directory of an engine; return its path.

    It is inside the engine's own `directory`, an absolute path. Where that path is too long for
    sockets, it is a link to one in the system's temporary directory. Raises OSError, and
    SocketPathTooLong where that is too long as well.
    """
    remove(directory)
    inside = directory / NAME
    if _fits(inside):
        inside.mkdir(mode=0o700)
        return inside
    import tempfile  # the guardian only removes

    outside = Path(tempfile.mkdtemp(prefix=PREFIX))
    inside.symlink_to(outside)
    if not _fits(outside):
        remove(directory)
        raise SocketPathTooLong(
            f"the path {outside} is too long for vLLM's sockets: set server.run_dir or TMPDIR"
        )
    return outside


def remove(directory: Path) -> None:
    """Remove an engine's temporary directory with its contents, as far as possible."""
    inside = directory / NAME
    if inside.is_symlink():
        if (outside := inside.readlink()).name.startswith(PREFIX):
            shutil.rmtree(outside, ignore_errors=True)
        with contextlib.suppress(OSError):
            inside.unlink()
    else:
        shutil.rmtree(inside, ignore_errors=True)


def variables(directory: Path, temporary: Path) -> dict[str, str]:
    """Return the environment variables that point an engine to its temporary directory.

    Code compiled by PyTorch would go there too, and the next start should reuse it: unless the
    variable is set already, it goes next to the engines' directories.
    """
    cache = os.environ.get(INDUCTOR_CACHE, str(directory.parent / "torchinductor"))
    return {TMPDIR: str(temporary), INDUCTOR_CACHE: cache}


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory)) + SOCKET_NAME <= MAX_SOCKET_PATH
