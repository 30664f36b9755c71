"""The temporary directory of one engine. Standard library only: the guardian uses it too.

vLLM keeps things in TMPDIR that it removes only when it ends in order (0.32): the ZeroMQ sockets
between its processes (VLLM_RPC_BASE_PATH, by default TMPDIR), the file by which its workers meet
(vllm_dist_*), what Python's multiprocessing and compilers put there. With a directory for each
engine, whoever knows that an engine has ended removes all of it at once.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

TMPDIR = "TMPDIR"
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
NAME = "tmp"
PREFIX = "vllm-gateway-engine-"
# struct sockaddr_un holds 108 bytes, the last one a zero (unix(7)).
LONGEST_SOCKET_PATH = 107
# A slash and a UUID, as vLLM names sockets (vllm/utils/network_utils.py); others' are shorter.
SOCKET_NAME = 37


class TooDeep(Exception):
    """There is no place for an engine's sockets; the text says what to do, in one line."""


def fresh(directory: Path) -> Path:
    """Make the temporary directory of an engine, empty; return its path.

    It is below the engine's own, `directory`, which is absolute; where that is too deep for
    sockets, a link there leads to one in the system's. Raises OSError, and TooDeep where that will
    not do either.
    """
    remove(directory)
    below = directory / NAME
    if _fits(below):
        below.mkdir(mode=0o700)
        return below
    elsewhere = Path(tempfile.mkdtemp(prefix=PREFIX))
    below.symlink_to(elsewhere)
    if not _fits(elsewhere):
        remove(directory)
        raise TooDeep(
            f"the path {elsewhere} is too long for vLLM's sockets: set server.run_dir or TMPDIR"
        )
    return elsewhere


def remove(directory: Path) -> None:
    """Remove what `fresh` made and an engine that has ended left in it, as far as it can be."""
    below = directory / NAME
    if below.is_symlink():
        if (elsewhere := below.readlink()).name.startswith(PREFIX):
            shutil.rmtree(elsewhere, ignore_errors=True)
        with contextlib.suppress(OSError):
            below.unlink()
    else:
        shutil.rmtree(below, ignore_errors=True)


def variables(directory: Path, temporary: Path) -> dict[str, str]:
    """Return the environment variables that have an engine use its temporary directory.

    Code that PyTorch has compiled would be there as well, and the next start is to find it: unless
    somebody has said where it goes, it goes beside the engines' directories.
    """
    kept = os.environ.get(INDUCTOR, str(directory.parent / "torchinductor"))
    return {TMPDIR: str(temporary), INDUCTOR: kept}


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory)) + SOCKET_NAME <= LONGEST_SOCKET_PATH
