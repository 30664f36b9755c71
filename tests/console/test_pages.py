"""Every page as an administrator sees it: without faults, readable, small."""

from collections.abc import Callable

import pytest
from playwright.async_api import expect

from app.auth import Role
from app.console.visitor import PAGES, Page
from tests.app.console.test_roles import MAY_SEE
from tests.console.accessibility import assert_accessible, overflow_of
from tests.console.site import Site
from tests.console.transfer import Transfer
from tests.console.watched_page import ZOOMED
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")
FIRST_VIEW_BYTES = 150 * 1024
# Those that a role sees; the others are of people with an account (test_oidc.py).
SHOWN = [page for page in PAGES if MAY_SEE[page.name]]


def viewer(page: Page) -> Role:
    """Return the role that sees most of a page."""
    return Role.ADMIN if Role.ADMIN in MAY_SEE[page.name] else Role.CLIENT


@pytest.mark.parametrize("shown", SHOWN, ids=lambda page: page.name)
async def test_a_page_is_small_readable_and_has_no_fault(
    site: Site, shown: Page, show: Callable[[str], None]
) -> None:
    transfer = Transfer()
    async with site.visit(viewer(shown)) as watched_page:
        await transfer.measure(watched_page.page)
        await watched_page.page.goto(shown.path, wait_until="load")
        await expect(watched_page.page.get_by_role("heading", level=1)).to_be_visible()
        # A stream of events answers after the page is loaded.
        await wait_until(lambda: all(transfer.by_url.values()))
        first_view = transfer.total
        show(f"{shown.name}: {first_view / 1024:.1f} KiB")
        assert all(transfer.by_url.values()), f"of a cache: {transfer.by_url}"
        assert 0 < first_view < FIRST_VIEW_BYTES, transfer.by_url
        # The dialog of Ctrl+K is loaded when it is used.
        assert not [url for url in transfer.by_url if "quick_find" in url]
        await assert_accessible(watched_page)
        await watched_page.show(ZOOMED)
        assert await overflow_of(watched_page.page) == []


@pytest.mark.parametrize("role", Role)
async def test_the_navigation_has_the_pages_of_the_role(site: Site, role: Role) -> None:
    async with site.visit(role) as watched_page:
        page = watched_page.page
        await page.goto("/console")
        links = page.get_by_role("navigation", name="Pages").get_by_role("link")
        expected = [one.title for one in PAGES if role in MAY_SEE[one.name]]
        await expect(links).to_have_text(expected)


async def test_control_k_finds_pages_and_names_by_keyboard(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto("/console/usage")
        await page.keyboard.press("Control+k")
        box = page.get_by_role("combobox", name="Find")
        await expect(box).to_be_focused()
        options = page.get_by_role("dialog").get_by_role("option")
        await expect(options).to_have_text([f"Page{one.title}" for one in SHOWN[:-1]])
        await page.keyboard.type("demo")
        await expect(options).to_have_text(["Modeldemo", "Enginedemo-0"])
        await assert_accessible(watched_page)
        await page.keyboard.press("ArrowDown")
        await expect(options.last).to_have_attribute("aria-selected", "true")
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(f"{site.origin}/console/engines/demo-0")
        await page.get_by_role("button", name="Find").click()
        await page.keyboard.type("no such thing")
        await expect(page.get_by_text("Nothing has this name or ID.")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(box).to_be_hidden()
        await page.goto("/console/models/demo")
        await assert_accessible(watched_page)
