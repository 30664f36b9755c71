"""A gateway's end of a guardian: starting one, finding one that runs, and hearing of its end."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.guard import directories, process_tree, scratch

log = logging.getLogger(__name__)

GUARDIAN = Path(__file__).with_name("guardian.py")
RECORD = "engine.json"
# How long a guardian that lives may take to say who it is, and a killed process to vanish.
HELLO_S = 5.0
VANISH_S = 10.0
POLL_S = 0.02
# How long resource trackers may take to clean up, a tenth of a second as a rule.
TRACKERS_S = 3.0


class CannotRun(Exception):
    """The engine could not even be started; the text says why, in one line."""


def fingerprint(
    command: Sequence[str], env: Mapping[str, str], inherited: Sequence[str] = ()
) -> str:
    """Return what two starts have in common when they run the same thing.

    `inherited` has the names that the configuration adds to what every engine inherits.
    """
    written = json.dumps([list(command), sorted(env.items()), sorted(inherited)])
    return hashlib.sha256(written.encode()).hexdigest()


class Link:
    """One guardian, and the engine below it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        directory: Path,
        guardian: int,
        hello: Mapping[str, object],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._directory = directory
        self.guardian = guardian
        self._guardian_started = _started(guardian)
        self.engine = int(str(hello["pid"]))
        self.fingerprint = str(hello["fingerprint"])
        # Who was below the guardian when somebody last looked: pid → start time.
        self._family: dict[int, int] = {self.engine: _started(self.engine)}

    @property
    def frozen(self) -> bool:
        """Whether a signal has stopped the guardian, which obeys nobody then."""
        guardian = process_tree.stat(self.guardian)
        return guardian is not None and guardian.state == "T"

    @property
    def pids(self) -> set[int]:
        """Every process of the engine that was ever seen."""
        return set(self._family)

    def members(self) -> dict[int, process_tree.Stat]:
        """Return those processes that are known and live, the guardian included.

        It reads a file for each of them, where `family` reads one for every process of the machine:
        10 µs each, 20 ms where two thousand run.
        """
        known = {self.guardian: self._guardian_started, **self._family}
        found = ((pid, process_tree.stat(pid)) for pid in known)
        return {
            pid: one
            for pid, one in found
            if one is not None and one.started == known[pid] and one.state != "Z"
        }

    async def family(self) -> dict[int, process_tree.Stat]:
        """Look for the processes of the engine, and return what `members` does from then on."""
        self._note(await asyncio.to_thread(process_tree.descendants, self.guardian))
        return self.members()

    def _note(self, found: Mapping[int, process_tree.Stat]) -> None:
        self._family |= {pid: one.started for pid, one in found.items()}

    def stop(self, grace: float) -> None:
        """Have the engine ended, by force after `grace` seconds."""
        self._order(b"stop %f\n" % grace)

    def keep(self, keep: bool) -> None:
        """Say whether the engine goes on when no gateway is left."""
        self._order(b"keep %d\n" % keep)

    def _order(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line)

    async def ended(self) -> int:
        """Return the engine's exit code, negative for a signal, once nothing of it is left."""
        code = -signal.SIGKILL
        whole = False
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                message = json.loads(line)
                if "exit" in message:
                    code, whole = int(message["exit"]), True
        await _gone({self.guardian: self._guardian_started})
        if not whole:
            # The guardian was killed. Its death took the API server; the rest is ours to end.
            await self._sweep()
        _bury(self.guardian)
        self.close()
        return code

    def kill(self) -> None:
        """Kill the guardian and the engine; `ended` returns when they are gone."""
        self._note(process_tree.descendants(self.guardian))
        for pid in (self.guardian, self.engine):
            _kill(pid, {self.guardian: self._guardian_started, **self._family}[pid])

    def close(self) -> None:
        """Let go, without ending anything that is to be kept."""
        self._writer.close()

    async def _sweep(self) -> None:
        trackers = set(filter(process_tree.is_tracker, self._family))
        await _end({pid: s for pid, s in self._family.items() if pid not in trackers})
        await _end_remains(self._directory, self.guardian, self._guardian_started)
        scratch.remove(self._directory)


async def spawn(
    directory: Path, command: Sequence[str], env: Mapping[str, str], *, mark: str, keep: bool
) -> Link:
    """Start a guardian with an engine below it. Raises CannotRun.

    `env` is the whole environment, `mark` the engine's fingerprint.
    """
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-I", "-S", str(GUARDIAN), str(directory), "01"[keep], mark, *command]
    log_file = directory / "engine.log"
    with contextlib.closing(theirs):
        try:
            pid = _launch(
                argv, {**env, process_tree.MARK: str(directory)}, theirs.fileno(), log_file
            )
        except CannotRun:
            ours.close()
            raise
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    hello = await _hear(reader, None)
    if "pid" in hello:
        return Link(reader, writer, directory, pid, hello)
    writer.close()
    await _gone({pid: _started(pid)})
    _bury(pid)
    raise CannotRun(str(hello.get("error", f"its guardian did not start, see {log_file}")))


