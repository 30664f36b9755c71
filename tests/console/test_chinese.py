"""The console for who reads Chinese: every page in it, readable, and no English left on it."""

import re
import socket

import pytest
from playwright.async_api import Page, expect

from app.auth import Role
from tests.app.tenants import request_as_root
from tests.console.accessibility import assert_accessible, overflow_of
from tests.console.site import Site
from tests.console.test_pages import SHOWN, viewer
from tests.console.watched_page import PHONE, WIDE, ZOOMED

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def site(own_site: Site) -> Site:
    return own_site


# All that a page says, also to those who do not see it; without code, names of settings and of
# their sections, actions in the audit, and values that engines report.
LEFT_OUT = (
    "script, noscript, style, code, pre, .mono, .settings, #in-force, .value, .choices-of, "
    "[lang=en], main:has(.differences) tbody"
)
READ = ("title", "aria-label", "placeholder", "data-title", "data-confirm")
SAID = """([leftOut, names]) => {
    const found = [];
    const walker = document.createTreeWalker(document, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const {parentElement, data} = walker.currentNode;
        if (!parentElement.closest(leftOut)) found.push(data);
    }
    for (const name of names) {
        const elements = document.querySelectorAll(`[${name}]`);
        const shown = [...elements].filter((one) => !one.closest(leftOut));
        found.push(...shown.map((one) => one.getAttribute(name)));
    }
    return found;
}"""
# Terms and names that stay, and what the site calls its keys, models and engines.
TERMS = re.compile(
    rf"{socket.gethostname()}|\w+'s key|demo[-\w]*|[\w.-]+ · \d[\w.+]+|"
    r"vllm-gateway|vLLM|TTFT|token|p95|API|JSON|Schema|JavaScript|Python|curl|Redis|UTC|CSV|GPUs?|"
    r"CPU|CUDA|GiB|MiB|KV cache|Ctrl|Enter|Shift|Top [pk]|Min p|temperature|prefill|decode|"
    r"x-request-id|URL|admin|operator|manager|owner_manager|auditor|client|/admin|4xx|5xx|graph|"
    r"\bteam\b|\bID\b|default_\w+|\d+ (?:ms|min|h|d|s)\b|/v1/\w+|sk-\S*"
)
# Whose colors and labels are checked, too: these are the same in English.
READABLE = ("/console/overview", "/console/playground")
OTHER_PAGES = ("models/demo", "engines/demo-0", "keys/new", "keys/owners")


async def key_ids(site: Site) -> re.Pattern[str]:
    """Return what matches the ID of a key: random letters, which may look like a word."""
    keys = await request_as_root("/admin/keys", site.gateway, "GET")
    return re.compile("|".join(re.escape(key["id"]) for key in keys["data"]))


async def english_on(page: Page, ids: re.Pattern[str] | None = None) -> list[str]:
    """Return what a page says in English, apart from terms, names and the IDs of keys."""
    said = [text.strip() for text in await page.evaluate(SAID, [LEFT_OUT, READ])]
    if ids is not None:
        said = [ids.sub("", text) for text in said]
    return [text for text in said if re.search(r"[A-Za-z]{2,}", TERMS.sub("", text))]


async def test_every_page_is_in_chinese_and_fits_a_phone(site: Site) -> None:
    await request_as_root("/admin/owners", site.gateway, "PUT", "/team", {"daily_tokens": 9}, 201)
    left: dict[str, list[str]] = {}
    ids = await key_ids(site)
    for role in (Role.ADMIN, Role.CLIENT):
        async with site.visit(role, locale="zh-CN") as watched:
            page = watched.page
            paths = [one.path for one in SHOWN if viewer(one) is role]
            if role is Role.ADMIN:
                paths += [f"/console/{path}" for path in OTHER_PAGES]
            for path in paths:
                await page.goto(path)
                await expect(page.get_by_role("heading", level=1)).to_be_visible()
                left[path] = await english_on(page, ids)
                for width in (ZOOMED, PHONE):
                    await watched.show(width)
                    left[path] += await overflow_of(page)
                await watched.show(WIDE)
                if path in READABLE:
                    await assert_accessible(watched, [PHONE], ["light"])
    found = [f"{path}: {text}" for path, texts in left.items() for text in texts]
    assert not found, "\n".join(found)


async def test_the_switch_changes_the_language_of_pages_and_scripts(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched:
        page = watched.page
        await page.goto("/console/models/demo?tab=settings")
        await page.get_by_role("button", name="中文").click()
        await expect(page.get_by_role("heading", level=2, name="设置")).to_be_visible()
        await expect(page).to_have_url(f"{site.origin}/console/models/demo?tab=settings")
        await page.keyboard.press("Control+k")
        await expect(page.get_by_role("combobox", name="查找")).to_be_focused()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="English").click()
        await expect(page.get_by_role("heading", name="Settings")).to_be_visible()


async def test_the_login_page_is_in_the_language_of_the_browser(site: Site) -> None:
    async with site.visit(locale="zh-CN") as watched:
        page = watched.page
        await page.goto("/console")
        await expect(page.get_by_label("API 密钥")).to_be_visible()
        await assert_accessible(watched, [PHONE], ["light"])
        assert await english_on(page) == []
