"""Checks engines' flags with vLLM's own argument parser, and caches its results in a file.

The parser runs in its own process (dump.py), which takes seconds. The table of flags and every
accepted command line are cached until vLLM changes, so that only new command lines are parsed. A
rejection is not cached: a file that a flag names may exist the next time.
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

from engines import environment, interpreter
from engines.flags import table as flags
from engines.flags.table import FlagFault, FlagTable
from engines.guard.directories import WRITABLE_BY_OTHERS, ownership_fault
from engines.interpreter import Installation
from engines.output import redact_line
from engines.spec import ManagedSpec

NAME = "vllm-flags.json"
SCRIPT = Path(__file__).with_name("dump.py")
# Ten seconds where files are cached; from a cold disk, on a busy machine, a minute was seen.
TIMEOUT_S = 120.0
# How often the wait for the parser checks whether it was called off.
POLL_S = 0.2
# The newest accepted command lines are cached.
MAX_CACHED = 256
# Without O_NONBLOCK the open would block for ever on a FIFO in the place of the file.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The gateway writes no larger file; a larger one is not read.
MAX_BYTES = 4 * 1024 * 1024
# As -P, which Python 3.10 does not know: the script's directory is not for vLLM.
_SETTINGS = {
    "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
# The files of vLLM that define its flags.
_SOURCES = (
    "_version.py", "engine/arg_utils.py", "utils/argparse_utils.py", "tool_parsers/__init__.py",
    "reasoning/__init__.py", "entrypoints/common/cli_args.py", "entrypoints/launchers/cli_args.py",
    "entrypoints/openai/cli_args.py",
)  # fmt: skip


class ParserUnavailable(Exception):
    """vLLM's parser gave no result; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class FlagReport:
    """The faults in each engine's flags, in the order of the engines, and the table of flags."""

    table: FlagTable
    faults: tuple[tuple[FlagFault, ...], ...]


@dataclass(frozen=True, slots=True)
class _Cache:
    """The content of the file: vLLM's identity, the table as printed, accepted command lines."""

    vllm: str
    table: Mapping[str, Any]
    accepted: tuple[str, ...] = ()


def check_flags(
    specs: Sequence[ManagedSpec],
    directory: Path,
    ended: threading.Event | None = None,
    other: Installation | None = None,
) -> FlagReport:
    """Return the faults in the flags of engines. Blocks. Raises ParserUnavailable.

    Their vLLM is this environment's, or that of `other`. Results are cached in `directory` if that
    belongs to this user or can be created. Setting `ended` ends the wait for vLLM.
    """
    file, vllm = directory / _file_name(other), _identity(other)
    lines = [[f"--model={spec.model}", *spec.added_flags(()), *spec.argv()] for spec in specs]
    accepted: tuple[str, ...] = ()
    if (cache := _read(file, vllm)) is not None:
        table, accepted = FlagTable.parse(cache.table), cache.accepted
        found = [tuple(flags.find_faults(table, spec.args)) for spec in specs]
        known = set(accepted)
        if all(
            faults or flags.digest_command(table, line) in known
            for faults, line in zip(found, lines, strict=True)
        ):
            return FlagReport(table, tuple(found))
    printed, refused = run_parser(lines, ended, None if other is None else other.python)
    table = FlagTable.parse(printed)
    found = [
        tuple(flags.find_faults(table, spec.args))
        or ((flags.parse_rejection(text, spec.args),) if text is not None else ())
        for spec, text in zip(specs, refused, strict=True)
    ]
    new = (
        flags.digest_command(table, line)
        for line, text in zip(lines, refused, strict=True)
        if not text
    )
    newest = tuple(dict.fromkeys((*new, *accepted)))[:MAX_CACHED]
    with contextlib.suppress(OSError):  # the next check parses again
        _write(file, _Cache(vllm, printed, newest))
    return FlagReport(table, tuple(found))


def _file_name(other: Installation | None) -> str:
    """Return the name of the cache: one for each interpreter."""
    if other is None:
        return NAME
    return f"vllm-flags-{hashlib.sha256(os.fsencode(other.python)).hexdigest()[:12]}.json"


