"""The real application under the real server, in the test's own loop, on a free port."""

import asyncio
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from pydantic import BaseModel
from uvicorn.server import ServerState

from app.application import Application
from app.certificate import Certificate
from app.database import Database
from app.discovery import FindSource, find_source
from app.main import create_app
from app.server import gateway_server, metrics_server
from app.server.listen import listen
from app.settings import Settings, digest
from tests.cheap_starts import make_starts_cheap
from tests.fakes.vllm import Fake
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from app.telemetry.traces.tracer import Tracer

KEY = "sk-test-0123456789abcdef"
AUTH = {"authorization": f"Bearer {KEY}"}
KEY_ID = f"key-{digest(KEY.encode()).hex()[:8]}"
ROOT_KEY = "sk-root-0123456789abcdef"
ROOT = {"authorization": f"Bearer {ROOT_KEY}"}

make_starts_cheap()


# Each run of a loop makes the repr of its result: of the application it would build all routes.
@dataclass(repr=False)
class Gateway:
    """A running gateway and a client that holds its key."""

    state: Application
    port: int
    client: httpx.AsyncClient
    # Open client connections of the main port, the client's own included, and tasks of requests.
    server: ServerState
    metrics_port: int | None = None  # where the metrics have a port of their own
    certificate: Certificate | None = None  # where the gateway serves HTTPS

    async def chat(self, model: str = "demo", **fields: Any) -> httpx.Response:
        """Ask for a chat completion."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of one series, 0 if it does not exist."""
        return self.state.metrics.registry.get_sample_value(name, labels) or 0.0

    async def raw(self, payload: bytes) -> bytes:
        """Send bytes on a new connection; return everything received."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(payload)
            async with asyncio.timeout(20):
                return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


class WrittenSettings(Settings):
    """Settings without the layers of the environment, which take as long to read as all else."""

    def __init__(self, **fields: Any) -> None:
        BaseModel.__init__(self, **fields)


def settings_for(*models: dict[str, Any], run_dir: Path, **fields: Any) -> Settings:
    """Return settings with a database of their own that let KEY in, and ROOT_KEY to /admin.

    `fields` stand beside the models.
    """
    server = {"host": "127.0.0.1", "port": 0, "run_dir": run_dir, **fields.pop("server", {})}
    database = run_dir / "gateway.db"
    if not database.exists():
        make_tables(database)
    state = {"database_url": f"sqlite+aiosqlite:///{database}"}
    return WrittenSettings(
        models=models,
        server=server,
        state={**state, **fields.pop("state", {})},
        api_keys=(digest(KEY.encode()),),
        admin_key=digest(ROOT_KEY.encode()),
        **fields,
    )


def make_tables(file: Path) -> None:
    """Make an SQLite database with its tables and no rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_tables())
    file.chmod(0o600)


@cache
def _tables() -> bytes:
    """Return a database with its tables: making them takes as long as the rest of a start."""

    async def make(file: Path) -> None:
        database = Database(f"sqlite+aiosqlite:///{file}")
        await database.migrate()
        await database.close()

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as thread:
        file = Path(directory) / "gateway.db"
        thread.submit(lambda: asyncio.run(make(file))).result()  # the caller may be on a loop
        return file.read_bytes()


def remote(url: str, **fields: Any) -> dict[str, Any]:
    """The specification of a remote engine."""
    return {"kind": "remote", "url": url, **fields}


