"""The parent of an engine's processes: starts, stops and outlives the engine, and keeps its log.

Run as a script by `guardian_client.py`, never imported:

    python -I -S guardian.py DIRECTORY KEEP FINGERPRINT ARGV...

    stdin                a socket to the gateway that started it
    DIRECTORY/ctl.sock   for a gateway that adopts the engine

Both use the same protocol, one line per message. From the gateway: "stop SECONDS" stops the engine
gracefully, with SIGKILL after that time; "keep 0" and "keep 1" say whether the engine keeps running
without a gateway. When the last gateway has disconnected and the engine is not to be kept, it is
killed at once. To every gateway, in JSON: {"pid": n, "fingerprint": text} on connecting, or
{"error": text} if the engine could not be started, and {"exit": code} (negative for a signal) when
all processes have exited, or KILL_TIMEOUT_S after SIGKILL at the latest.

DIRECTORY/engine.json records which processes these are, for a gateway that finds the guardian dead.
As a child subreaper (prctl(2)) the guardian becomes the parent of every orphan below it, whatever
process group or session that has moved to. So when waitpid finds no child, no EngineCore and no
worker is left. If the guardian itself is killed, the kernel kills the API server (its parent death
signal) and the gateway kills the rest.
"""

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from engines.guard import containers, process_tree, scratch
from engines.guard.process_tree import KILL_TIMEOUT_S, TRACKER_TIMEOUT_S

PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 64 * 1024
MAX_LOG_BYTES = 16 * 1024 * 1024  # then the log is renamed to LOGFILE.1 and a new one begins


