"""The gateway's side of the guardian protocol: starts, finds, commands and awaits guardians."""

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

from engines.guard import containers, directories, process_tree, scratch
from engines.guard.process_tree import KILL_TIMEOUT_S, TRACKER_TIMEOUT_S

log = logging.getLogger(__name__)

GUARDIAN = Path(__file__).with_name("guardian.py")
RECORD_FILE = "engine.json"
# For a running guardian to introduce itself.
HELLO_TIMEOUT_S = 5.0
POLL_S = 0.02


class LaunchError(Exception):
    """An engine's process could not be started; the text says why, in one line."""


def compute_fingerprint(
    command: Sequence[str], env: Mapping[str, str], inherited: Sequence[str] = ()
) -> str:
    """Return a hash of what an engine runs: equal for two starts of the same configuration.

    `inherited` are the variables that the configuration adds to those that every engine inherits.
    """
    configuration = json.dumps([list(command), sorted(env.items()), sorted(inherited)])
    return hashlib.sha256(configuration.encode()).hexdigest()


class GuardianClient:
    """A connection to one guardian, and what is known of the processes below it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        directory: Path,
        guardian_pid: int,
        hello: Mapping[str, object],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._directory = directory
        self.guardian_pid = guardian_pid
        self._guardian_started = _read_start_time(guardian_pid)
        self.engine_pid = int(str(hello["pid"]))
        self.fingerprint = str(hello["fingerprint"])
        # Every process ever found below the guardian: PID → start time.
        self._found: dict[int, int] = {self.engine_pid: _read_start_time(self.engine_pid)}

    @property
    def frozen(self) -> bool:
        """True if a signal has stopped the guardian, which then executes no commands."""
        guardian = process_tree.read_stat(self.guardian_pid)
        return guardian is not None and guardian.state == "T"

    @property
    def pids(self) -> set[int]:
        """Every process of the engine found so far, ended ones included."""
        return set(self._found)

    @property
    def lost(self) -> str | None:
        """Why the engine's container is gone, where its exit code does not say it."""
        with contextlib.suppress(OSError):
            return (self._directory / containers.LOST).read_text()
        return None

    @property
    def ended_on(self) -> None:
        """Always None: it is an engine of one node."""

    def live_processes(self) -> dict[int, process_tree.ProcessStat]:
        """Return the processes found so far that still run, and the guardian.

        Reads one file for each of them, while `find_processes` reads one for every process of the
        machine: 10 µs each, 20 ms for two thousand.
        """
        known = {self.guardian_pid: self._guardian_started, **self._found}
        stats = ((pid, process_tree.read_stat(pid)) for pid in known)
        return {
            pid: stat
            for pid, stat in stats
            if stat is not None and stat.start_time == known[pid] and stat.state != "Z"
        }

    async def find_processes(self) -> dict[int, process_tree.ProcessStat]:
        """Scan for processes of the engine; return those that run, and the guardian."""
        self._add(await asyncio.to_thread(self._scan))
        return self.live_processes()

    def _scan(self) -> dict[int, process_tree.ProcessStat]:
        below = process_tree.descendants(self.guardian_pid)
        return {**below, **containers.processes(self._directory)}

    def _add(self, stats: Mapping[int, process_tree.ProcessStat]) -> None:
        self._found |= {pid: stat.start_time for pid, stat in stats.items()}

    def stop(self, grace: float) -> None:
        """Stop the engine gracefully, by force after `grace` seconds."""
        self._send(b"stop %f\n" % grace)

    def keep(self, keep: bool) -> None:
        """Set whether the engine keeps running when no gateway is connected."""
        self._send(b"keep %d\n" % keep)

    def _send(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line)

    async def wait(self) -> int:
        """Wait until no process of the engine is left; return its exit code, -N for signal N."""
        code = -signal.SIGKILL
        reported = False
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                message = json.loads(line)
                if "exit" in message:
                    code, reported = int(message["exit"]), True
        await _wait_gone({self.guardian_pid: self._guardian_started})
        if not reported:
            # The guardian was killed, and the kernel has killed the API server; kill the rest.
            await self._kill_orphans()
        _collect_exit_status(self.guardian_pid)
        self.close()
        return code

    def kill(self) -> None:
        """Kill the guardian and the engine; `wait` returns when they are gone."""
        self._add(process_tree.descendants(self.guardian_pid))
        for pid in (self.guardian_pid, self.engine_pid):
            _kill(pid, {self.guardian_pid: self._guardian_started, **self._found}[pid])

    def close(self) -> None:
        """Disconnect; an engine that is to be kept keeps running."""
        self._writer.close()

    async def _kill_orphans(self) -> None:
        trackers = set(filter(process_tree.is_resource_tracker, self._found))
        await _kill_all({pid: s for pid, s in self._found.items() if pid not in trackers})
        await _kill_orphans(self._directory, self.guardian_pid, self._guardian_started)
        await _remove_remains(self._directory)


