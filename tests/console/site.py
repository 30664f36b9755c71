"""A gateway for the browser, with a key of each role, and pages that are logged in to it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext

from app.auth import Role
from tests.app.api.test_admin_auth import SCOPES
from tests.app.tenants import make_key
from tests.console.watched_page import WatchedPage, fresh_context, watched
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo

SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


@dataclass(kw_only=True)
class Site:
    """A running gateway in this loop, its fake engine, and the browser."""

    browser: Browser
    gateway: Gateway
    fake: Fake
    keys: dict[Role, str]

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @asynccontextmanager
    async def visit(self, role: Role | None = None, **options: Any) -> AsyncIterator[WatchedPage]:
        """Open an empty page, logged in by the key of a role; it must have no fault at the end."""
        async with fresh_context(self.browser, self.origin, **options) as context:
            if role is not None:
                await log_in(context, self.keys[role])
            async with watched(context, self.origin) as page:
                yield page


async def log_in(context: BrowserContext, key: str) -> None:
    """Begin a session in a profile, as the form of the login page does."""
    answer = await context.request.post(
        "/console/login", form={"key": key}, headers=SAME_ORIGIN, max_redirects=0
    )
    assert answer.status == 303, await answer.text()


@asynccontextmanager
async def serving_site(browser: Browser, directory: Path, **sections: Any) -> AsyncIterator[Site]:
    """Run a gateway before a fake engine."""
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(Fake())
        gateway = await stack.enter_async_context(serving_demo(directory, fake.url, **sections))
        keys = {role: await key_of(gateway, role) for role in Role}
        yield Site(browser=browser, gateway=gateway, fake=fake, keys=keys)


async def key_of(gateway: Gateway, role: Role) -> str:
    """Make a key of a role; return it."""
    header = await make_key(gateway, f"{role}'s key", role=role, **SCOPES.get(role, {}))
    return header["authorization"].removeprefix("Bearer ")
