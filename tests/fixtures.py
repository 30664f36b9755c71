"""Fixtures for all tests: the event loop of production, and a gateway with a real vLLM engine.

A plugin of the processes that run tests. The one that gives work to xdist's workers does without:
the imports are most of its CPU time.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

from tests.e2e.deployment import (
    CANARY,
    ENGINE,
    SECRETS,
    Deployment,
    demo_model,
    deployed,
    learn_flags,
    until_ready,
)
from tests.fakes.vllm import Fake
from tests.gateway import free_port, make_tables, remote
from tests.scheduling import group_of
from tests.services import DnsServer, PostgresServer, RedisServer

# A process may not be scheduled for seconds here, which says nothing of an example.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test on the loop of production."""
    return {"uvloop": uvloop.new_event_loop}


# What the shared gateway needs, until the last test on it has ended.
SHARED = ExitStack()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have vLLM's parser asked before the first test with real vLLM."""
    if item.get_closest_marker("vllm"):
        learn_flags()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared gateway behind its group, in which some tests do not use it."""
    if group_of(item.nodeid) == "gateway" != (nextitem and group_of(nextitem.nodeid)):
        SHARED.close()  # its engine takes 3 GiB


def pytest_sessionfinish() -> None:
    """End it as well where the run breaks off."""
    SHARED.close()


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Have a text printed at the end: figures that are worth reading when all is well too."""
    return lambda text: record_property("shown", text)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """The demo model on real vLLM, with remote servers that are dead, slow and broken.

    All tests that need nothing special of an engine share it, one after the other.
    """
    demo_model()
    fake_port = free_port()
    fake = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.vllm", f"--port={fake_port}", "--served-model-name=f"],
        stdout=subprocess.DEVNULL,
    )
    SHARED.callback(fake.wait)
    SHARED.callback(fake.kill)
    quick = {"first_byte_s": 0.5, "stall_s": 0.5}
    # What tests of stored responses need.
    engine = {**ENGINE, "env": {**ENGINE["env"], "VLLM_ENABLE_RESPONSES_API_STORE": "1"}}
    models: list[dict[str, Any]] = [
        {
            "name": "demo",
            "aliases": ["gpt-4o-mini"],
            # What the cancellation tests ask for.
            "max_choices": 1024,
            "max_sequences": 1024,
            "stores_responses": True,
            "engines": [engine],
        },
        {"name": "faulty", "engines": [remote(f"http://127.0.0.1:{fake_port}", timeouts=quick)]},
        {
            "name": "dead",
            "engines": [remote(f"http://127.0.0.1:{free_port()}", api_key_env=SECRETS[-1])],
        },
    ]
    directory = tmp_path_factory.mktemp("gateway")
    secrets = dict.fromkeys(SECRETS, CANARY)
    deployment = SHARED.enter_context(
        deployed(directory, *models, variables=secrets, max_body_bytes=1_000_000)
    )
    until_ready(deployment)
    return deployment


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


DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.services)]


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/gateway.db"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.emptied()


@pytest.fixture(params=DATABASES)
def tables_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database with its tables and no rows, once of each kind."""
    if request.param == "sqlite":
        file = tmp_path / "gateway.db"
        make_tables(file)
        return f"sqlite+aiosqlite:///{file}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.with_tables()
