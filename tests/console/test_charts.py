"""Charts of the overview: their crosshair by pointer and keyboard, and the requests behind it."""

import re
import time
from datetime import datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Page, expect

from app.auth import Role
from app.telemetry.metrics import TTFT_BUCKETS
from app.usage import LoadMinute, LoadMinutes
from tests.console.accessibility import assert_accessible
from tests.console.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def store_minutes(site: Site) -> None:
    """Store six hours: 1,000 tokens a second, and from the middle on 3,000."""
    minutes = LoadMinutes(site.gateway.state.database, "earlier")
    now = int(time.time() // 60)
    ttft = (0, 0, 5, *(0,) * (len(TTFT_BUCKETS) - 2))
    for number in range(now - 362, now):
        tokens = 60 * (1000 if number < now - 180 else 3000)
        await minutes.write(LoadMinute(number, tokens, 2, 1, 4, 0, ttft))


async def test_all_charts_show_the_moment_that_is_pointed_at(own_site: Site) -> None:
    # The charts of a shared one would have the tokens of other tests.
    await store_minutes(own_site)
    async with own_site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto("/console/overview?hours=6")
        plots = page.locator(".plot")
        tokens = page.locator("figure", has_text="Tokens per second").locator(".legend")
        await expect(tokens).to_contain_text("3,000")
        await expect(plots.first.locator(".value")).to_have_text(["1,000", "2,000", "3,000"])
        box = await plots.first.bounding_box()
        assert box is not None
        await plots.first.hover(position={"x": box["width"] / 4, "y": 80})
        await expect(page.locator(".crosshair")).to_have_count(4)
        await expect(tokens).to_contain_text("1,000")
        await expect(page.locator("figure", has_text="Errors").locator(".legend")).to_contain_text(
            "2"
        )
        await page.mouse.move(0, 0)
        await expect(page.locator(".crosshair")).to_have_count(0)
        await plots.first.focus()
        await page.keyboard.press("End")
        await page.keyboard.press("PageDown")
        await expect(plots.first).to_have_attribute("aria-valuetext", re.compile("Generated 3,000"))
        await assert_accessible(watched_page)
        await plots.last.focus()
        await page.keyboard.press("Shift+PageDown")
        await expect(page.locator(".selected")).to_have_count(4)
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(re.compile(r"/requests\?from=.*Z&to=.*Z&status=5xx"))
        assert requested(page) == timedelta(minutes=36)
        await page.go_back()
        await plots.first.hover(position={"x": box["width"] / 4, "y": 80})
        await page.mouse.down()
        await plots.first.hover(position={"x": box["width"] / 2, "y": 20})
        await expect(page.locator(".selected")).to_have_count(4)
        await page.mouse.up()
        await expect(page.get_by_role("heading", name="Requests", level=1)).to_be_visible()
        assert abs(requested(page) - timedelta(minutes=90)) < timedelta(minutes=2)


def requested(page: Page) -> timedelta:
    """Return how much time the page of requests shows."""
    query = parse_qs(urlsplit(page.url).query)
    begin, end = (datetime.fromisoformat(query[name][0]) for name in ("from", "to"))
    return end - begin
