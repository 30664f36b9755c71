"""What renders pages: in threads where they grow with the fleet, and again after a failure."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.console.rendering import Renderer
from tests.app.console.fleet import fleet
from tests.app.console.visits import visiting
from tests.gateway import KEY, ROOT_KEY, Gateway

# Their tables have a row for each engine, model, request, setting or day.
GROWING = ("overview", "models", "engines", "requests", "usage", "configuration")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with fleet(tmp_path) as one:
        yield one


async def test_pages_that_grow_are_rendered_beside_the_event_loop(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}
    text = Renderer.text

    def noted(self: Renderer, template: str, **context: Any) -> str:
        threads[template] = threading.get_ident()
        return text(self, template, **context)

    monkeypatch.setattr(Renderer, "text", noted)

    async def see(visitor: httpx.AsyncClient, page: str) -> None:
        assert (await visitor.get(f"/console/{page}")).status_code == 200
        assert threads[f"{page}.html"] != threading.get_ident(), page

    async with visiting(gateway, ROOT_KEY) as admin:
        for page in GROWING:
            await see(admin, page)
    async with visiting(gateway, KEY) as client:
        await see(client, "account")


async def test_one_page_is_rendered_at_a_time() -> None:
    renderer, running, most = Renderer(), 0, 0
    lock = threading.Lock()

    def render() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    await asyncio.gather(*(renderer.in_thread(render) for _ in range(20)))
    assert most == 1


async def test_templates_that_could_not_be_read_once_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = Renderer()
    monkeypatch.setattr(Renderer, "_compile", _fail)
    with pytest.raises(OSError, match="deliberate"):
        await renderer.load()
    monkeypatch.undo()
    await renderer.load()
    assert "API key" in renderer.text("login.html", theme="auto", next_path="/console", fault="")


def _fail(renderer: Renderer) -> None:
    raise OSError("deliberate")
