"""The console below a prefix, through a proxy that ends TLS."""

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from app.auth import Role
from tests.console.site import serving_site
from tests.console.watched_page import fresh_context, watched
from tests.reverse_proxies import BEHIND_PROXY, Nginx

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_pages_work_below_a_prefix(browser: Browser, tmp_path: Path) -> None:
    async with serving_site(browser, tmp_path, server=BEHIND_PROXY) as site:
        proxy = Nginx(site.gateway.port)
        await asyncio.to_thread(proxy.__enter__)
        try:
            async with (
                fresh_context(browser, proxy.origin, ignore_https_errors=True) as context,
                watched(context, proxy.origin) as visit,
            ):
                page = visit.page
                await page.goto(f"{proxy.url}/")
                await expect(page).to_have_url(re.compile(f"{proxy.url}/console/login"))
                await page.goto(f"{proxy.url}/console/engines")
                await page.get_by_label("API key").fill(site.keys[Role.ADMIN])
                await page.get_by_role("button", name="Log in").click()
                await expect(page).to_have_url(f"{proxy.url}/console/engines")
                for name in (
                    await page.get_by_role("navigation", name="Pages")
                    .get_by_role("link")
                    .all_inner_texts()
                ):
                    await page.get_by_role("link", name=name, exact=True).first.click()
                    await expect(page).to_have_url(f"{proxy.url}/console/{name.strip().lower()}")
                # A live region, which a stream of events fills.
                await page.goto(f"{proxy.url}/console/overview")
                await expect(page.get_by_role("cell", name="demo").first).to_be_visible()
                async with page.expect_response(f"{proxy.url}/console/api/events/*") as events:
                    await page.reload()
                assert (await events.value).status == 200
                await page.keyboard.press("Control+k")
                await page.get_by_role("combobox").fill("demo-0")
                await page.get_by_role("option", name="demo-0").click()
                await expect(page).to_have_url(f"{proxy.url}/console/engines/demo-0")
                await page.goto(f"{proxy.url}/console/keys/new")
                await page.get_by_label("Name", exact=True).fill("below")
                await page.get_by_role("button", name="Create key").click()
                await expect(page.locator("#secret-dialog")).to_contain_text(f"{proxy.url}/v1")
                await page.get_by_role("button", name="I have copied it").click()
                await expect(page).to_have_url(re.compile(f"{proxy.url}/console/keys/(?!new)"))
                await page.get_by_role("button", name="Log out").click()
                await expect(page).to_have_url(f"{proxy.url}/console/login")
        finally:
            proxy.remove()
