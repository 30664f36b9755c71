"""Child processes of a benchmark: started in separate groups, always ended by pid."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# All files of a run: environments of the peers, logs, samples.
WORK = ROOT / ".bench"
END_S = 10.0


class StartError(Exception):
    """A process could not be started or did not become ready; the text is one line."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        """True if it has exited. It is not reaped before `end`, so its pid is not reused."""
        return self.process.returncode is not None or ended(self.pid)

    def end(self, within_s: float) -> None:
        """Send SIGTERM, then SIGKILL to the rest of its group; return when it has exited."""
        if self.process.returncode is not None:
            return
        try:
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + within_s
            while not self.ended and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()


def ended(pid: int) -> bool:
    """Return whether an unreaped child process has exited."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextlib.contextmanager
def child(
    name: str,
    argv: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    end_s: float = END_S,
    pass_fds: Sequence[int] = (),
) -> Iterator[Child]:
    """Run a command during the body; its output goes to a file of its name.

    It has `end_s` seconds to end after SIGTERM, and inherits `pass_fds`. Raises StartError.
    """
    log = WORK / "log" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env or environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C goes to the benchmark alone, which ends its children in order.
                start_new_session=True,
                pass_fds=pass_fds,
            )
    except OSError as error:
        raise StartError(f"{name} could not be run: {error.strerror}") from None
    running = Child(name, process, log)
    try:
        yield running
    finally:
        running.end(end_s)


def wait_until(condition: Callable[[], bool], running: Child, timeout_s: float) -> None:
    """Return when a condition holds. Raises StartError when the child ends or it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if running.ended:
            raise StartError(f"{running.name} ended; see {_shown(running.log)}")
        if time.monotonic() > deadline:
            raise StartError(
                f"{running.name} did not answer in {timeout_s:g} s; see {_shown(running.log)}"
            )
        time.sleep(0.1)


def environment(**more: str) -> dict[str, str]:
    """Return our environment without the gateway's settings, with `more` added.

    Bytecode may be cached: without it an import of vLLM or LiteLLM takes minutes in sum.
    """
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("GATEWAY_")}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**inherited, **more}


def free_port() -> int:
    """Return a port of the loopback address that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the benchmark as Ctrl-C does, so that nothing it started is left.

    Both end it with the code that a shell gives to a signal.
    """

    def unwind(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