def runs(directory: Path) -> bool:
    """Whether a guardian runs in a directory that no other user controls."""
    if directories.foreign(directory):
        return False
    record = _read(directory / RECORD)
    guardian, started = record.get("guardian", 0), record.get("guardian_started", 0)
    return record.get("boot") == process_tree.boot_id() and process_tree.lives(guardian, started)


async def find(directory: Path) -> Link | None:
    """Return the guardian that runs in a directory, or None once nothing is left of any.

    What a crash left behind is ended first: processes without a guardian, sockets without a
    process. Pids are believed only together with the start time of their process, and nothing that
    another user may have written is.
    """
    if directories.foreign(directory):
        return None
    record = _read(directory / RECORD)
    guardian, started = record.get("guardian", 0), record.get("guardian_started", 0)
    if runs(directory):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HELLO_S):
                reader, writer = await asyncio.open_unix_connection(str(directory / "ctl.sock"))
                with contextlib.ExitStack() as undo:
                    undo.callback(writer.close)
                    hello = await _hear(reader, HELLO_S)
                    if "pid" in hello:
                        undo.pop_all()
                        return Link(reader, writer, directory, guardian, hello)
        # It is ending, or does not answer: either way it is of no use to anybody.
        await _gone({guardian: started}, patience=HELLO_S)
        _kill(guardian, started)
    this_boot = record.get("boot") == process_tree.boot_id()
    await _end_remains(directory, guardian if this_boot else 0, started)
    for name in (RECORD, "ctl.sock", "http.sock"):
        (directory / name).unlink(missing_ok=True)
    scratch.remove(directory)
    return None


async def end_strangers(run_dir: Path, known: set[str]) -> None:
    """End the engines of a run directory whose names nobody knows any more."""
    for record in await asyncio.to_thread(lambda: sorted(run_dir.glob(f"*/{RECORD}"))):
        if record.parent.name not in known and (link := await find(record.parent)) is not None:
            log.info("engine %s is no longer configured, ending it", record.parent.name)
            link.stop(0.0)
            await link.ended()


async def _hear(reader: asyncio.StreamReader, patience: float | None) -> dict[str, object]:
    try:
        async with asyncio.timeout(patience):
            line = await reader.readline()
        message: object = json.loads(line) if line else {}
    except (OSError, ValueError, TimeoutError):
        return {}
    return message if isinstance(message, dict) else {}


def _read(file: Path) -> dict[str, Any]:
    """Return a record, {} for one that is not there or was not written by a guardian."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    numbers = ("guardian", "guardian_started", "engine", "engine_started")
    whole = isinstance(data, dict) and all(isinstance(data.get(n), int) for n in numbers)
    return data if whole else {}


def _remains(directory: Path, guardian: int, started: int) -> dict[int, int]:
    """Return what lives of an engine whose guardian does not: pid → start time.

    It has the mark of the engine's directory; or it is in the session that the guardian led and has
    a title of vLLM's, under which the mark is lost. Both, since a pid may be another's by now.
    """
    everybody = process_tree.all_stats()
    leader = everybody.get(guardian)
    ours = guardian != 0 and (leader is None or leader.started == started)
    return {
        pid: one.started
        for pid, one in everybody.items()
        if pid != os.getpid()
        and (
            process_tree.carries(pid, process_tree.MARK, str(directory))
            or (ours and one.session == guardian and process_tree.title(pid).startswith("VLLM::"))
        )
    }


async def _end_remains(directory: Path, guardian: int, started: int) -> None:
    """Kill what lives of an engine without a guardian, again until nothing does.

    One look is not enough: a process may be forking while its parent is killed. Resource trackers
    end by themselves, when they have cleaned up after the others.
    """
    began = asyncio.get_running_loop().time()
    # In a thread: it reads about every process of the machine.
    while left := await asyncio.to_thread(_remains, directory, guardian, started):
        passed = asyncio.get_running_loop().time() - began
        if passed >= VANISH_S:
            log.error("%s: processes %s do not end", directory.name, sorted(left))
            return
        patient = passed < TRACKERS_S
        await _end({p: s for p, s in left.items() if not (patient and process_tree.is_tracker(p))})
        await asyncio.sleep(POLL_S)


async def _end(them: Mapping[int, int]) -> None:
    for pid, started in them.items():
        _kill(pid, started)
    await _gone(them)


def _bury(pid: int) -> None:
    """Take the exit status of a child; one that another gateway began has another parent."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _launch(argv: list[str], env: Mapping[str, str], stdin: int, stderr: Path) -> int:
    """Start a process in a session of its own; return its pid. Raises CannotRun."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.posix_spawn(
            argv[0],
            argv,
            env,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, stdin, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(stderr), append, 0o600),
            ],
            setsid=True,
        )
    except OSError as error:
        raise CannotRun(f"cannot run {argv[0]}: {error.strerror}") from None


def _started(pid: int) -> int:
    one = process_tree.stat(pid)
    return one.started if one else 0


def _kill(pid: int, started: int) -> None:
    if pid and process_tree.lives(pid, started):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


async def _gone(them: Mapping[int, int], *, patience: float = VANISH_S) -> None:
    """Return when none of these processes lives, or after `patience` seconds."""
    deadline = asyncio.get_running_loop().time() + patience
    while any(process_tree.lives(pid, started) for pid, started in them.items()):
        if asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(POLL_S)
