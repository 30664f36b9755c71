"""Fixtures for all tests: the event loop of production, and a gateway with a real vLLM engine."""

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

from tests.e2e.deployment import ENGINE, Deployment, demo_model, deployed, until_ready
from tests.fakes.vllm import Fake
from tests.gateway import free_port, remote
from tests.services import DnsServer, PostgresServer, RedisServer

# A process may not be scheduled for seconds here, which says nothing of an example.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Have what tests start hear SIGINT, which a shell's background jobs ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test on the loop of production."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in e2e runs the whole command, most of it real vLLM."""
    for item in items:
        if item.nodeid.startswith("tests/e2e/"):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what is imported and collected: a third of all time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Have a text printed at the end: figures that are worth reading when all is well too."""
    return lambda text: record_property("shown", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to show."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, text in report.user_properties:
                if name == "shown" and report.when == "call":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The demo model on real vLLM, with remote servers that are dead, slow and broken."""
    demo_model()
    fake_port = free_port()
    fake = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.vllm", f"--port={fake_port}", "--served-model-name=f"],
        stdout=subprocess.DEVNULL,
    )
    directory = tmp_path_factory.mktemp("gateway")
    quick = {"first_byte_s": 0.5, "stall_s": 0.5}
    models: list[dict[str, Any]] = [
        {
            "name": "demo",
            "aliases": ["gpt-4o-mini"],
            # What the cancellation tests ask for.
            "max_choices": 1024,
            "max_sequences": 1024,
            "engines": [ENGINE],
        },
        {"name": "faulty", "engines": [remote(f"http://127.0.0.1:{fake_port}", timeouts=quick)]},
        {"name": "dead", "engines": [remote(f"http://127.0.0.1:{free_port()}")]},
    ]
    try:
        with deployed(directory, *models, max_body_bytes=1_000_000) as deployment:
            until_ready(deployment)
            yield deployment
    finally:
        fake.kill()
        fake.wait()


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    """A fake vLLM server on a free port, in the test's own event loop."""
    async with Fake() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis for tests that leave it running; each takes a prefix of its own."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL for tests that leave it running; each has a database of its own."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def dns_server() -> Iterator[DnsServer]:
    """A real DNS server, whose names the test decides."""
    with DnsServer() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that the test may stop."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that the test may stop."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/gateway.db"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.emptied()
