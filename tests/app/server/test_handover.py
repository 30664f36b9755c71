"""The hand-over to the next gateway frees the port, also right after the start."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.application import Application
from app.main import create_app
from app.server.http_server import gateway_server
from app.server.listen import listen
from app.server.shutdown import hand_over
from tests.gateway import remote, settings_for


@pytest.fixture
def application(tmp_path: Path) -> Application:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    return create_app(settings_for(model, run_dir=tmp_path))


async def test_handover_during_the_start_waits_for_its_end(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_database = asyncio.Event(), application.database.open

    async def open_slowly() -> None:
        await opened.wait()
        await open_database()

    monkeypatch.setattr(application.database, "open", open_slowly)
    with ExitStack() as exclusive:
        sock = exclusive.enter_context(listen("127.0.0.1", 0))
        server = gateway_server(application)
        serving = asyncio.create_task(server.serve([sock]))
        handing_over = asyncio.create_task(hand_over(application, [server], exclusive))
        await asyncio.sleep(0.05)
        assert not handing_over.done()
        opened.set()
        async with asyncio.timeout(20):
            await handing_over
            assert sock.fileno() == -1
            server.should_exit = True
            await serving
