"""Fixtures for tests of the whole command."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.app.usage.records import Faulty, opened
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, free_port, serving_demo
from tests.waiting import PATIENCE_S, poll_until


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose only model, demo, is on the fake vLLM; nothing is under way afterwards."""
    async with serving_demo(tmp_path, fake.url) as gateway:
        yield gateway
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
        await fake.until_idle()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Faulty]:
    """A database with its tables, once of each kind; it fails when the test says so."""
    async with opened(database_url) as database:
        yield database


@pytest.fixture
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
