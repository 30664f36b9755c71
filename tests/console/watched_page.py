"""A page of Chromium, and the faults that no page of the console may have.

Recorded are errors and warnings of the page's console, exceptions, violations of its content
security policy, requests to other origins, failed requests, responses of status 400 and above,
dialogs, new windows and crashes. A test that causes one on purpose says so with `expecting`.
"""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    Response,
    expect,
)

from tests.waiting import wait_until

Scheme = Literal["light", "dark"]
WIDE = 1280
PHONE = 390
# What a window of WIDE pixels has at a zoom of 200 %.
ZOOMED = 640
_HEIGHT = {WIDE: 800, PHONE: 844, ZOOMED: 400}
_REPORT = "reportPolicyViolation"
# Runs in every document before its own scripts, and outside of its policy.
_LISTEN = f"""
addEventListener("securitypolicyviolation", (event) =>
    {_REPORT}(`${{event.effectiveDirective}} ${{event.blockedURI}} ${{event.sample}}`));
"""
# The page or the test ended the request: a stream at a navigation, an answer that was stopped.
_CANCELED = "net::ERR_ABORTED"
_LOCAL_SCHEMES = frozenset({"about", "blob", "data"})

# A loaded machine may not run a browser for many seconds.
PATIENCE_S = 60.0
expect.set_options(timeout=PATIENCE_S * 1000)


class WatchedPage:
    """A page and its faults."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.faults: list[str] = []
        self._origin = origin
        self._scheme: Scheme = "light"

    async def watch(self) -> None:
        """Start to record faults; the page must be empty."""
        page = self.page
        await page.expose_binding(_REPORT, self._on_violation)
        await page.add_init_script(_LISTEN)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", self._on_request)
        page.on("requestfailed", self._on_failure)
        page.on("response", self._on_response)
        page.on("dialog", self._on_dialog)
        page.on("popup", lambda other: self.faults.append(f"window: {other.url}"))
        page.on("crash", lambda _: self.faults.append("crash"))

    @contextmanager
    def expecting(self, *patterns: str) -> Iterator[None]:
        """Require a fault for each pattern in the body, and accept every fault that matches one."""
        before = len(self.faults)
        yield
        later = self.faults[before:]
        missing = [p for p in patterns if not any(re.search(p, fault) for fault in later)]
        assert not missing, f"did not happen: {missing}; faults: {later}"
        self._drop(before, patterns)

    @contextmanager
    def accepting(self, *patterns: str) -> Iterator[None]:
        """Accept every fault in the body that matches a pattern; none has to happen."""
        before = len(self.faults)
        yield
        self._drop(before, patterns)

    def _drop(self, first: int, patterns: Sequence[str]) -> None:
        kept = [f for f in self.faults[first:] if not any(re.search(p, f) for p in patterns)]
        self.faults[first:] = kept

    async def until_fault(self, text: str) -> None:
        """Return when a fault contains a text; raise AssertionError after some seconds."""
        try:
            await wait_until(lambda: any(text in f for f in self.faults), PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"no fault has {text!r}: {self.faults}") from None

    def assert_faultless(self) -> None:
        """Raise AssertionError with all faults that were not expected."""
        assert not self.faults, f"{self.page.url}:\n" + "\n".join(self.faults)

    async def show(self, width: int, scheme: Scheme = "light") -> None:
        """Set the window's width in CSS pixels, and the color scheme of the system."""
        if self.page.viewport_size != {"width": width, "height": _HEIGHT[width]}:
            await self.page.set_viewport_size({"width": width, "height": _HEIGHT[width]})
        if scheme != self._scheme:
            await self.page.emulate_media(color_scheme=scheme)
            self._scheme = scheme

    def _on_violation(self, _: object, violation: str) -> None:
        self.faults.append(f"policy: {violation}")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        target = urlsplit(request.url)
        local = target.scheme in _LOCAL_SCHEMES
        if not local and f"{target.scheme}://{target.netloc}" != self._origin:
            self.faults.append(f"other origin: {request.url}")

    def _on_failure(self, request: Request) -> None:
        if request.failure != _CANCELED:
            self.faults.append(f"failed: {request.failure} {request.method} {request.url}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"status {response.status}: {response.url}")

    async def _on_dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        await dialog.dismiss()


@asynccontextmanager
async def fresh_context(
    browser: Browser, origin: str, locale: str = "en-US", **options: Any
) -> AsyncIterator[BrowserContext]:
    """Open a profile of its own: no cookie, empty cache, one language, UTC."""
    context = await browser.new_context(
        base_url=origin,
        locale=locale,
        timezone_id="UTC",
        viewport={"width": WIDE, "height": _HEIGHT[WIDE]},
        reduced_motion="reduce",
        **options,
    )
    context.set_default_timeout(PATIENCE_S * 1000)
    try:
        yield context
    finally:
        await context.close()


@asynccontextmanager
async def watched(context: BrowserContext, origin: str) -> AsyncIterator[WatchedPage]:
    """Open an empty page; raise AssertionError at the end if it had an unexpected fault."""
    page = WatchedPage(await context.new_page(), origin)
    await page.watch()
    yield page
    page.assert_faultless()
    await page.page.close()
