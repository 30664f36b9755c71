"""The tests' own means: each fault of a page is found, and a page without faults passes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.console.accessibility import assert_accessible
from tests.console.faulty_site import html, scripted, serving
from tests.console.transfer import Transfer
from tests.console.watched_page import WIDE, WatchedPage, fresh_context

pytestmark = pytest.mark.asyncio(loop_scope="session")
Files = dict[str, tuple[str, str]]


SERVED: Files = {}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def empty(browser: Browser) -> AsyncIterator[WatchedPage]:
    """An empty page of the site of SERVED."""
    async with serving(SERVED) as origin, fresh_context(browser, origin) as context:
        watched = WatchedPage(await context.new_page(), origin)
        await watched.watch()
        yield watched


@asynccontextmanager
async def opened(empty: WatchedPage, files: Files) -> AsyncIterator[WatchedPage]:
    """Open / of the site with other files; do not look at its faults."""
    SERVED.clear()
    SERVED.update(files)
    await empty.page.goto("/")
    yield empty
    for page in empty.page.context.pages:
        if page is not empty.page:
            await page.close()
    await empty.page.goto("about:blank")
    empty.faults.clear()


def page(body: str, head: str = "") -> Files:
    """A site of one page."""
    return {"/": ("text/html", html(body, head))}


FAULTS = {
    "console error": (scripted("console.error('broken')"), "console error: broken"),
    "console warning": (scripted("console.warn('odd')"), "console warning: odd"),
    "exception": (scripted("throw new Error('broken')"), "exception: broken"),
    "rejected promise": (scripted("Promise.reject(new Error('broken'))"), "exception: broken"),
    "inline script": (page("<script>1</script>"), "policy: script-src-elem inline"),
    "inline style": (page('<p style="color: red">a</p>'), "policy: style-src-attr inline"),
    "event handler": (page('<p onclick="1">a</p>'), "policy: script-src-attr inline"),
    "eval": (scripted("try { eval('1') } catch {}"), "policy: script-src eval"),
    "image of another origin": (
        page('<img alt="a" src="http://example.test/a.png">'),
        "policy: img-src http://example.test/a.png",
    ),
    "link to another origin": (
        scripted("location.href = 'http://example.test/a'"),
        "other origin: http://example.test/a",
    ),
    "failed request": (
        scripted("location.href = 'http://example.test/a'"),
        "failed: net::ERR_NAME_NOT_RESOLVED GET http://example.test/a",
    ),
    "missing file": (page("", '<link rel="stylesheet" href="/none.css">'), "status 404: "),
    "dialog": (scripted("alert('hello')"), "dialog: hello"),
    "window": (scripted("window.open('/other')"), "window: "),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_of_a_page_is_recorded(empty: WatchedPage, name: str) -> None:
    files, expected = FAULTS[name]
    async with opened(empty, files) as watched:
        await watched.until_fault(expected)
        with pytest.raises(AssertionError):
            watched.assert_faultless()


async def test_a_page_without_faults_passes(empty: WatchedPage) -> None:
    files = scripted("await (await fetch('/script.js')).text(); document.title = 'Done'")
    async with opened(empty, files) as watched:
        await watched.page.wait_for_function("document.title === 'Done'")
        await assert_accessible(watched)
        watched.assert_faultless()


async def test_an_expected_fault_must_happen(empty: WatchedPage) -> None:
    async with opened(empty, page("")) as watched:
        with watched.expecting("console error: .*404", "status 404: .*/missing"):
            await watched.page.evaluate("() => fetch('/missing').then((answer) => answer.text())")
            await watched.until_fault("console error: ")
        watched.assert_faultless()
        with pytest.raises(AssertionError, match="did not happen"), watched.expecting("status 500"):
            pass


INACCESSIBLE = {
    "contrast in the light scheme": (
        "p { color: #aaa; background: #fff }",
        "<p>Some text</p>",
        "light: color-",
    ),
    "contrast in the dark scheme": (
        "@media (prefers-color-scheme: dark) { body { background: #000 } p { color: #333 } }",
        "<p>Some text</p>",
        "dark: color-contrast",
    ),
    "wider than a phone": ("div { width: 800px }", "<div>a</div>", "390 px, light: the page is"),
    "image without text": ("", '<img src="data:,">', "image-alt"),
    "field without label": ("", "<input>", "label"),
    "row that is not like the one before": (
        "",
        "<table><tr><td><a href=/a>a</a></td></tr><tr><td><a href=/b></a></td></tr></table>",
        "link-name",
    ),
}


@pytest.mark.parametrize("name", INACCESSIBLE)
async def test_a_page_that_is_hard_to_read_is_found(empty: WatchedPage, name: str) -> None:
    style, body, expected = INACCESSIBLE[name]
    files = page(body, '<link rel="stylesheet" href="/style.css">')
    async with opened(empty, {**files, "/style.css": ("text/css", style)}) as watched:
        with pytest.raises(AssertionError, match=expected):
            await assert_accessible(watched)


async def test_a_text_that_was_readable_is_found_where_it_is_not(empty: WatchedPage) -> None:
    head, body = '<link rel="stylesheet" href="/style.css">', "<p>Some <b>text</b></p>"
    files = page(body, head)
    style, worse = "b { color: #555 }", "body { background: #777 }"
    files["/style.css"] = ("text/css", style)
    async with opened(empty, files) as watched:
        await assert_accessible(watched, [WIDE])
    files["/style.css"] = ("text/css", f"{style} {worse}")
    async with opened(empty, files) as watched:
        with pytest.raises(AssertionError, match="light: color-contrast"):
            await assert_accessible(watched, [WIDE])
    files["/style.css"] = ("text/css", f"{style} @media (prefers-color-scheme: dark) {{ {worse} }}")
    async with opened(empty, files) as watched:
        with pytest.raises(AssertionError, match="1280 px, dark: color-contrast"):
            await assert_accessible(watched, [WIDE])


async def test_bytes_over_the_wire_include_every_response(empty: WatchedPage) -> None:
    files = scripted("document.title = 'Done'")
    files["/script.js"] = ("text/javascript", files["/script.js"][1] + "//" + 10_000 * "a")
    async with opened(empty, files) as watched:
        transfer = Transfer()
        await transfer.measure(watched.page)
        await watched.page.reload()
        await watched.page.wait_for_function("document.title === 'Done'")
        sizes = [transfer.by_url[url] for url in transfer.by_url]
    bodies = sum(len(text) for _, text in files.values())
    assert len(sizes) == 2
    assert bodies < transfer.total < bodies + 1_000
