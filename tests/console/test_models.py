"""The page of models while the configuration changes."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.async_api import Browser, expect

from tests.console.site import Site, log_in
from tests.console.watched_page import fresh_context, watched
from tests.e2e.deployment import ADMIN_KEY, deployed
from tests.fakes.vllm import Fake
from tests.gateway import remote

pytestmark = pytest.mark.asyncio(loop_scope="session")


def model(name: str, engine: Fake) -> dict[str, Any]:
    return {"name": name, "engines": [{**remote(engine.url), "served_model_name": "demo"}]}


async def reload_with(origin: str, file: Path, *models: dict[str, Any]) -> None:
    """Change the models of a configuration file, and have it read again."""
    settings = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**settings, "models": list(models)}))
    async with httpx.AsyncClient(base_url=origin, timeout=30) as client:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        response = await client.post("/admin/reload", headers=headers)
        assert response.json()["ok"], response.text


async def test_models_of_a_reload_come_and_go_on_an_open_page(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    first, second = model("first", site.fake), model("second", site.fake)
    with deployed(tmp_path, first) as deployment:
        async with fresh_context(browser, deployment.url) as context:
            await log_in(context, ADMIN_KEY)
            async with watched(context, deployment.url) as watched_page:
                page = watched_page.page
                await page.goto("/console/models")
                names = page.get_by_role("rowheader")
                await expect(names).to_have_text(["first"])
                file = tmp_path / "gateway.yaml"
                await reload_with(deployment.url, file, first, second)
                await expect(names).to_have_text(["first", "second"])
                await reload_with(deployment.url, file, second)
                await expect(names).to_have_text(["second"])
                await reload_with(deployment.url, file, second, first)
                await expect(names).to_have_text(["second", "first"])
