"""Open pages while the gateway restarts, the session expires, or the browser sleeps."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from app.auth import Role
from app.console import live, sign_in
from tests.app.console.visits import visiting
from tests.console.site import Site, log_in
from tests.console.watched_page import fresh_context, watched
from tests.gateway import ROOT_KEY, free_port, remote, running, settings_for
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def site(own_site: Site) -> Site:
    return own_site


OVERVIEW = "/console/overview"
INTERRUPTED = "The connection to the gateway is interrupted"
HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


@asynccontextmanager
async def one_in_flight(site: Site) -> AsyncIterator[None]:
    """Keep a request in flight."""
    request = asyncio.create_task(site.gateway.chat(fake="hang"))
    await site.fake.until_running()
    try:
        yield
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await site.fake.until_idle()


async def in_flight(page: Page, number: int) -> None:
    """Return when the table of models shows so many requests in flight."""
    row = page.get_by_role("row", name=re.compile("^demo"))
    await expect(row.locator(".loads")).to_have_text(f"in flight {number}")


async def test_a_page_finds_back_when_the_gateway_restarts(
    browser: Browser, tmp_path: Path
) -> None:
    model = {"name": "demo", "engines": [remote(f"http://127.0.0.1:{free_port()}")]}
    port = free_port()
    origin = f"http://127.0.0.1:{port}"
    settings = settings_for(model, run_dir=tmp_path, server={"port": port})
    async with AsyncExitStack() as stack:
        async with running(settings) as gateway:
            context = await stack.enter_async_context(fresh_context(browser, origin))
            await log_in(context, ROOT_KEY)
            watched_page = await stack.enter_async_context(watched(context, origin))
            page = watched_page.page
            # None if the gateway is back before the browser connects again.
            stack.enter_context(watched_page.accepting("console error: .*ERR_", "failed: .*ERR_"))
            await page.goto(OVERVIEW)
            await expect(page.get_by_role("heading", name="Models")).to_be_visible()
            gateway.state.admission.drain()  # as at SIGTERM, which ends streams
        await expect(page.get_by_text(INTERRUPTED)).to_be_visible()
        async with running(settings):
            await expect(page.get_by_text(INTERRUPTED)).to_be_hidden()
            await expect(page).to_have_url(f"{origin}{OVERVIEW}")
            await page.goto("about:blank")


async def test_a_page_returns_to_the_login_when_its_session_expires(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_in, "LIFETIME_S", 2)
    monkeypatch.setattr(live, "CHECK_EVERY", 1)
    async with site.visit(Role.ADMIN, first=True) as watched_page:
        with watched_page.expecting("status 401: .*/console/api/", "console error: .*401"):
            await watched_page.page.goto(OVERVIEW)
            await expect(watched_page.page).to_have_url(re.compile("/console/login.next="))


async def test_a_hidden_page_costs_nothing_and_is_up_to_date_when_it_is_shown(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto(OVERVIEW)
        await wait_until(lambda: site.gateway.server.tasks)
        await page.evaluate(HIDE, True)
        await wait_until(lambda: not site.gateway.server.tasks)
        async with one_in_flight(site):
            await page.evaluate(HIDE, False)
            await in_flight(page, 1)
        await in_flight(page, 0)


async def test_a_browser_that_slept_shows_the_present(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto(OVERVIEW)
        await in_flight(page, 0)
        session = await page.context.new_cdp_session(page)
        await session.send("Page.setWebLifecycleState", {"state": "frozen"})
        async with one_in_flight(site):
            await session.send("Page.setWebLifecycleState", {"state": "active"})
            await in_flight(page, 1)


async def test_two_hundred_pages_at_once_show_the_same_state(site: Site) -> None:
    async with AsyncExitStack() as stack:
        # A client has at most a hundred connections.
        clients = [
            await stack.enter_async_context(visiting(site.gateway, ROOT_KEY)) for _ in range(4)
        ]
        streams = [
            await stack.enter_async_context(client.stream("GET", "/console/api/events/overview"))
            for client in clients
            for _ in range(50)
        ]
        watched_page = await stack.enter_async_context(site.visit(Role.ADMIN))
        await watched_page.page.goto(OVERVIEW)
        await in_flight(watched_page.page, 0)
        viewers = [stack.enter_context(viewing(stream)) for stream in streams]
        await wait_until(lambda: viewers[0] and all(one == viewers[0] for one in viewers))
        idle = dict(viewers[0])
        async with one_in_flight(site):
            await in_flight(watched_page.page, 1)
            await wait_until(
                lambda: all(one == viewers[0] for one in viewers) and viewers[0] != idle
            )


async def test_a_table_stays_sorted_while_it_is_live(site: Site) -> None:
    async with site.visit(Role.ADMIN) as watched_page:
        page = watched_page.page
        await page.goto("/console/engines")
        engines = page.get_by_role("region", name="Engines", exact=True)
        await engines.get_by_role("link", name="In flight").click()
        heading = engines.get_by_role("columnheader", name="In flight")
        await expect(heading).to_have_attribute("aria-sort", "ascending")
        async with one_in_flight(site):
            row = engines.get_by_role("row", name=re.compile("^demo-0"))
            await expect(row.get_by_role("cell").nth(3)).to_have_text("1")
            await expect(heading).to_have_attribute("aria-sort", "ascending")


@contextmanager
def viewing(stream: httpx.Response) -> Iterator[dict[str, str]]:
    """Follow a stream of live regions; yield what a page would show of them."""
    shown: dict[str, str] = {}

    async def follow() -> None:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                shown.update(json.loads(line.removeprefix("data: ")))

    task = asyncio.create_task(follow())
    try:
        yield shown
    finally:
        task.cancel()
