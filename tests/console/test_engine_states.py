"""An engine on the overview while its process starts, serves, dies and starts again."""

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.app.reload.gateways import model, run, slow_start
from tests.console.site import log_in
from tests.console.watched_page import fresh_context, watched
from tests.gateway import ROOT_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_engine_is_seen_loading_until_it_is_ready_and_again_when_it_was_killed(
    browser: Browser, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    engine = {**slow_start(loaded), "restart": {"backoff_s": 0.01}}
    async with run(tmp_path, model("demo", engine), settle=False) as gateway:
        origin = f"http://127.0.0.1:{gateway.port}"
        async with fresh_context(browser, origin) as context:
            await log_in(context, ROOT_KEY)
            async with watched(context, origin) as watched_page:
                await watched_page.page.goto("/console/overview")
                models = watched_page.page.get_by_role("region", name="Models")
                row = models.get_by_role("row", name=re.compile("^demo "))
                await expect(row).to_contain_text("starting")
                loaded.touch()
                await expect(row).to_contain_text("ready")
                loaded.unlink()
                os.kill(gateway.pids()["demo-0"] or 0, signal.SIGKILL)
                await expect(row).to_contain_text("starting")
                loaded.touch()
                await expect(row).to_contain_text("ready")
                events = watched_page.page.locator(".events")
                await expect(events.get_by_role("link")).to_have_text(
                    ["engine demo-0 ready", "engine demo-0 failed", "engine demo-0 ready"]
                )
