"""Logging in and out, and sessions that end while a page is open."""

import re

import pytest
from playwright.async_api import Page, expect

from app.auth import Role
from app.console import live
from tests.app.tenants import make_key, request_as_root
from tests.console.accessibility import assert_accessible
from tests.console.site import Site, log_in
from tests.console.watched_page import fresh_context, watched

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def enter(page: Page, key: str) -> None:
    """Fill in the login form and send it."""
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Log in").click()


async def test_the_login_page_needs_no_pointer(site: Site) -> None:
    async with site.visit() as watched_page:
        page = watched_page.page
        await page.goto("/console")
        await expect(page).to_have_url(re.compile("/console/login"))
        controls = await page.locator("input:visible, button").all()
        assert len(controls) == 4
        for control in controls:
            await expect(control).to_be_focused()
            await page.keyboard.press("Tab")


async def test_a_wrong_key_is_refused_in_words_on_a_readable_page(site: Site) -> None:
    async with site.visit() as watched_page:
        page = watched_page.page
        await page.goto("/console")
        with watched_page.expecting("status 401: .*/console/login", "console error: .*401"):
            await enter(page, "sk-no-such-key-0123456789")
            await expect(page.get_by_role("alert")).to_contain_text("unknown, disabled or has expi")
            await watched_page.until_fault("console error")
        assert "no-such-key" not in await page.content()
        with watched_page.expecting("status 401: ", "console error: .*401"):
            await assert_accessible(watched_page)
            await page.reload()
            await watched_page.until_fault("console error")


async def test_a_key_opens_the_page_that_was_asked_for_until_the_logout(site: Site) -> None:
    """No script of a page can read the session or the key."""
    key = site.keys[Role.ADMIN]
    async with site.visit() as watched_page:
        page = watched_page.page
        await page.goto("/console/overview")
        await enter(page, key)
        await expect(page).to_have_url(f"{site.origin}/console/overview")
        await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        stored = await page.evaluate(
            "() => document.cookie + JSON.stringify([{...localStorage}, {...sessionStorage}])"
        )
        assert stored == "[{},{}]"
        assert key not in await page.content()
        (cookie,) = await page.context.cookies(f"{site.origin}/console")
        assert cookie.get("httpOnly")
        assert cookie.get("sameSite") == "Strict"
        assert key not in str(cookie)
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_label("API key")).to_be_focused()
        await page.goto("/console/overview")
        await expect(page).to_have_url(re.compile("/console/login"))


async def test_an_open_page_returns_to_the_login_when_its_key_is_disabled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "CHECK_EVERY", 1)
    header = await make_key(site.gateway, "of an open page", role="admin")
    key = header["authorization"].removeprefix("Bearer ")
    async with fresh_context(site.browser, site.origin) as context:
        await log_in(context, key)
        async with watched(context, site.origin) as watched_page:
            page = watched_page.page
            await page.goto("/console/overview")
            await expect(page.get_by_role("heading", name="Models")).to_be_visible()
            made = await request_as_root("/admin/keys", site.gateway, "GET")
            (key_id,) = [one["id"] for one in made["data"] if one["name"] == "of an open page"]
            with watched_page.expecting("status 401: .*/console/api/", "console error: .*401"):
                await request_as_root("/admin/keys", site.gateway, "POST", f"/{key_id}/disable")
                await expect(page).to_have_url(
                    f"{site.origin}/console/login?next=%2Fconsole%2Foverview"
                )