def _identity(other: Installation | None) -> str:
    """Return a digest that changes with vLLM, without importing it. Raises ParserUnavailable."""
    if other is not None:
        of_python, directory, version = other.python_version, other.directory, other.version
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ParserUnavailable("vLLM is not installed here")
        of_python, directory, version = sys.version, Path(spec.origin).parent, ""
    plugins = os.environ.get("VLLM_PLUGINS", "")
    parts = [of_python, str(directory), version, plugins, SCRIPT.read_text()]
    for name in _SOURCES:
        with contextlib.suppress(OSError):
            found = (directory / name).stat()
            parts.append(f"{name} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def run_parser(
    lines: Sequence[Sequence[str]],
    ended: threading.Event | None = None,
    python: Path | None = None,
) -> tuple[Mapping[str, Any], list[str | None]]:
    """Return the table and each command line's rejection, or None. Raises ParserUnavailable."""
    try:
        done = _run(json.dumps(lines).encode(), ended or threading.Event(), python)
    except subprocess.TimeoutExpired:
        raise ParserUnavailable(f"vLLM's parser did not respond in {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise ParserUnavailable(str(error)) from None
    try:
        answer = json.loads(done.stdout)
        FlagTable.parse(answer["table"])
        return answer["table"], [None if one is None else str(one) for one in answer["refused"]]
    except (ValueError, LookupError, TypeError, AttributeError):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        said = redact_line(last[0])[:300] if last else f"exit code {done.returncode}"
        raise ParserUnavailable(f"vLLM's parser did not answer: {said}") from None


def _run(
    question: bytes, ended: threading.Event, python: Path | None
) -> subprocess.CompletedProcess[bytes]:
    """Run the script to its end. Raises OSError, ParserUnavailable, subprocess.TimeoutExpired.

    Its process has ended in every case.
    """
    command = [str(python or sys.executable), str(SCRIPT)]
    variables = environment.inherited(os.environ)
    if python is not None:
        variables = interpreter.variables(variables, python)
    deadline = monotonic() + TIMEOUT_S
    # In memory, since it may contain a token; in a file, since `communicate` drops the rest of its
    # input when it times out.
    with open(os.memfd_create("question"), "wb+") as stdin:
        stdin.write(question)
        stdin.seek(0)
        child = subprocess.Popen(  # noqa: S603 - a script of ours
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**variables, **_SETTINGS},
        )
    with child:
        try:
            while True:
                try:
                    answer, said = child.communicate(timeout=POLL_S)
                except subprocess.TimeoutExpired:
                    if ended.is_set():
                        raise ParserUnavailable("the gateway is shutting down") from None
                    if monotonic() >= deadline:
                        raise
                else:
                    return subprocess.CompletedProcess(command, child.returncode, answer, said)
        finally:
            child.kill()


def _read(file: Path, vllm: str) -> _Cache | None:
    """Return the cache for this vLLM; None if there is none, or others may have written it."""
    try:
        with os.fdopen(os.open(file, _OPEN), "rb") as opened:
            found = os.fstat(opened.fileno())
            foreign = found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS
            if foreign or not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                return None
            data = json.loads(opened.read())
        if data["vllm"] != vllm:
            return None
        FlagTable.parse(data["table"])
        return _Cache(vllm, data["table"], tuple(map(str, data["accepted"])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write(file: Path, cache: _Cache) -> None:
    """Replace the file in one step, for this user alone. Raises OSError.

    A directory is created only inside one of this user's: root, checking a configuration, must not
    create a directory that the gateway's user cannot use.
    """
    nearest = next(one for one in (file.parent, *file.parent.absolute().parents) if one.exists())
    if ownership_fault(nearest):
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {"vllm": cache.vllm, "table": cache.table, "accepted": cache.accepted}
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=NAME, delete=False) as made:
        try:  # mode 0600, as tempfile makes it
            json.dump(data, made)
            made.flush()
            Path(made.name).replace(file)
        except OSError:
            Path(made.name).unlink(missing_ok=True)
            raise
