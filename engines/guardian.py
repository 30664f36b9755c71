"""The parent of an engine's processes. It outlives nobody, and nothing outlives it.

Run as a script by `process.py`, never imported: `python -I -S guardian.py LOGFILE ARGV...`.

    stdin    a pipe from the gateway. "stop SECONDS" ends the engine in order; the end of the
             pipe means that the gateway is gone, and then the engine is killed at once.
    stdout   one JSON line when the engine has started ({"pid": n} or {"error": text}), one when
             nothing of it is left, or killed processes have not vanished in SWEEP_S
             ({"exit": code}, negative for a signal).

As a child subreaper (prctl(2)) it becomes the parent of every orphan below it, whatever process
group or session that has moved to. So "waitpid finds no child" is proof that no EngineCore and no
worker is left. Should the guardian itself be killed, the kernel kills the API server (its parent
death signal) and the gateway kills the rest of the group.
"""

import contextlib
import ctypes
import errno
import json
import os
import selectors
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOG_LIMIT = 16 * 1024 * 1024  # then the log moves to LOGFILE.1 and a new one begins
SWEEP_S = 10.0  # how long killed processes may take to vanish (uninterruptible sleep)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def say(message: dict[str, object]) -> None:
    # Nobody may be left to hear it.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


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


def descendants(root: int) -> list[int]:
    """Return every process below `root`, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill(pid: int, signum: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signum)


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


class Guardian:
    def __init__(self, log: Log, engine: int, log_pipe: int, wakeup: int) -> None:
        self.log = log
        self.engine = engine
        self.log_pipe = log_pipe
        self.wakeup = wakeup
        self.exit_code: int | None = None
        self.kill_at: float | None = None
        self.orders = b""

    def run(self) -> int:
        """Watch until nothing of the engine is left; return its exit code."""
        selector = selectors.DefaultSelector()
        for fd in (0, self.log_pipe, self.wakeup):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while self.exit_code is None:
            wait = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            ready = {key.fd for key, _ in selector.select(wait)}
            if self.log_pipe in ready and not self.pump():
                selector.unregister(self.log_pipe)
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
                self.reap()
            if 0 in ready and not self.obey():
                selector.unregister(0)
                break
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                break
        self.sweep()
        # Bounded: had the sweep left somebody alive, it could go on writing for ever.
        for _ in range(LOG_LIMIT // 65536):
            if not self.pump():
                break
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def pump(self) -> bool:
        """Copy what the engine wrote into the log; return False at the end of the pipe."""
        try:
            data = os.read(self.log_pipe, 65536)
        except BlockingIOError:
            return True
        self.log.write(data)
        return bool(data)

    def obey(self) -> bool:
        """Read orders; return False when the gateway is gone."""
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.orders += data
        while b"\n" in self.orders:
            order, self.orders = self.orders.split(b"\n", 1)
            verb, _, seconds = order.partition(b" ")
            if verb == b"stop":
                self.kill_at = time.monotonic() + float(seconds)
                kill(self.engine, signal.SIGTERM)
        return True

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
        """Kill whatever is left below us and wait until it is gone."""
        deadline = time.monotonic() + SWEEP_S
        kill(self.engine, signal.SIGKILL, group=True)
        while self.reap() and time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def main(log_file: str, argv: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, wakeup_signal = os.pipe()
    os.set_blocking(wakeup_signal, False)
    signal.set_wakeup_fd(wakeup_signal, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C and SIGTERM are the gateway's to answer; it tells us what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    log_pipe, log_pipe_engine = os.pipe()
    log = Log(log_file)
    try:
        engine = spawn(argv, log_pipe_engine)
    except OSError as error:
        say({"error": f"cannot run {argv[0]}: {os.strerror(error.errno or errno.EIO)}"})
        return 1
    os.close(log_pipe_engine)
    say({"pid": engine})
    code = Guardian(log, engine, log_pipe, wakeup).run()
    say({"exit": code})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
