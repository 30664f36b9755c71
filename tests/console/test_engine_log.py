"""The log on an engine's page, whatever is in it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.app.console.fleet import HOSTILE, fleet
from tests.console.accessibility import assert_accessible
from tests.console.site import log_in
from tests.console.watched_page import WatchedPage, fresh_context, watched
from tests.gateway import ROOT_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = 10 * 2**20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def visit(browser: Browser, directory: Path) -> AsyncIterator[WatchedPage]:
    """A page of a gateway with engines in every state, which has its files in a directory."""
    async with fleet(directory) as gateway:
        origin = f"http://127.0.0.1:{gateway.port}"
        async with fresh_context(browser, origin) as context:
            await log_in(context, ROOT_KEY)
            async with watched(context, origin) as page:
                yield page


async def test_a_discovered_server_without_requests_is_on_the_page(
    visit: WatchedPage, directory: Path
) -> None:
    page = visit.page
    await page.goto("/console/overview")
    await page.get_by_role("link", name="Servers and reasons").click()
    servers = page.get_by_role("region", name="Discovered servers without requests")
    await expect(servers).to_contain_text("Connection refused")
    await assert_accessible(visit)
    (directory / "engines.json").write_text("[]")
    await expect(servers).to_be_hidden()
    visit.assert_faultless()


async def test_a_line_of_ten_megabytes_is_cut(visit: WatchedPage, directory: Path) -> None:
    page = visit.page
    log = directory / "ready-0" / "engine.log"
    log.write_text(f"{'x' * LONG}\nINFO: before\n")
    await page.goto("/console/engines/ready-0?tab=log")
    lines = page.locator(".log .line")
    await expect(lines).to_have_text(["INFO: before"])
    with log.open("a") as file:
        file.write(f"{'y' * LONG}\nERROR: after \x1b[31m{HOSTILE}\n")
    await expect(lines.last).to_have_text(f"ERROR: after {HOSTILE}")
    # It arrives in parts, each of which is cut.
    shown = await lines.all_text_contents()
    assert shown[1].startswith("y" * 4000)
    assert max(map(len, shown)) < 5000
    await page.get_by_label("Level").select_option("error")
    await expect(page.locator("#log-state")).to_contain_text(f"1 of {len(shown)} lines")
    await assert_accessible(visit)
    visit.assert_faultless()
