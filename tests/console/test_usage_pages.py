"""Usage, configuration and account in the browser: charts, a download, a reload and its plan."""

import csv
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from app.auth import Role
from app.settings import ConfigError, Settings
from app.usage import Usage
from tests.app.console.test_usage_page import use
from tests.app.tenants import request_as_root
from tests.console.accessibility import assert_accessible
from tests.console.site import Site, key_of
from tests.fakes.vllm import Fake
from tests.gateway import remote, running, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="session")
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
FAULT = "line 3: unknown key <b>modles</b>; did you mean models?"

# The browser reports the status that the page explains.
REFUSED = ("status 400", "console error: .* 400")


class File:
    """The configuration that the next reload reads."""

    def __init__(self, demo: dict[str, Any], run_dir: Any) -> None:
        self._demo = demo
        self._run_dir = run_dir
        self.sections: dict[str, Any] = {}
        self.fault = ""

    def read(self) -> Settings:
        if self.fault:
            raise ConfigError([self.fault, "line 5: port: must be below 65536"])
        return settings_for(self._demo, run_dir=self._run_dir, **self.sections)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def file(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[File, Fake]]:
    async with Fake() as fake:
        demo = {"name": "demo", "engines": [remote(fake.url)], "price": {"completion": 2.0}}
        yield File(demo, tmp_path_factory.mktemp("reloaded")), fake


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(browser: Browser, file: tuple[File, Fake]) -> AsyncIterator[Site]:
    """A gateway that can be reloaded."""
    source, fake = file
    async with running(source.read(), source=source.read) as gateway:
        keys = {role: await key_of(gateway, role) for role in Role}
        site = Site(browser=browser, gateway=gateway, fake=fake, keys=keys)
        async with aclosing(site):
            yield site


async def test_usage_is_filtered_charted_and_downloaded(site: Site) -> None:
    made = await request_as_root(
        "/admin/keys", site.gateway, "POST", "", {"name": MARKUP, "daily_tokens": 60_000}, 201
    )
    await use(site.gateway, key_id=made["id"], usage=Usage(45_678, 9012))
    async with site.visit(Role.AUDITOR) as watched_page:
        page = watched_page.page
        await page.goto("/console/usage")
        await page.get_by_text("Days, groups and filters").click()
        await page.get_by_label("Key, by name or ID").fill(made["id"])
        await page.get_by_label("Group by").select_option("day,key,model")
        await page.get_by_role("button", name="Show").click()
        table = page.get_by_role("region", name="By day, key, model")
        await expect(table.get_by_text("45,678")).to_be_visible()
        await expect(table.get_by_role("link", name=MARKUP)).to_be_visible()
        await expect(page.get_by_role("img", name="Cost a day from")).to_be_visible()
        await expect(page.get_by_text("54,690 of 60,000 tokens, 91 %")).to_be_visible()
        await assert_accessible(watched_page)
        async with page.expect_download() as download:
            await page.get_by_role("link", name="Download CSV").click()
        path = await (await download.value).path()
        (row,) = csv.DictReader(path.read_text().splitlines())
        assert (row["key_name"], row["total_tokens"]) == (MARKUP, "54690")


async def test_a_wrong_period_is_explained(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched_page:
        with watched_page.expecting(*REFUSED):
            await watched_page.page.goto("/console/usage?from=2026-11-02&to=2026-11-01")
            alert = watched_page.page.get_by_role("alert")
            await expect(alert).to_contain_text("must not be after")
            await watched_page.until_fault("console")
        await assert_accessible(watched_page)


async def test_a_reload_is_planned_confirmed_and_done(site: Site, file: tuple[File, Fake]) -> None:
    source, _ = file
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto("/console/configuration")
        await expect(page.get_by_text("Nothing differs")).to_be_visible()
        await expect(page.get_by_role("button", name="Reload")).to_be_disabled()
        source.sections = {"server": {"drain_timeout_s": 7}}
        await page.get_by_role("button", name="Compare again").click()
        await expect(page.get_by_text("server.drain_timeout_s 30.0 → 7.0")).to_be_visible()
        await assert_accessible(watched_page)
        await page.get_by_role("button", name="Reload").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_text("No request is affected.")).to_be_visible()
        await dialog.get_by_role("button", name="Back").click()
        assert site.gateway.state.settings.server.drain_timeout_s != 7
        await page.get_by_role("button", name="Reload").click()
        await page.get_by_role("dialog").get_by_role("button", name="Reload").click()
        await expect(page.get_by_text("Nothing differs")).to_be_visible()
        row = page.get_by_role("row", name="drain_timeout_s")
        await expect(row.get_by_role("cell", name="7.0")).to_be_visible()
        assert site.gateway.state.settings.server.drain_timeout_s == 7


async def test_faults_of_the_file_are_shown_in_words(site: Site, file: tuple[File, Fake]) -> None:
    source, _ = file
    source.fault = FAULT
    try:
        async with site.visit(Role.ADMIN) as watched_page:
            page = watched_page.page
            with watched_page.expecting(*REFUSED):
                await page.goto("/console/configuration")
                await expect(page.get_by_text(FAULT)).to_be_visible()
                await watched_page.until_fault("console")
            await expect(page.get_by_text("line 5: port")).to_be_visible()
            await expect(page.get_by_role("button", name="Reload")).to_be_disabled()
    finally:
        source.fault = ""


async def test_an_account_shows_its_limits_and_usage(site: Site) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    header = {"authorization": f"Bearer {site.keys[Role.CLIENT]}"}
    await site.gateway.client.post("/v1/chat/completions", json=body, headers=header)
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/account")
        await expect(page.get_by_role("heading", name="client's key")).to_be_visible()
        await expect(page.get_by_text(" of 600 requests")).to_be_visible()
        await assert_accessible(watched_page)
