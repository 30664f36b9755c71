"""What vLLM's own argument parser says of engines' flags, with its answers kept in a file.

The parser is asked in a process of its own (dump.py), which takes seconds. The table of flags
and every command line that was accepted are kept for as long as vLLM stays the same, so that only
what is new is asked. A refusal is not kept: a file that a flag names may be there next time.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from engines import environment
from engines.flags import table as flags
from engines.flags.table import FlagFault, FlagTable
from engines.guard.directories import WRITABLE_BY_OTHERS, ownership_fault
from engines.output import redact_line
from engines.spec import LocalSpec

NAME = "vllm-flags.json"
SCRIPT = Path(__file__).with_name("dump.py")
# Ten seconds where files are cached; from a cold disk, on a busy machine, a minute was seen.
TIMEOUT_S = 120.0
# How often a caller that waits for the answer looks whether it is still wanted.
LOOK_S = 0.2
# Accepted command lines that are kept, the newest.
KEPT = 256
# Without O_NONBLOCK a FIFO that somebody has put there would be waited for without end.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# No file of ours is larger; another one is not read.
MAX_BYTES = 4 * 1024 * 1024
# What decides which flags there are.
_SOURCES = (
    "_version.py", "engine/arg_utils.py", "utils/argparse_utils.py", "tool_parsers/__init__.py",
    "reasoning/__init__.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py",
)  # fmt: skip


class CannotAsk(Exception):
    """vLLM's parser gave no answer; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with each engine's flags, in the order asked, and the table that says so."""

    table: FlagTable
    faults: tuple[tuple[FlagFault, ...], ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the file holds: vLLM's identity, the table as it was printed, what was accepted."""

    vllm: str
    table: Mapping[str, Any]
    accepted: tuple[str, ...] = ()


def check(
    specs: Sequence[LocalSpec], directory: Path, ended: threading.Event | None = None
) -> Verdict:
    """Return what vLLM says of the flags of engines. Blocks. Raises CannotAsk.

    Answers are kept in `directory` where that belongs to this user, or can be made. Once `ended` is
    set, vLLM is not waited for any longer.
    """
    file, vllm = directory / NAME, _identity()
    lines = [[f"--model={spec.model}", *spec.added_flags(()), *spec.argv()] for spec in specs]
    accepted: tuple[str, ...] = ()
    if (kept := _read(file, vllm)) is not None:
        table, accepted = FlagTable.of(kept.table), kept.accepted
        found = [tuple(flags.faults(table, spec.args)) for spec in specs]
        known = set(accepted)
        if all(
            faults or flags.digest(table, line) in known
            for faults, line in zip(found, lines, strict=True)
        ):
            return Verdict(table, tuple(found))
    printed, refused = ask(lines, ended)
    table = FlagTable.of(printed)
    found = [
        tuple(flags.faults(table, spec.args))
        or ((flags.fault_of_refusal(text, spec.args),) if text is not None else ())
        for spec, text in zip(specs, refused, strict=True)
    ]
    new = (flags.digest(table, line) for line, text in zip(lines, refused, strict=True) if not text)
    newest = tuple(dict.fromkeys((*new, *accepted)))[:KEPT]
    with contextlib.suppress(OSError):  # the next one asks again
        _write(file, _Kept(vllm, printed, newest))
    return Verdict(table, tuple(found))


def _identity() -> str:
    """Return a text that changes with vLLM, without importing it. Raises CannotAsk."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise CannotAsk("vLLM is not installed here")
    directory = Path(spec.origin).parent
    parts = [sys.version, str(directory), os.environ.get("VLLM_PLUGINS", ""), SCRIPT.read_text()]
    for name in _SOURCES:
        with contextlib.suppress(OSError):
            found = (directory / name).stat()
            parts.append(f"{name} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def ask(
    lines: Sequence[Sequence[str]], ended: threading.Event | None = None
) -> tuple[Mapping[str, Any], list[str | None]]:
    """Return the table and what is said against each command line. Raises CannotAsk."""
    try:
        done = _run(json.dumps(lines).encode(), ended or threading.Event())
    except subprocess.TimeoutExpired:
        raise CannotAsk(f"vLLM gave no answer in {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise CannotAsk(str(error)) from None
    try:
        answer = json.loads(done.stdout)
        FlagTable.of(answer["table"])
        return answer["table"], [None if one is None else str(one) for one in answer["refused"]]
    except (ValueError, LookupError, TypeError, AttributeError):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        said = redact_line(last[0])[:300] if last else f"exit code {done.returncode}"
        raise CannotAsk(f"vLLM's parser did not answer: {said}") from None


def _run(question: bytes, ended: threading.Event) -> subprocess.CompletedProcess[bytes]:
    """Return what the script answers. Raises OSError, CannotAsk and subprocess.TimeoutExpired.

    Nothing of it is left in any case.
    """
    command = [sys.executable, "-P", str(SCRIPT)]
    variables = environment.inherited(os.environ)
    deadline = monotonic() + TIMEOUT_S
    # In memory, since it may hold a token, and whole, since `communicate` forgets the rest of what
    # it was to send when it times out.
    with open(os.memfd_create("question"), "wb+") as asked:
        asked.write(question)
        asked.seek(0)
        child = subprocess.Popen(  # noqa: S603 - a script of ours
            command,
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**variables, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
        )
    with child:
        try:
            while True:
                try:
                    answer, said = child.communicate(timeout=LOOK_S)
                except subprocess.TimeoutExpired:
                    if ended.is_set():
                        raise CannotAsk("the gateway is shutting down") from None
                    if monotonic() >= deadline:
                        raise
                else:
                    return subprocess.CompletedProcess(command, child.returncode, answer, said)
        finally:
            child.kill()


def _read(file: Path, vllm: str) -> _Kept | None:
    """Return what is kept of this vLLM; None if that is nothing, or others may have written it."""
    try:
        with os.fdopen(os.open(file, _OPEN), "rb") as opened:
            found = os.fstat(opened.fileno())
            foreign = found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS
            if foreign or not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                return None
            data = json.loads(opened.read())
        if data["vllm"] != vllm:
            return None
        FlagTable.of(data["table"])
        return _Kept(vllm, data["table"], tuple(map(str, data["accepted"])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write(file: Path, kept: _Kept) -> None:
    """Replace the file in one step, for this user alone. Raises OSError.

    A directory is made only below one of this user's: root, who looks at a configuration, must not
    leave a directory that the gateway's own user cannot have.
    """
    nearest = next(one for one in (file.parent, *file.parent.absolute().parents) if one.exists())
    if ownership_fault(nearest):
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {"vllm": kept.vllm, "table": kept.table, "accepted": kept.accepted}
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=NAME, delete=False) as made:
        try:  # mode 0600, as tempfile makes it
            json.dump(data, made)
            made.flush()
            Path(made.name).replace(file)
        except OSError:
            Path(made.name).unlink(missing_ok=True)
            raise
