"""The parent of an engine's processes. It outlives nobody, and nothing outlives it.

Run as a script by `link.py`, never imported:

    python -I -S guardian.py DIRECTORY KEEP FINGERPRINT ARGV...

    stdin            a socket to the gateway that started it
    DIRECTORY/ctl.sock   where another gateway, that takes the engine over, connects

Both speak the same lines. From the gateway: "stop SECONDS" ends the engine in order; "keep 0" and
"keep 1" say whether the engine goes on without a gateway. When the last gateway has gone and the
engine is not to be kept, it is killed at once. To every gateway, in JSON: {"pid": n, "fingerprint":
text} when it meets the engine, or {"error": text} when that could not be run, and {"exit": code}
(negative for a signal) when nothing of it is left or killed processes have not vanished in SWEEP_S.

DIRECTORY/engine.json says which processes these are, for a gateway that comes when this one is
gone. As a child subreaper (prctl(2)) the guardian becomes the parent of every orphan below it,
whatever process group or session that has moved to. So "waitpid finds no child" is proof that no
EngineCore and no worker is left. Should the guardian itself be killed, the kernel kills the API
server (its parent death signal) and the gateway kills the rest.
"""

import contextlib
import ctypes
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
from engines.guard import process_tree, scratch

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOG_LIMIT = 16 * 1024 * 1024  # then the log moves to LOGFILE.1 and a new one begins
SWEEP_S = 10.0  # how long killed processes may take to vanish (uninterruptible sleep)
TRACKERS_S = 3.0  # how long resource trackers may take to clean up, a tenth of a second as a rule


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def spawn(argv: list[str], log_pipe: int) -> int:
    """Start the engine in its own process group, its output into `log_pipe`. Raises OSError."""
    report, report_child = os.pipe()  # close-on-exec: its end without a byte means exec worked
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guardian:  # it died before the line above
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


class Log:
    """The engine's output on disk, at most two files of LOG_LIMIT bytes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.file = os.open(self.path, flags, 0o600)
        self.size = os.fstat(self.file).st_size

    def write(self, data: bytes) -> None:
        # A full disk must not stop the engine.
        with contextlib.suppress(OSError):
            if self.size + len(data) > LOG_LIMIT:
                os.close(self.file)
                os.replace(self.path, self.path + ".1")
                self.open()
            self.size += os.write(self.file, data)


class Gateway:
    """A connection to a gateway: orders come, reports go."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pending = b""

    def say(self, message: dict[str, object]) -> None:
        # Nobody may be left to hear it.
        with contextlib.suppress(OSError):
            self.sock.send(json.dumps(message).encode() + b"\n")

    def orders(self) -> list[bytes] | None:
        """Return the whole lines that have come; None when the gateway is gone."""
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
    def __init__(
        self, directory: str, first: Gateway, log: Log, engine: int, log_pipe: int, *, keep: bool
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

    def introduce(self, fingerprint: str) -> None:
        """Put down who this is, and open the door for gateways to come."""
        self.hello = {"pid": self.engine, "fingerprint": fingerprint}
        ours, engine = process_tree.stat(os.getpid()), process_tree.stat(self.engine)
        record = {
            "boot": process_tree.boot_id(),
            "guardian": os.getpid(),
            "guardian_started": ours.started if ours else 0,
            "engine": self.engine,
            "engine_started": engine.started if engine else 0,
        }
        door = os.path.join(self.directory, "ctl.sock")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(door)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(door)
        self.listener.listen()
        written = os.path.join(self.directory, "engine.json.new")
        with open(written, "w") as file:
            json.dump(record, file)
        os.replace(written, os.path.join(self.directory, "engine.json"))

    def run(self) -> int:
        """Watch until nothing of the engine is left; return its exit code."""
        for fd in (self.log_pipe, self.wakeup):
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        for gateway in self.gateways:
            self.selector.register(gateway.sock, selectors.EVENT_READ, gateway)
            gateway.say(self.hello)
        self.reap()  # the engine may have ended before anybody listened for signals
        while self.exit_code is None:
            wait = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            for key, _ in self.selector.select(wait):
                self.react(key)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                break
            if not self.gateways and not self.keep:
                break
        self.sweep()
        # Bounded: had the sweep left somebody alive, it could go on writing for ever.
        for _ in range(LOG_LIMIT // 65536):
            if not self.pump():
                break
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.directory, "engine.json"))
            os.unlink(os.path.join(self.directory, "ctl.sock"))
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def react(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.data, Gateway):
            self.obey(key.data)
        elif key.fileobj is self.listener:
            with contextlib.suppress(OSError):
                gateway = Gateway(self.listener.accept()[0])
                self.gateways.add(gateway)
                self.selector.register(gateway.sock, selectors.EVENT_READ, gateway)
                gateway.say(self.hello)
        elif key.fd == self.wakeup:
            os.read(self.wakeup, 4096)
            self.reap()
        elif not self.pump():
            self.selector.unregister(self.log_pipe)

    def pump(self) -> bool:
        """Copy what the engine wrote into the log; return False at the end of the pipe."""
        try:
            data = os.read(self.log_pipe, 65536)
        except BlockingIOError:
            return True
        self.log.write(data)
        return bool(data)

    def obey(self, gateway: Gateway) -> None:
        """Do what a gateway says, or let it go."""
        orders = gateway.orders()
        if orders is None:
            self.selector.unregister(gateway.sock)
            gateway.sock.close()
            self.gateways.discard(gateway)
            return
        for order in orders:
            verb, _, argument = order.partition(b" ")
            if verb == b"stop":
                self.kill_at = time.monotonic() + float(argument)
                kill(self.engine, signal.SIGTERM)
            elif verb == b"keep":
                self.keep = argument == b"1"

    def reap(self) -> bool:
        """Collect the dead; return whether any child is left, alive or dying."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.engine:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def sweep(self) -> None:
        """Kill whatever is left below us, wait until it is gone, and remove its temporary files.

        Resource trackers end by themselves, when they have cleaned up after the others.
        """
        began = time.monotonic()
        while self.reap() and (passed := time.monotonic() - began) < SWEEP_S:
            for pid in process_tree.descendants(os.getpid()):
                if passed >= TRACKERS_S or not process_tree.is_tracker(pid):
                    kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        scratch.remove(Path(self.directory))


def main(directory: str, keep: str, fingerprint: str, argv: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C, a terminal that closes and SIGTERM are the gateway's to answer; it gives us orders.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gateway = Gateway(socket.socket(fileno=0))
    log_pipe, log_pipe_engine = os.pipe()
    log = Log(os.path.join(directory, "engine.log"))
    try:
        engine = spawn(argv, log_pipe_engine)
    except OSError as error:
        scratch.remove(Path(directory))
        gateway.say({"error": f"cannot run {argv[0]}: {os.strerror(error.errno or errno.EIO)}"})
        return 1
    os.close(log_pipe_engine)
    guardian = Guardian(directory, gateway, log, engine, log_pipe, keep=keep == "1")
    try:
        guardian.introduce(fingerprint)
        code = guardian.run()
    except BaseException:
        guardian.sweep()
        raise
    for gateway in guardian.gateways:
        gateway.say({"exit": code})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
