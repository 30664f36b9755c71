"""Chromium of this machine, driven by Playwright; it reaches no host but the loopback interface."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

# Chromium without windows: a visit of a page takes a fifth of the CPU time of the whole browser's.
_PROGRAM = "chromium-headless-shell"
_FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    # Every other name and address fails to resolve, so a page at fault cannot reach a host either.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Chromium with an empty profile; raise RuntimeError if it is not installed."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise RuntimeError(f"{_PROGRAM} is not installed; tests/install-services.sh does that")
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not run as root, as which containers run tests.
        browser = await playwright.chromium.launch(
            executable_path=program, args=list(_FLAGS), chromium_sandbox=False
        )
        try:
            yield browser
        finally:
            await browser.close()
