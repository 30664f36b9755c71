"""Takes the screenshots of the console: `make screenshots` writes docs/images/*.png.

With ALL=yes it writes each page, whole, at both widths, light and dark, to var/screenshots/.
"""

import asyncio
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from playwright.async_api import Browser, Page, expect

from tests.console.busy_site import busy_site, traffic
from tests.console.chromium import chromium
from tests.console.demo_site import DemoSite
from tests.console.pictures import save_small
from tests.console.site import log_in
from tests.console.test_playground import ask, complete
from tests.console.watched_page import PHONE, WIDE, Scheme, fresh_context, watched
from tests.e2e.deployment import ADMIN_KEY, ROOT

IMAGES = ROOT / "docs" / "images"
ALL = "--all"


async def nothing(_: Page) -> None:
    """Take the page as it opens."""


async def compare(page: Page) -> None:
    """Ask one question with two settings, and open the first thought."""
    await page.get_by_role("button", name="Add a column").click()
    await ask(page, "Which is larger, 9.9 or 9.11?")
    answers = page.get_by_role("article")
    await expect(answers).to_have_count(2)
    for answer in await answers.all():
        await complete(answer)
        await expect(answer.locator(".markdown")).to_be_visible()
    await answers.first.get_by_text("Thought").first.click()
    await page.evaluate("() => scrollTo(0, document.documentElement.scrollHeight)")


async def show_one(page: Page) -> None:
    """Open one of the requests that ended."""
    ended = page.get_by_role("region", name="Requests that have ended")
    await ended.get_by_role("rowheader").get_by_role("link").first.click()
    await expect(page.get_by_role("heading", name="Where its")).to_be_visible()


async def show_log(page: Page) -> None:
    """Wait for the lines of the engine's log."""
    await expect(page.locator(".log .line").first).to_be_visible()


async def with_charts(page: Page) -> None:
    """Show the first charts below the figures, too."""
    size = page.viewport_size
    assert size is not None
    await page.set_viewport_size({"width": size["width"], "height": 1100})


async def edit(page: Page) -> None:
    """Change a model, and have it checked."""
    await page.get_by_label("Aliases").fill("gpt-4o-mini\ngpt-4o")
    await page.get_by_label("Unload after, in seconds").focus()
    await page.get_by_role("button", name="Check").click()
    await expect(page.get_by_role("button", name="Write and reload")).to_be_visible()


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture of a page; `prepare` brings the page into the state to show."""

    name: str
    path: str
    width: int = WIDE
    scheme: Scheme = "light"
    key: str | None = None  # the name of the key that logs in; None: the administrator's
    logged_in: bool = True
    prepare: Callable[[Page], Awaitable[None]] = nothing
    locale: str = "en-US"
    whole: bool = False  # also what is below the window


SHOTS = (
    Shot("console-login", "/console/login", logged_in=False),
    # Before the sign-ins of the other pictures.
    Shot("console-audit", "/console/audit"),
    Shot("console-overview", "/console/overview?hours=24", prepare=with_charts),
    Shot("console-overview-dark", "/console/overview?hours=24", scheme="dark", prepare=with_charts),
    Shot("console-overview-phone", "/console/overview", width=PHONE),
    Shot("console-overview-zh", "/console/overview?hours=24", prepare=with_charts, locale="zh-CN"),
    Shot("console-models", "/console/models"),
    Shot("console-model", "/console/models/demo"),
    Shot("console-model-edit", "/console/configuration/model?name=demo", prepare=edit),
    Shot("console-engines", "/console/engines"),
    Shot("console-engine", "/console/engines/demo-0?tab=log", prepare=show_log),
    Shot("console-requests", "/console/requests"),
    Shot("console-requests-dark", "/console/requests", scheme="dark"),
    Shot("console-requests-phone", "/console/requests", width=PHONE),
    Shot("console-requests-zh", "/console/requests", locale="zh-CN"),
    Shot("console-request", "/console/requests", prepare=show_one),
    Shot("console-playground", "/console/playground", prepare=compare),
    Shot("console-keys", "/console/keys"),
    Shot("console-key-new", "/console/keys/new"),
    Shot("console-owners", "/console/keys/owners"),
    Shot("console-owner", "/console/owners/shop"),
    Shot("console-usage", "/console/usage"),
    Shot("console-configuration", "/console/configuration"),
    Shot("console-account", "/console/account", key="Web shop"),
)


def every_page() -> list[Shot]:
    """Return each page at both widths, light and dark."""
    pages = [
        one for one in SHOTS if (one.width, one.scheme, one.locale) == (WIDE, "light", "en-US")
    ]
    return [
        replace(page, name=f"{page.name}-{width}-{scheme}", width=width, scheme=scheme, whole=True)
        for page, width, scheme in product(pages, (WIDE, PHONE), get_args(Scheme))
    ]


# Places of the machine that takes the pictures, and how they are shown.
HIDE_PLACES = """(places) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const [place, shown] of places) {
      walker.currentNode.data = walker.currentNode.data.replaceAll(place, shown);
    }
  }
  for (const field of document.querySelectorAll("input")) {
    for (const [place, shown] of places) field.value = field.value.replaceAll(place, shown);
  }
}"""


def places(site: DemoSite) -> list[tuple[str, str]]:
    """Return paths and what a picture has in their place, the longest first."""
    found = {
        str(site.deployment.run_dir.parent): "/var/lib/vllm-gateway",
        sys.prefix: "/opt/vllm-gateway",
        str(ROOT): "/srv",
        f"{socket.gethostname()} ·": "gateway-1 ·",
    }
    return sorted(found.items(), key=lambda one: -len(one[0]))


async def take(browser: Browser, site: DemoSite, shot: Shot, directory: Path) -> int:
    """Take a picture; return its size in bytes. Raises AssertionError for a page with faults."""
    origin = site.deployment.url
    async with fresh_context(browser, origin, shot.locale) as context:
        if shot.logged_in:
            await log_in(context, ADMIN_KEY if shot.key is None else site.keys[shot.key])
        async with watched(context, origin) as watched_page:
            page = watched_page.page
            await watched_page.show(shot.width, shot.scheme)
            await page.goto(shot.path)
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
            await shot.prepare(page)
            await page.evaluate(HIDE_PLACES, places(site))
            png = await page.screenshot(full_page=shot.whole)
    file = directory / f"{shot.name}.png"
    return file.write_bytes(png) if shot.whole else save_small(png, file)


async def take_all(site: DemoSite, directory: Path, shots: Sequence[Shot]) -> None:
    """Take pictures; print their sizes."""
    async with traffic(site), chromium() as browser:
        with site.admin() as admin:
            # It loads in the first pictures, and is there to compare in those of engines.
            admin.post("/admin/models/demo-large/load").raise_for_status()
        for shot in shots:
            size = await take(browser, site, shot, directory)
            print(f"{shot.name}.png: {size / 1000:.1f} kB")


def main(names: list[str]) -> None:
    """Start a gateway on the demo model and take the named pictures of it, or those of the docs."""
    shots: Sequence[Shot] = [one for one in SHOTS if not names or one.name in names]
    images = IMAGES
    if names == [ALL]:
        shots, images = every_page(), ROOT / "var" / "screenshots"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, busy_site(Path(directory)) as site:
        asyncio.run(take_all(site, images, shots))


if __name__ == "__main__":
    main(sys.argv[1:])
