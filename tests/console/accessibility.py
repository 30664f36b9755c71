"""Whether a page is readable at each width and in each color scheme: axe-core, and no overflow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import axe_playwright_python
from playwright.async_api import Page

from tests.console.watched_page import PHONE, WIDE, Scheme, WatchedPage

_AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
_ONCE = Path(__file__).with_name("axe_once.js").read_text(encoding="utf-8")
# Where the user asked for no motion, colors do not fade from one scheme to the other.
_RUN = """async ({colorsOnly, passed}) => {
    const moves = () => document.getAnimations().some((one) => one.playState === "running");
    const end = performance.now() + 30_000;
    while (moves()) {
        if (performance.now() > end) throw new Error("an animation does not end");
        await new Promise(requestAnimationFrame);
    }
    return await runAxe(colorsOnly, passed.split(" "));
}"""
_OVERFLOWING = """() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    const wide = [...document.body.querySelectorAll("*")].filter(
        (element) => element.getBoundingClientRect().right > width + 1);
    return ["the page is wider than the window", ...wide.slice(-3).map(
        (element) => element.outerHTML.slice(0, 120))];
}"""

# The looks whose contrast suffices (axe_once.js).
_passed: set[str] = set()


async def assert_accessible(
    watched: WatchedPage,
    widths: Sequence[int] = (WIDE, PHONE),
    schemes: Sequence[Scheme] = get_args(Scheme),
) -> None:
    """Raise AssertionError unless the page is readable at both widths, light and dark."""
    page = watched.page
    # evaluate() is not subject to the page's policy, which stays in force for the page itself.
    await page.evaluate(f"{_AXE}\n{_ONCE}")
    found: list[str] = []
    for number, width in enumerate(widths):
        # What a page is made of is the same in each color scheme: in the second, only colors are
        # checked. Each step changes one thing only.
        ordered = schemes if number % 2 == 0 else schemes[::-1]
        for scheme in ordered:
            await watched.show(width, scheme)
            given = {"colorsOnly": scheme != ordered[0], "passed": " ".join(_passed)}
            run = await page.evaluate(_RUN, given)
            _passed.update(run["passed"])
            faults = [_text(one) for one in run["violations"]]
            faults += await overflow_of(page)
            found += [f"{width} px, {scheme}: {fault}" for fault in faults]
    assert not found, f"{page.url}:\n" + "\n".join(found)
    await watched.show(WIDE)


async def overflow_of(page: Page) -> list[str]:
    """Return what makes a page wider than its window; empty: it fits."""
    found: list[str] = await page.evaluate(_OVERFLOWING)
    return found


def _text(violation: dict[str, Any]) -> str:
    nodes = violation["nodes"]
    where = "; ".join(f"{node['html'][:160]} {_reason(node)}" for node in nodes[:4])
    return f"{violation['id']} ({len(nodes)}): {violation['help']}: {where}"


def _reason(node: dict[str, Any]) -> str:
    checks = [*node["any"], *node["all"], *node["none"]]
    return ", ".join(check["message"] for check in checks[:2])