async def start_guardian(
    directory: Path, command: Sequence[str], env: Mapping[str, str], *, fingerprint: str, keep: bool
) -> GuardianClient:
    """Start a guardian with an engine below it; `env` is the whole environment.

    Raises LaunchError.
    """
    ours, theirs = socket.socketpair()
    script = [sys.executable, "-I", "-S", str(GUARDIAN)]
    argv = [*script, str(directory), "01"[keep], fingerprint, *command]
    log_file = directory / "engine.log"
    with contextlib.closing(theirs):
        try:
            marked = {**env, process_tree.MARKER_VARIABLE: str(directory)}
            pid = _launch(argv, marked, theirs.fileno(), log_file)
        except LaunchError:
            ours.close()
            raise
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    hello = await _read_message(reader, None)
    if "pid" in hello:
        return GuardianClient(reader, writer, directory, pid, hello)
    writer.close()
    await _wait_gone({pid: _read_start_time(pid)})
    _collect_exit_status(pid)
    raise LaunchError(str(hello.get("error", f"its guardian did not start, see {log_file}")))


def is_running(directory: Path) -> bool:
    """Return whether a guardian runs in a directory that no other user controls."""
    if directories.ownership_fault(directory):
        return False
    record = _read_record(directory)
    guardian, started = record.get("guardian", 0), record.get("guardian_started", 0)
    return record.get("boot") == process_tree.boot_id() and process_tree.is_alive(guardian, started)


async def find_guardian(directory: Path) -> GuardianClient | None:
    """Connect to the guardian that runs in a directory; None if there is none.

    Before None is returned, the remains of a crash are removed: processes without a guardian,
    sockets without a process. PIDs are trusted only together with the start time of their process,
    and nothing that another user may have written is trusted.
    """
    if directories.ownership_fault(directory):
        return None
    record = _read_record(directory)
    guardian, started = record.get("guardian", 0), record.get("guardian_started", 0)
    if is_running(directory):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(directory / "ctl.sock"))
                with contextlib.ExitStack() as undo:
                    undo.callback(writer.close)
                    hello = await _read_message(reader, HELLO_TIMEOUT_S)
                    if "pid" in hello:
                        undo.pop_all()
                        return GuardianClient(reader, writer, directory, guardian, hello)
        # It is exiting, or does not respond.
        await _wait_gone({guardian: started}, timeout_s=HELLO_TIMEOUT_S)
        _kill(guardian, started)
    this_boot = record.get("boot") == process_tree.boot_id()
    await _kill_orphans(directory, guardian if this_boot else 0, started)
    for name in (RECORD_FILE, "ctl.sock", "http.sock"):
        (directory / name).unlink(missing_ok=True)
    await _remove_remains(directory)
    return None


async def stop_unconfigured(run_dir: Path, configured: set[str]) -> None:
    """Stop the running engines in a run directory whose names are not in `configured`."""
    for record in await asyncio.to_thread(lambda: sorted(run_dir.glob(f"*/{RECORD_FILE}"))):
        name = record.parent.name
        if name not in configured and (guardian := await find_guardian(record.parent)) is not None:
            log.info("stopping engine %s: it is no longer configured", name, extra={"engine": name})
            guardian.stop(0.0)
            await guardian.wait()


