"""The page of requests: those in flight, cancel, those that ended, and where the time went."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from playwright.async_api import Page, expect

from app.auth import Role
from app.console.request_regions import FIRST_ROWS
from tests.console.accessibility import assert_accessible
from tests.console.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="session")
REQUESTS = "/console/requests"


@asynccontextmanager
async def streaming(site: Site, role: Role) -> AsyncIterator["asyncio.Task[str]"]:
    """Run a long stream of a role's key, which returns what it got when it ends.

    The engine has begun it when the body begins.
    """
    headers = {"authorization": f"Bearer {site.keys[role]}"}
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "fake": "tokens:10000:20",
    }

    async def read() -> str:
        got = ""
        with contextlib.suppress(httpx.RemoteProtocolError):  # it does not pass for whole
            async with site.gateway.client.stream(
                "POST", "/v1/chat/completions", json=body, headers=headers
            ) as response:
                async for text in response.aiter_text():
                    got += text
        return got

    request = asyncio.create_task(read())
    await site.fake.until_running()
    try:
        yield request
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await site.fake.until_idle()


async def cancel(page: Page) -> None:
    """Cancel the only request in flight, and confirm it."""
    await page.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("the engine stops generating")
    await dialog.get_by_role("button", name="Cancel the request").click()


async def test_a_running_request_is_shown_and_canceled(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched_page, streaming(site, Role.CLIENT) as request:
        page = watched_page.page
        await page.goto(REQUESTS)
        row = page.get_by_role("region", name="Requests in flight").get_by_role("row").nth(1)
        await expect(row).to_contain_text("client's key")
        await expect(row).to_contain_text("demo")
        await assert_accessible(watched_page)
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("dialog").get_by_role("button", name="Back").click()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert not request.done()
        await cancel(page)
        await site.fake.until_idle()
        assert "request_canceled" in await request
        ended = page.get_by_role("region", name="Requests that have ended")
        await expect(ended.get_by_role("row").nth(1)).to_contain_text("canceled")


async def test_only_an_administrator_cancels_requests_of_others(site: Site) -> None:
    for role in (Role.AUDITOR, Role.MANAGER):
        async with site.visit(role) as watched_page, streaming(site, Role.CLIENT):
            await watched_page.page.goto(REQUESTS)
            region = watched_page.page.get_by_role("region", name="Requests in flight")
            await expect(region).to_be_visible()
            await expect(watched_page.page.get_by_role("button", name="Cancel")).to_have_count(0)


async def test_a_client_sees_and_cancels_its_own_requests_only(site: Site) -> None:
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        in_flight = page.get_by_role("region", name="Requests in flight")
        others = asyncio.create_task(site.gateway.chat(fake="hang"))
        await site.fake.until_running()
        await page.goto(REQUESTS)
        await expect(page.get_by_text("No request is in flight.")).to_be_visible()
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)
        await site.fake.until_idle()
        async with streaming(site, Role.CLIENT):
            await expect(in_flight.get_by_role("row")).to_have_count(2)
            await cancel(page)
            await site.fake.until_idle()


async def test_one_request_says_where_its_time_went(site: Site) -> None:
    await site.gateway.chat()
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto(REQUESTS)
        ended = page.get_by_role("region", name="Requests that have ended")
        await ended.get_by_role("rowheader").get_by_role("link").first.click()
        await expect(page).to_have_url(re.compile(f"{REQUESTS}/\\w+"))
        phases = page.get_by_role("region", name="Phases")
        await expect(phases.get_by_role("row")).not_to_have_count(1)
        await expect(page.get_by_role("img", name=re.compile("phases"))).to_be_visible()
        await assert_accessible(watched_page)


async def test_rows_below_the_window_come_once_the_first_are_painted(site: Site) -> None:
    for _ in range(FIRST_ROWS + 5):
        await site.gateway.chat()
    async with site.visit(Role.ADMIN, java_script_enabled=False) as watched_page:
        await watched_page.page.goto(REQUESTS)
        rows = watched_page.page.locator("[data-live=ended] tbody tr")
        await expect(rows).to_have_count(FIRST_ROWS)
    async with site.visit(Role.ADMIN) as watched_page:
        await watched_page.page.goto(REQUESTS)
        rows = watched_page.page.locator("[data-live=ended] tbody tr")
        await expect(rows.nth(FIRST_ROWS + 4)).to_be_visible()


async def test_filters_are_chips_that_need_no_script(site: Site) -> None:
    await site.gateway.chat()
    async with site.visit(Role.ADMIN, java_script_enabled=False) as watched_page:
        page = watched_page.page
        await page.goto(REQUESTS)
        filters = page.get_by_role("search", name="Filters")
        await filters.get_by_text("Outcome", exact=True).click()
        await filters.get_by_role("link", name="Completed").click()
        await expect(page).to_have_url(re.compile("outcome=completed"))
        ended = page.get_by_role("region", name="Requests that have ended")
        await ended.get_by_role("link", name="Duration").click()
        await expect(page).to_have_url(re.compile("order=slowest"))
        heading = ended.get_by_role("columnheader", name="Duration")
        await expect(heading).to_have_attribute("aria-sort", "descending")
