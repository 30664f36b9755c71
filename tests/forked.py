"""The command `vllm-gateway` in forks of a process that has imported it.

The imports are most of a start, 0.9 of 1.1 s of CPU time. For tests of what a running gateway does;
those of the start itself run the command.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["app.cli", "app.server"])


@atexit.register
def _kill_left() -> None:
    """End what failed tests have left: multiprocessing's own exit, later, waits for its end."""
    for process in multiprocessing.active_children():
        process.kill()


class ForkedCommand:
    """A process that runs `vllm-gateway`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        errors: Path | None = None,
    ) -> None:
        """`output` and `errors` are files for its outputs, by default one for both."""
        output.touch()
        given = (arguments, dict(env), cwd, output, errors or output)
        self._process = _FORKS.Process(target=_run, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended it."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code at its end. Raises TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("vllm-gateway", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    *arguments: str, env: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        command = ForkedCommand(*arguments, env=env, cwd=cwd, output=output, errors=errors)
        try:
            code = command.wait(120)
        finally:
            command.kill()
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def _end_with_the_tests() -> None:
    """Leave no gateway behind when the tests are killed; the server of forks outlives them."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(
    arguments: tuple[str, ...], env: dict[str, str], cwd: Path, output: Path, errors: Path
) -> None:
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    for descriptor, path in ((1, output), (2, errors)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv[:] = ["vllm-gateway", *arguments]
    from app.cli import main
    from app.telemetry.logs import access

    access._random.seed()  # else all gateways have the same request IDs
    main()
