"""Real servers for the tests, on free ports, and what can happen to them."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Self

import asyncpg
import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver
import httpx
import psutil
import redis
import yaml

from app.database import Database
from app.database.schema import metadata, revision
from tests.gateway import free_port, responds

START_S = 30.0
# Connections of an earlier test hold no lock any more.
ALONE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
"""
EMPTY = f"{ALONE} DROP SCHEMA public CASCADE; CREATE SCHEMA public;"
# All that migrations have made; of rows, they make only the one of the revision.
SHAPE = """
SELECT string_agg(concat_ws(' ', relname, relnatts, relchecks), ',' ORDER BY relname)
FROM pg_class WHERE relnamespace = 'public'::regnamespace
"""
NO_ROWS = "".join(
    f"DELETE FROM {table.name};" for table in metadata.sorted_tables if table is not revision
)
NO_ROWS += "UPDATE revision SET value = 0;"


class Server:
    """A child process that listens on a port, and what can happen to it."""

    def __init__(self, name: str) -> None:
        self.port = free_port()
        # Not below pytest's directory: PostgreSQL will not run as root, and nobody else may enter.
        self.directory = Path(tempfile.mkdtemp(prefix=f"gateway-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

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

    @property
    def pid(self) -> int:
        """The process, which must have been started."""
        assert self._process is not None
        return self._process.pid

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


class DnsServer(Server):
    """A dnsmasq that knows the names below test., with a TTL of a second."""

    # On 127.0.0.1 the UDP port is taken by `free_port`.
    _address = "127.0.0.2"

    def __init__(self) -> None:
        super().__init__("dns")
        self._hosts = self.directory / "hosts"
        self._hosts.write_text("127.0.0.1 here.test\n")

    def put(self, name: str, *addresses: str) -> None:
        """Have a name resolve to these addresses; without any it does not exist."""
        others = (line for line in self._hosts.read_text().splitlines() if line.split()[1] != name)
        self._hosts.write_text("".join(f"{line}\n" for line in others))
        with self._hosts.open("a") as file:
            file.writelines(f"{address} {name}\n" for address in addresses)
        self._signal(signal.SIGHUP)
        deadline = time.monotonic() + START_S
        while self._ask(name) != set(addresses):
            assert time.monotonic() < deadline, f"{name} is not {addresses}"
            time.sleep(0.02)

    def resolver(self, *search: str, ndots: int = 1) -> dns.asyncresolver.Resolver:
        """Return a resolver that asks this server, with these search domains."""
        resolver = dns.asyncresolver.Resolver(configure=False)
        self._point(resolver)
        resolver.search = [dns.name.from_text(domain) for domain in search]
        resolver.ndots = ndots
        return resolver

    def _point(self, resolver: dns.resolver.BaseResolver) -> None:
        resolver.nameservers = [self._address]
        resolver.port = self.port

    def _ask(self, name: str) -> set[str]:
        resolver = dns.resolver.Resolver(configure=False)
        self._point(resolver)
        found: set[str] = set()
        for family in ("A", "AAAA"):
            with contextlib.suppress(dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
                answer = resolver.resolve(name, family, lifetime=0.3)
                found |= {record.to_text() for record in answer}
        return found

    def _command(self) -> list[str]:
        options = {
            "port": str(self.port),
            "listen-address": self._address,
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "conf-file": "/dev/null",
            "pid-file": "",
            "addn-hosts": str(self._hosts),
            "local-ttl": "1",
            "local": "/test/",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        bare = ["--keep-in-foreground", "--bind-interfaces", "--no-hosts", "--no-resolv"]
        return ["dnsmasq", *bare, *flags]

    def _answers(self) -> bool:
        try:
            return bool(self._ask("here.test"))
        except dns.exception.DNSException:
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
        self._made = False  # whether there is the database of `emptied`
        self._shape: str | None = None  # of the tables of `with_tables`
        # A command that runs the server, where that is to be in surroundings of its own.
        self.within: list[str] = []
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
        return [*self.within, *self._as, str(self._bin / "postgres"), "-D", str(self._data), *flags]

    def _answers(self) -> bool:
        try:
            self.run("SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    def url(self, database: str) -> str:
        """Return the gateway's URL for one of the databases."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/{database}"

    def create(self, database: str, *, tables: bool = False) -> str:
        """Make a database, empty or with its tables; return its URL."""
        if tables:
            self.with_tables()
        self.run(f"CREATE DATABASE {database} TEMPLATE {'tables' if tables else 'template1'}")
        return self.url(database)

    def emptied(self) -> str:
        """Return the URL of an empty database that is not shared, until the next call.

        It is always the same one: to make a database takes ten times as long as to empty it.
        """
        if not self._made:
            self.create("emptied")
            self._made = True
        self.run(EMPTY, "emptied")
        return self.url("emptied")

    def with_tables(self) -> str:
        """Return the URL of a database with its tables and no rows, until the next call.

        It is always the same one. A test may change its tables, which are then made again: that
        takes ten times as long as to delete the rows.
        """
        if self._shape is None:
            self.create("tables")
        _run(self._restore_tables)
        return self.url("tables")

    async def _restore_tables(self) -> None:
        async with self._connected("tables") as connection:
            await connection.execute(ALONE)
            if self._shape is not None and self._shape == await connection.fetchval(SHAPE):
                await connection.execute(NO_ROWS)
                return
            await connection.execute(EMPTY)
            database = Database(self.url("tables"))
            await database.migrate()
            await database.close()
            self._shape = await connection.fetchval(SHAPE)

    def run(self, statement: str, database: str = "postgres") -> None:
        """Execute a statement as superuser."""
        _run(lambda: self._execute(statement, database))

    async def _execute(self, statement: str, database: str) -> None:
        async with self._connected(database) as connection:
            await connection.execute(statement)

    @contextlib.asynccontextmanager
    async def _connected(self, database: str) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=self.port, user="postgres", database=database, timeout=20
        )
        try:
            yield connection
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
            with contextlib.suppress(psutil.NoSuchProcess):  # a backend whose client just left
                process.send_signal(number)


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a thread: the caller may be on a loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(work())).result()


class PrometheusServer(Server):
    """A Prometheus with the configuration and the rules of a directory, looking each second."""

    def __init__(self, home: Path, targets: list[str]) -> None:
        """`targets` take the place of those in home/prometheus.yml."""
        super().__init__("prometheus")
        self.url = f"http://127.0.0.1:{self.port}"
        config = yaml.safe_load((home / "prometheus.yml").read_text())
        config["global"] = dict.fromkeys(config["global"], "1s")
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": targets}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copytree(home / "rules", self.directory / "rules")

    def _command(self) -> list[str]:
        options = {
            "config.file": str(self.directory / "prometheus.yml"),
            "storage.tsdb.path": str(self.directory / "data"),
            "web.listen-address": f"127.0.0.1:{self.port}",
            "log.level": "warn",
        }
        return ["prometheus", *(f"--{name}={value}" for name, value in options.items())]

    def _answers(self) -> bool:
        return responds(f"{self.url}/-/ready")

    def ask(self, path: str, **parameters: Any) -> Any:
        """Return the data of an answer of the HTTP API below /api/v1. Raises RuntimeError."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{path} {parameters}: {answer['error']}")
        return answer["data"]


class CollectorServer(Server):
    """A collector of traces, which takes OTLP over HTTP and gRPC and sends it on over HTTP.

    It is rotel, as its wheel has it; `url` and `grpc_url` are where it listens.
    """

    def __init__(self, to: str) -> None:
        """`to` is where spans go, without a path."""
        super().__init__("collector")
        self.url = f"http://127.0.0.1:{self.port}"
        self._grpc = f"127.0.0.1:{free_port()}"
        self.grpc_url = f"http://{self._grpc}"
        self._to = to

    def _command(self) -> list[str]:
        options = {
            "otlp-http-endpoint": f"127.0.0.1:{self.port}",
            "otlp-grpc-endpoint": self._grpc,
            "batch-timeout": "20ms",
            "exporter": "otlp",
            "otlp-exporter-endpoint": self._to,
            "otlp-exporter-protocol": "http",
        }
        program = distribution("rotel").locate_file("rotel/rotel-agent")
        # It can run processors in Python, and so needs the interpreter's library.
        library = f"LD_LIBRARY_PATH={sysconfig.get_config_var('LIBDIR')}"
        flags = [f"--{name}={value}" for name, value in options.items()]
        return ["env", library, str(program), "start", *flags]

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
