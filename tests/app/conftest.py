"""Fixtures for tests of the whole command."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.app.usage.records import Faulty, opened
from tests.gateway import demo_gateway, free_port
from tests.waiting import poll_until

gateway = demo_gateway()


@pytest.fixture
async def database(tables_url: str) -> AsyncIterator[Faulty]:
    """A database with its tables, once of each kind; it fails when the test says so."""
    async with opened(tables_url) as database:
        yield database


@pytest.fixture(scope="session")
def fake_url() -> Iterator[str]:
    """The fake in a process of its own: these tests block the loop that they would share."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.fakes.vllm",
        f"--port={port}",
        "--served-model-name=demo",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    poll_until(listening, 10)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()
