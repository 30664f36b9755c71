"""The page of models while the configuration changes."""

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.app.reload.gateways import ConfigFile
from tests.console.site import Site, log_in
from tests.console.watched_page import fresh_context, watched
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, ROOT_KEY, Gateway, remote, running

pytestmark = pytest.mark.asyncio(loop_scope="session")


def model(name: str, engine: Fake) -> dict[str, Any]:
    return {"name": name, "engines": [{**remote(engine.url), "served_model_name": "demo"}]}


async def reload_with(gateway: Gateway, file: ConfigFile, *models: dict[str, Any]) -> None:
    """Change the models of a configuration, and have it read again."""
    file.write(*models)
    response = await gateway.client.post("/admin/reload", headers=ROOT)
    assert response.json()["ok"], response.text


async def test_models_of_a_reload_come_and_go_on_an_open_page(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    first, second = model("first", site.fake), model("second", site.fake)
    file = ConfigFile(tmp_path, first)
    async with running(file.read(), source=file.read) as gateway:
        origin = f"http://127.0.0.1:{gateway.port}"
        async with fresh_context(browser, origin) as context:
            await log_in(context, ROOT_KEY)
            async with watched(context, origin) as watched_page:
                page = watched_page.page
                await page.goto("/console/models")
                names = page.get_by_role("rowheader")
                await expect(names).to_have_text(["first"])
                await reload_with(gateway, file, first, second)
                await expect(names).to_have_text(["first", "second"])
                await reload_with(gateway, file, second)
                await expect(names).to_have_text(["second"])
                await reload_with(gateway, file, second, first)
                await expect(names).to_have_text(["second", "first"])
