"""Real servers for the tests, Redis and PostgreSQL on free ports, and what can happen to them."""

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import psutil
import redis

from tests.gateway import free_port

START_S = 30.0


class Server:
    """A child process that listens on a port, and what can happen to it."""

    def __init__(self, name: str) -> None:
        self.port = free_port()
        # Not below pytest's directory: PostgreSQL will not run as root, and nobody else may enter.
        self.directory = Path(tempfile.mkdtemp(prefix=f"gateway-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; return when it answers."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.directory / "log").read_text())
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, whatever state it is in; what it kept in memory is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(self._end)
            self._process.wait(START_S)
            self._process = None

    def pause(self) -> None:
        """Let it hang: connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def remove(self) -> None:
        """End it and leave nothing of it."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    _end = signal.SIGKILL

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class RedisServer(Server):
    """A Redis that keeps nothing on disk."""

    def __init__(self) -> None:
        super().__init__("redis")
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no"}
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        return ["redis-server", *flags, "--dir", str(self.directory)]

    def _answers(self) -> bool:
        with redis.Redis(port=self.port, socket_timeout=1) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False


class PostgresServer(Server):
    """A PostgreSQL whose data lies in a directory of its own."""

    _end = signal.SIGQUIT  # "immediate shutdown": without a checkpoint, as after a crash

    def __init__(self) -> None:
        super().__init__("postgres")
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
        if not found:
            raise RuntimeError("PostgreSQL is not installed; tests/install-services.sh does that")
        self._bin = found[-1].parent
        self._data = self.directory / "data"
        self._as: list[str] = []
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            user = pwd.getpwnam("postgres")
            os.chown(self.directory, user.pw_uid, user.pw_gid)
            self._as = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        make = [str(self._bin / "initdb"), "--auth=trust", "--username=postgres", "--no-sync"]
        command = [*self._as, *make, "-D", str(self._data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def _command(self) -> list[str]:
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
        }
        flags = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        return [*self._as, str(self._bin / "postgres"), "-D", str(self._data), *flags]

    def _answers(self) -> bool:
        try:
            self._run("SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    def url(self, database: str) -> str:
        """Return the gateway's URL for one of the databases."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Make an empty database and return its URL."""
        self._run(f"CREATE DATABASE {database}")
        return self.url(database)

    def _run(self, statement: str) -> None:
        # In a thread: the caller may be on a loop.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(self._execute(statement))).result()

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=self.port, user="postgres", database="postgres", timeout=5
        )
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def pause(self) -> None:
        """Let it hang, its backends too."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """End it, whatever state it is in; what was committed is kept."""
        if self._process is not None:
            self._signal_all(signal.SIGCONT)
        super().stop()

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        for process in (parent, *parent.children(recursive=True)):
            process.send_signal(number)
