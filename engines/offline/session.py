"""Runs a batch of prompts through vLLM's `LLM`, in child processes.

They run under a guardian (`engines/guard/guardian.py`), as served engines do: when this process
ends in any way, the kernel closes its socket to the guardian, which kills everything that vLLM has
started. vLLM's log goes to a file, and this process imports nothing slow.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engines.base import Progress
from engines.environment import PRIVATE_PREFIX
from engines.guard import process_tree, scratch
from engines.offline.job import Job
from engines.output.startup import PHASES, StartupLog

GUARDIAN = Path(__file__).parents[1] / "guard" / "guardian.py"
# An argument of the guardian: the engine ends with this process.
NOT_KEPT = "0"
LOG_POLL_S = 0.2
# Seconds in which vLLM gives its shared memory back before it is killed.
GRACE_S = 5.0
RECEIVE_BYTES = 1 << 16
# The last phases of a start: a batch has no server, though its log mentions one.
SERVER_PHASES = PHASES[-2:]


@dataclass(frozen=True, slots=True)
class Loading:
    """The progress of vLLM's start, in the phases that `vllm-gateway status` shows."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is in memory."""

    max_model_len: int


@dataclass(frozen=True, slots=True)
class Advance:
    """The progress of the batch: prompts done, tokens read and generated."""

    done: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answers to a prompt, or its error: one JSON object each."""

    place: int
    records: list[dict[str, Any]]


class OfflineError(Exception):
    """The batch failed. The text is the reason in one line; `users`: the user can mend it."""

    def __init__(self, message: str, *, users: bool) -> None:
        super().__init__(message)
        self.users = users


class Session:
    """One batch: enter, iterate over `events()`, leave. No process of vLLM is left after that.

    `on_log` is called with what vLLM writes to its log, as it is written.
    """

    def __init__(self, job: Job, on_log: Callable[[bytes], object] | None = None) -> None:
        self._job = job
        self._on_log = on_log
        self._log_read = 0  # bytes
        self._partial = b""
        self._startup = StartupLog()
        self._resources = contextlib.ExitStack()
        self._loaded = False
        self._pid: int | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as resources:
            directory = resources.enter_context(tempfile.TemporaryDirectory(prefix="vllm-gateway-"))
            self._log = Path(directory) / "engine.log"
            ours, theirs = socket.socketpair()
            self._socket = resources.enter_context(ours)
            control, stdin = socket.socketpair()
            self._control = resources.enter_context(control)
            self._reports = resources.enter_context(control.makefile("rb", buffering=0))
            with theirs, stdin:
                self._guardian = self._spawn(directory, stdin, theirs.fileno())
            resources.callback(self._end)
            self._pid = self._read_pid()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def events(self) -> Iterator[Loading | Loaded | Advance | Finished]:
        """Yield events until every prompt has its answers. Raises OfflineError."""
        # The worker may have died: then its log has the reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(self._job.to_line())
        shown: Progress | None = None
        for line in self._lines():
            progress = self._startup.progress
            if (
                progress is not None
                and progress != shown
                and progress.phase not in SERVER_PHASES
                and not self._loaded
            ):
                shown = progress
                yield Loading(progress)
            if line is None:
                continue
            message = json.loads(line)
            match message.pop("event"):
                case "loaded":
                    self._loaded = True
                    yield Loaded(**message)
                case "progress":
                    yield Advance(**message)
                case "record":
                    yield Finished(**message)
                case "fault":
                    raise OfflineError(message["message"], users=True)
                case "done":
                    return
        raise OfflineError(self._explain_end(), users=not self._loaded)

    def _spawn(self, directory: str, stdin: socket.socket, fd: int) -> "subprocess.Popen[bytes]":
        worker = (sys.executable, "-P", "-m", "engines.offline.worker", str(fd))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE_PREFIX)}
        # The guardian removes vLLM's files there, also when this process is killed. Code that is
        # compiled by PyTorch is kept for the next batch.
        try:
            environment[scratch.TMPDIR] = str(scratch.create(Path(directory)))
        except scratch.SocketPathTooLong as error:
            raise OfflineError(str(error), users=True) from None
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        environment.setdefault(scratch.INDUCTOR_CACHE, str(compiled))
        environment[process_tree.MARKER_VARIABLE] = directory
        return subprocess.Popen(  # noqa: S603 - our own interpreter and files
            [sys.executable, "-I", "-S", str(GUARDIAN), directory, NOT_KEPT, "", *worker],
            stdin=stdin.fileno(),
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=(fd,),
            start_new_session=True,  # Ctrl-C is handled by this process
        )

    def _read_pid(self) -> int:
        """Return the worker's process id. Raises OfflineError when it could not be started."""
        first = json.loads(self._reports.readline() or b"{}")
        if "pid" not in first:
            why = str(first.get("error", "the guardian of vLLM did not start"))
            raise OfflineError(why, users=False)
        return int(first["pid"])

    def _lines(self) -> Iterator[bytes | None]:
        """Yield the worker's lines until it has ended, and None when only the log was read."""
        guardian = self._control
        sources = [self._socket, guardian]
        partial = b""
        ended = False
        while True:
            ready, _, _ = select.select(sources, [], [], LOG_POLL_S)
            self._read_log()
            # The guardian reports, or exits, when no process of vLLM is left. The last lines of the
            # worker are in the socket then, whose other end a forked process may still hold.
            ended = ended or guardian in ready
            if ended:
                self._socket.setblocking(False)
            elif not ready:
                yield None
                continue
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except (BlockingIOError, ConnectionResetError):
                return
            if not data:
                return
            *whole, partial = (partial + data).split(b"\n")
            yield from whole

    def _read_log(self) -> None:
        """Pass on new bytes of the log, and parse its complete lines."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._log_read:
                self._log_read = 0  # the guardian has begun a new file
            file.seek(self._log_read)
            if new := file.read():
                self._log_read += len(new)
                if self._on_log is not None:
                    self._on_log(new)
                *whole, partial = (self._partial + new).split(b"\n")
                self._partial = partial[-RECEIVE_BYTES:]
                for line in whole:
                    self._startup.feed(line.decode("utf-8", "replace"))

    def _explain_end(self) -> str:
        """Return the reason why the worker ended before its work was done."""
        self._read_log()
        if failure := self._startup.failure:
            return str(failure)
        last = json.loads(self._reports.readline() or b"{}")
        how = "ended without a message"
        if last.get("exit") == -signal.SIGKILL:
            how = "was killed, possibly because the machine ran out of memory"
        return f"vLLM {how}" + ("" if self._loaded else ", while it loaded the model")

    def _end(self) -> None:
        """Stop vLLM; return when none of its processes is left."""
        guardian = self._guardian
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(b"stop %f\n" % GRACE_S)
        try:
            guardian.wait(GRACE_S + process_tree.GUARDIAN_SLACK_S)
        except subprocess.TimeoutExpired:
            guardian.kill()
            guardian.wait()
        if guardian.returncode < 0 and self._pid is not None:
            # It was killed, and the worker with it; the worker's children are ended here.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