@asynccontextmanager
async def running(
    settings: Settings,
    launcher: Sequence[str] | None = None,
    *,
    settle: bool = True,
    source: Callable[[], Settings] | None = None,
    source_of_text: Callable[[str], Settings] | None = None,
    tracer: "Tracer | None" = None,
    find_source: FindSource = find_source,
) -> AsyncIterator[Gateway]:
    """Run a gateway; unless told otherwise it has settled when the body begins.

    `source` reads the settings again for a reload, `source_of_text` with another text of the file,
    `tracer` makes traces, `find_source` returns
    what lists discovered servers.
    """
    state = create_app(
        settings,
        launcher=launcher,
        source=source,
        source_of_text=source_of_text,
        tracer=tracer,
        find_source=find_source,
    )
    scraped = metrics_server(state)
    tls = settings.server.tls
    certificate = Certificate(tls) if tls is not None else None
    server = gateway_server(state, certificate)
    port = await _listening(server, settings.server.host, settings.server.port)
    servers: list[uvicorn.Server] = [server]
    metrics_port: int | None = None
    if scraped is not None:
        servers.append(scraped)
        metrics_port = await _listening(scraped, settings.metrics.host, settings.metrics.port or 0)
    try:
        if settle:
            await state.startup_done.wait()
        async with httpx.AsyncClient(
            base_url=f"{settings.server.scheme}://127.0.0.1:{port}",
            headers=AUTH,
            timeout=20,
            verify=False,  # certificates take longer to load than a request takes
            trust_env=False,  # proxies of the environment
        ) as client:
            yield Gateway(state, port, client, server.server_state, metrics_port, certificate)
    finally:
        for one in servers:
            for listener in one.servers:
                listener.close()
            for connection in list(one.server_state.connections):
                connection.shutdown()
            await until_tasks_end(one.server_state)
        await server.lifespan.shutdown()


def serving_demo(
    run_dir: Path,
    *urls: str,
    model: Mapping[str, Any] | None = None,
    settle: bool = True,
    **sections: Any,
) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway whose only model, demo, has remote engines; `model` are its other settings."""
    demo = {"name": "demo", "engines": [remote(url) for url in urls], **(model or {})}
    return running(settings_for(demo, run_dir=run_dir, **sections), settle=settle)


def demo_gateway(*, shared: bool = False, anonymous: bool = False, **options: Any) -> Any:
    """Return the fixture `gateway`: a model, demo, on the fake vLLM; nothing is left afterwards.

    `options` are those of `serving_demo`. `shared`: one for all tests of a module, which run on
    its loop; `anonymous`: its client has no key.
    """

    @asynccontextmanager
    async def serving(fake: Fake, run_dir: Path) -> AsyncIterator[Gateway]:
        async with serving_demo(run_dir, fake.url, **options) as gateway:
            if anonymous:
                del gateway.client.headers["authorization"]
            yield gateway
            await until_idle(gateway, fake)

    @pytest_asyncio.fixture(scope="module", loop_scope="module", name="gateway")
    async def of_module(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
        async with Fake() as fake, serving(fake, tmp_path_factory.mktemp("gateway")) as gateway:
            yield gateway

    @pytest_asyncio.fixture(name="gateway")
    async def of_test(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
        async with serving(fake, tmp_path) as gateway:
            yield gateway

    return of_module if shared else of_test


async def until_idle(gateway: Gateway, fake: Fake) -> None:
    """Return when nothing is under way; no slot, lease, connection or memory may be left."""
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    await fake.until_idle()
    await wait_until(lambda: not gateway.server.tasks)
    assert len(gateway.state.in_flight) == 0
    assert gateway.state.admission.waiting == 0
    assert gateway.state.body_memory.held == 0


async def until_tasks_end(server: ServerState) -> None:
    """Return when a server's requests have ended; their tasks need not be asyncio's."""
    await wait_until(lambda: not server.tasks)


async def _listening(server: uvicorn.Server, host: str, port: int) -> int:
    """Have a server listen; return its port."""
    sock = listen(host, port)
    # What server.serve does, less its ticks of 0.1 s: those would make every test a slow one.
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    await server.on_tick(0)
    found: int = sock.getsockname()[1]
    return found


def chat(url: str, key: str) -> httpx.Response:
    """Send a chat completion to a gateway in another process."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", headers=headers, json=body)


@cache
def _polling_client() -> httpx.Client:
    """Return a client of single requests: to make one takes longer than its request."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)


def responds(url: str) -> bool:
    """Return whether a server answers a GET with 200."""
    try:
        return _polling_client().get(url).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """Return a port that nothing listens on, and that stays so until the caller has it listened on.

    The kernel gives it to nobody who asks for any port, nor to connections: it is below those. A
    UDP socket of the same number, open as long as this process lives, tells other tests' processes.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, below if below > 11_000 else 65_536)
    while True:
        port = secrets.choice(ports)
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as mark:
            try:
                for sock in (mark, probe):
                    sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            mark.detach()
        return port