def spawn(argv: list[str], log_pipe: int) -> int:
    """Start the engine in its own process group, with output to `log_pipe`. Raises OSError."""
    report, report_child = (
        os.pipe()
    )  # close-on-exec: end of file without a byte means exec succeeded
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            if not process_tree.die_with_parent(guardian):
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log_pipe, 1)
            os.dup2(log_pipe, 2)
            os.execv(argv[0], argv)
        except OSError as error:
            os.write(report_child, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(report_child)
    failure = os.read(report, 16)
    os.close(report)
    if failure:
        os.waitpid(pid, 0)
        raise OSError(int(failure), os.strerror(int(failure)), argv[0])
    return pid


def kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


class RotatingLog:
    """The engine's output on disk: at most two files of MAX_LOG_BYTES."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.missing = 0  # bytes that could not be written since the last that could
        self.file, self.size = self.open()

    def open(self) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self.path, flags, 0o600)
        return file, os.fstat(file).st_size

    def write(self, data: bytes) -> None:
        # A full disk must not stop the engine.
        gap = b""
        if self.missing:
            gap = b"\n[%d bytes are missing: this file could not be written]\n" % self.missing
        try:
            if self.size + len(gap + data) > MAX_LOG_BYTES:
                self.begin_anew()
            written = os.write(self.file, gap + data)
        except OSError:
            written = 0
        self.size += written
        if written < len(gap):
            self.missing += len(data)
        else:
            self.missing = len(gap + data) - written

    def begin_anew(self) -> None:
        # The old file is closed last: what fails before leaves it as it is, and its number with it.
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, self.path + ".1")
        old = self.file
        self.file, self.size = self.open()
        os.close(old)


class GatewayConnection:
    """A connection to a gateway: receives commands, sends reports."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pending = b""

    def send(self, message: dict[str, object]) -> None:
        # The gateway may have disconnected.
        with contextlib.suppress(OSError):
            self.sock.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[bytes] | None:
        """Return the complete lines received; None when the gateway has disconnected."""
        try:
            data = self.sock.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        return lines


class Guardian:
    """Supervises one engine until no process of it is left."""

    def __init__(
        self,
        directory: str,
        first: GatewayConnection,
        log: RotatingLog,
        engine: int,
        log_pipe: int,
        *,
        keep: bool,
    ) -> None:
        self.directory = directory
        self.gateways = {first}
        self.log = log
        self.engine = engine
        self.log_pipe = log_pipe
        self.keep = keep
        self.exit_code: int | None = None
        self.kill_at: float | None = None
        self.hello: dict[str, object] = {}
        self.selector = selectors.DefaultSelector()
        self.wakeup, signals = os.pipe()
        os.set_blocking(signals, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)

    def publish(self, fingerprint: str) -> None:
        """Write engine.json and listen for gateways."""
        self.hello = {"pid": self.engine, "fingerprint": fingerprint}
        guardian, engine = map(process_tree.read_stat, (os.getpid(), self.engine))
        record = {
            "boot": process_tree.boot_id(),
            "guardian": os.getpid(),
            "guardian_started": guardian.start_time if guardian else 0,
            "engine": self.engine,
            "engine_started": engine.start_time if engine else 0,
        }
        control_socket = os.path.join(self.directory, "ctl.sock")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(control_socket)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(control_socket)
        self.listener.listen()
        written = os.path.join(self.directory, "engine.json.new")
        with open(written, "w") as file:
            json.dump(record, file)
        os.replace(written, os.path.join(self.directory, "engine.json"))

    def run(self) -> int:
        """Supervise until no process of the engine is left; return its exit code."""
        for fd in (self.log_pipe, self.wakeup):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        for gateway in self.gateways:
            self.selector.register(gateway.sock, selectors.EVENT_READ, gateway)
            gateway.send(self.hello)
        self.reap()  # the engine may have exited before signals were watched
        while self.exit_code is None:
            wait = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            for key, _ in self.selector.select(wait):
                self.handle(key)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                break
            if not self.gateways and not self.keep:
                break
        self.kill_all()
        # Bounded: a process that survived could write for ever.
        for _ in range(MAX_LOG_BYTES // READ_BYTES):
            if not self.copy_output():
                break
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.directory, "engine.json"))
            os.unlink(os.path.join(self.directory, "ctl.sock"))
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def handle(self, key: selectors.SelectorKey) -> None:
        """Handle one ready file descriptor."""
        if isinstance(key.data, GatewayConnection):
            self.execute_commands(key.data)
        elif key.fileobj is self.listener:
            with contextlib.suppress(OSError):
                gateway = GatewayConnection(self.listener.accept()[0])
                self.gateways.add(gateway)
                self.selector.register(gateway.sock, selectors.EVENT_READ, gateway)
                gateway.send(self.hello)
        elif key.fd == self.wakeup:
            os.read(self.wakeup, 4096)
            self.reap()
        elif not self.copy_output():
            self.selector.unregister(self.log_pipe)

    def copy_output(self) -> bool:
        """Copy the engine's output to the log; return False at the end of the pipe."""
        try:
            data = os.read(self.log_pipe, READ_BYTES)
        except BlockingIOError:
            return True
        self.log.write(data)
        return bool(data)

    def execute_commands(self, gateway: GatewayConnection) -> None:
        """Carry out the commands of a gateway, or close the connection if it has disconnected."""
        commands = gateway.receive()
        if commands is None:
            self.selector.unregister(gateway.sock)
            gateway.sock.close()
            self.gateways.discard(gateway)
            return
        for command in commands:
            verb, _, argument = command.partition(b" ")
            if verb == b"stop":
                self.kill_at = time.monotonic() + float(argument)
                kill(self.engine, signal.SIGTERM)
            elif verb == b"keep":
                self.keep = argument == b"1"

    def reap(self) -> bool:
        """Collect exited children; return whether any child is left, alive or dying."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.engine:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def kill_all(self) -> None:
        """Kill every process below this one, wait for them, and remove what they leave.

        Resource trackers exit by themselves once they have cleaned up after the others.
        """
        began = time.monotonic()
        while self.reap() and (elapsed := time.monotonic() - began) < KILL_TIMEOUT_S:
            for pid in process_tree.descendants(os.getpid()):
                if elapsed >= TRACKER_TIMEOUT_S or not process_tree.is_resource_tracker(pid):
                    kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if left := containers.remove(Path(self.directory), KILL_TIMEOUT_S):
            self.log.write(f"its container may be left: {left}\n".encode())
        scratch.remove(Path(self.directory))


def main(directory: str, keep: str, fingerprint: str, argv: list[str]) -> int:
    """Start an engine and supervise it; return the exit code."""
    process_tree.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The gateway handles Ctrl-C, a closing terminal and SIGTERM, and sends commands.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gateway = GatewayConnection(socket.socket(fileno=0))
    log_pipe, log_pipe_engine = os.pipe()
    log = RotatingLog(os.path.join(directory, "engine.log"))
    try:
        engine = spawn(argv, log_pipe_engine)
    except OSError as error:
        scratch.remove(Path(directory))
        gateway.send({"error": f"cannot run {argv[0]}: {os.strerror(error.errno or errno.EIO)}"})
        return 1
    os.close(log_pipe_engine)
    guardian = Guardian(directory, gateway, log, engine, log_pipe, keep=keep == "1")
    try:
        guardian.publish(fingerprint)
        code = guardian.run()
    except BaseException:
        guardian.kill_all()
        raise
    for gateway in guardian.gateways:
        gateway.send({"exit": code})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