async def _read_message(reader: asyncio.StreamReader, timeout_s: float | None) -> dict[str, object]:
    """Return the guardian's next message, {} if none arrives in time."""
    try:
        async with asyncio.timeout(timeout_s):
            line = await reader.readline()
        message: object = json.loads(line) if line else {}
    except (OSError, ValueError, TimeoutError):
        return {}
    return message if isinstance(message, dict) else {}


def _read_record(directory: Path) -> dict[str, Any]:
    """Return the record in a directory, {} if there is none or no guardian has written it."""
    try:
        data = json.loads((directory / RECORD_FILE).read_text())
    except (OSError, ValueError):
        return {}
    numbers = ("guardian", "guardian_started", "engine", "engine_started")
    valid = isinstance(data, dict) and all(isinstance(data.get(n), int) for n in numbers)
    return data if valid else {}


def _find_orphans(directory: Path, guardian: int, started: int) -> dict[int, int]:
    """Return the processes of an engine whose guardian has ended: PID → start time.

    Either a process has the engine's marker variable, or it is in the guardian's session and has a
    title of vLLM's, which overwrites the variable. The session alone is not enough: its PID may
    have been reused.
    """
    stats = process_tree.read_all_stats()
    leader = stats.get(guardian)
    same_session = guardian != 0 and (leader is None or leader.start_time == started)

    def is_orphan(pid: int, stat: process_tree.ProcessStat) -> bool:
        if process_tree.has_variable(pid, process_tree.MARKER_VARIABLE, str(directory)):
            return True
        in_session = same_session and stat.session == guardian
        return in_session and process_tree.read_title(pid).startswith("VLLM::")

    return {
        pid: stat.start_time
        for pid, stat in stats.items()
        if pid != os.getpid() and is_orphan(pid, stat)
    }


async def _kill_orphans(directory: Path, guardian: int, started: int) -> None:
    """Kill the processes of an engine without a guardian until none is left.

    One scan is not enough: a process may be forking while its parent is killed. Resource trackers
    exit by themselves once they have cleaned up after the others.
    """
    began = asyncio.get_running_loop().time()
    # In a thread: it reads about every process of the machine.
    while left := await asyncio.to_thread(_find_orphans, directory, guardian, started):
        elapsed = asyncio.get_running_loop().time() - began
        if elapsed >= KILL_TIMEOUT_S:
            log.error(
                "engine %s: processes %s survive SIGKILL",
                directory.name,
                sorted(left),
                extra={"engine": directory.name},
            )
            return
        if elapsed < TRACKER_TIMEOUT_S:
            trackers = set(filter(process_tree.is_resource_tracker, left))
            left = {pid: s for pid, s in left.items() if pid not in trackers}
        await _kill_all(left)
        await asyncio.sleep(POLL_S)


async def _remove_remains(directory: Path) -> None:
    """Remove what is left of an engine without processes: its container, its temporary files."""
    # In a thread: the container's daemon may take long.
    if left := await asyncio.to_thread(containers.remove, directory):
        name = directory.name
        log.error("engine %s: its container may be left: %s", name, left, extra={"engine": name})
    scratch.remove(directory)


async def _kill_all(processes: Mapping[int, int]) -> None:
    for pid, started in processes.items():
        _kill(pid, started)
    await _wait_gone(processes)


def _collect_exit_status(pid: int) -> None:
    """Reap a child; a guardian that another gateway started has another parent."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _launch(argv: list[str], env: Mapping[str, str], stdin: int, stderr: Path) -> int:
    """Start a process in its own session; return its PID. Raises LaunchError."""
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
        raise LaunchError(f"cannot run {argv[0]}: {error.strerror}") from None


def _read_start_time(pid: int) -> int:
    stat = process_tree.read_stat(pid)
    return stat.start_time if stat else 0


def _kill(pid: int, started: int) -> None:
    if pid and process_tree.is_alive(pid, started):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


async def _wait_gone(processes: Mapping[int, int], *, timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Wait until none of these processes runs, for at most `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while any(process_tree.is_alive(pid, started) for pid, started in processes.items()):
        if asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(POLL_S)
