"""The pages of keys: a secret is shown once, and roles see what they may do."""

import re
from urllib.parse import quote

import pytest
from playwright.async_api import expect

from app.auth import Role
from tests.app.tenants import make_key, request_as_root
from tests.console.accessibility import assert_accessible
from tests.console.site import Site
from tests.console.watched_page import PHONE

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEYS = "/console/keys"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"


async def test_the_secret_of_a_new_key_is_shown_once_and_works(site: Site) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    async with site.visit(Role.MANAGER, permissions=allowed) as watched_page:
        page = watched_page.page
        await page.goto(f"{KEYS}/new")
        await page.get_by_label("Name", exact=True).fill("Made here")
        await page.get_by_label("All, also future ones").uncheck()
        await page.get_by_label("demo", exact=True).check()
        await page.get_by_role("button", name="Create key").click()
        dialog = page.get_by_role("dialog")
        secret = await dialog.get_by_label("The key").inner_text()
        await assert_accessible(watched_page)
        await dialog.get_by_role("button", name="Copy", exact=True).click()
        await expect(dialog.get_by_text("Copied.")).to_be_visible()
        assert await page.evaluate("() => navigator.clipboard.readText()") == secret
        await dialog.get_by_role("button", name="Copy curl").click()
        await page.wait_for_function(
            "() => navigator.clipboard.readText().then((t) => t.includes('curl'))"
        )
        command = await page.evaluate("() => navigator.clipboard.readText()")
        assert secret in command
        assert "/v1/chat/completions" in command
        await dialog.get_by_role("button", name="I have copied it").click()
        await expect(page.get_by_role("heading", name="Made here")).to_be_visible()
        assert secret not in await page.content()
        await page.goto(KEYS)
        await page.get_by_role("link", name="Made here").click()
        await expect(page.get_by_role("heading", name="Made here")).to_be_visible()
        assert secret not in await page.content()
        await assert_accessible(watched_page)
    answer = await site.gateway.client.get(
        "/v1/models", headers={"authorization": f"Bearer {secret}"}
    )
    assert answer.status_code == 200
    assert [model["id"] for model in answer.json()["data"]] == ["demo"]


async def test_a_manager_makes_keys_of_clients_only(site: Site) -> None:
    for role, roles in ((Role.MANAGER, [Role.CLIENT]), (Role.ADMIN, list(Role))):
        async with site.visit(role) as watched_page:
            await watched_page.page.goto(f"{KEYS}/new")
            options = watched_page.page.get_by_label("Role").get_by_role("option")
            await expect(options).to_have_text([str(one) for one in roles])


async def test_an_auditor_sees_keys_and_nothing_that_changes_them(site: Site) -> None:
    async with site.visit(Role.AUDITOR) as watched_page:
        page = watched_page.page
        await page.goto(KEYS)
        await expect(page.get_by_role("link", name="Create key")).to_have_count(0)
        await page.get_by_role("link", name="client's key").click()
        await expect(page.get_by_role("heading", name="client's key")).to_be_visible()
        for name in ("Rotate", "Disable", "Delete", "Save"):
            await expect(page.get_by_role("button", name=re.compile(name))).to_have_count(0)


async def test_a_disabled_key_is_enabled_again(site: Site) -> None:
    await make_key(site.gateway, "To be disabled")
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto(KEYS)
        await page.get_by_role("link", name="To be disabled").click()
        await page.wait_for_load_state()  # buttons act once their script is there
        await page.get_by_role("button", name="Disable").click()
        await page.get_by_role("dialog").get_by_role("button", name="Disable").click()
        await page.get_by_role("button", name="Enable").click()
        await expect(page.get_by_role("button", name="Disable")).to_be_visible()


async def test_a_phone_shows_the_budget_of_a_key_as_a_bar(site: Site) -> None:
    await make_key(site.gateway, "With a budget", monthly_tokens=1000)
    await make_key(site.gateway, "Without a budget")
    async with site.visit(Role.MANAGER) as watched_page:
        page = watched_page.page
        await page.set_viewport_size({"width": PHONE, "height": 800})
        await page.goto(KEYS)
        bar = page.get_by_role("progressbar", name="Budget of With a budget used this month")
        await expect(bar).to_be_visible()
        await expect(page.get_by_text("no budget").first).to_be_hidden()


async def test_names_of_keys_are_text(site: Site) -> None:
    await make_key(site.gateway, MARKUP, owner=MARKUP)
    owner = f"/{quote(MARKUP, safe='')}"
    limits = {"requests_per_minute": 1}
    await request_as_root("/admin/owners", site.gateway, "PUT", owner, limits, 201)
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto(KEYS)
        await page.get_by_role("rowheader").get_by_role("link", name=MARKUP).click()
        await expect(page.get_by_role("heading", name=MARKUP)).to_be_visible()
        await page.goto(f"{KEYS}/owners")
        await page.get_by_role("link", name=MARKUP, exact=True).click()
        await expect(page.get_by_role("heading", name="Budgets and limits")).to_be_visible()
        await assert_accessible(watched_page)
