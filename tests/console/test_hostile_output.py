"""Output of models in the playground is text and Markdown, and can do nothing."""

import pytest
from playwright.async_api import Page, expect

from app.auth import Role
from tests.console.site import Site
from tests.console.test_playground import ask, complete

pytestmark = pytest.mark.asyncio(loop_scope="session")
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
# Each is an answer of a model; a page that took it for more than text would alert or load.
OUTPUTS = (
    MARKUP,
    "<svg onload=alert(1)><iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[click](javascript:alert(1)) [other](data:text/html,<script>alert(1)</script>)",
    "![picture](http://example.test/track.png) ![own](/console/logout)",
    "<style>body { display: none }</style><base href='http://example.test/'>",
    "```html\n</code></pre><script>alert(1)</script>\n```",
    "<form action='http://example.test'><input name=key></form><a href='//example.test'>x</a>",
    "<meta http-equiv=refresh content='0;url=http://example.test'>",
    "\x1b[31mred\x1b[0m \x00 \u202egnp.exe",
    "&lt;script&gt;alert(1)&lt;/script&gt; {{7*7}} ${7*7}",
)
FOREIGN = """() => [...document.querySelectorAll(
    "#turns :is(script, iframe, object, embed, base, meta, style, link, form[action]),"
    + "#turns img:not([src^='data:']), #turns [onerror], #turns [onload]"
)].map((element) => element.outerHTML)"""
LINKS = """() => [...document.querySelectorAll("#turns a[href]")].map((a) => a.protocol)"""


async def assert_harmless(page: Page) -> None:
    """Raise AssertionError if an element of a model's making could do something."""
    assert await page.evaluate(FOREIGN) == []
    assert set(await page.evaluate(LINKS)) <= {"http:", "https:"}


async def test_output_of_a_model_is_text(site: Site) -> None:
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        for output in OUTPUTS:
            site.fake.fault = f"say:<think>{output}</think>{output}"
            answer = await ask(page, output)
            await complete(answer)
            await expect(answer.locator(".markdown")).to_be_visible()
            await assert_harmless(page)
        # As they were kept by the browser, too.
        await page.reload()
        shown = page.get_by_role("article").locator(".markdown")
        await expect(shown).to_have_count(len(OUTPUTS))
        await expect(shown.last).to_be_visible()
        await assert_harmless(page)
        assert page.url == f"{site.origin}/console/playground"
