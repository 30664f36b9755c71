"""A gateway for the browser, with a key of each role, and pages that are logged in to it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext

from app.auth import Role
from tests.app.api.test_admin_auth import SCOPES
from tests.app.tenants import make_key
from tests.console.watched_page import WIDE, WatchedPage, fresh_context, watched
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo

SAME_ORIGIN = {"sec-fetch-site": "same-origin"}
# A page of every site without scripts, where the storage of the others can be cleared.
_EMPTY = "/health"
_CLEAR = """async () => {
    localStorage.clear();
    sessionStorage.clear();
    const gone = (name) => new Promise((done, failed) => {
        Object.assign(indexedDB.deleteDatabase(name), {onsuccess: done, onerror: failed});
    });
    await Promise.all((await indexedDB.databases()).map((one) => gone(one.name)));
}"""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of the browser that is logged in, with one page; `closing` ends it."""

    page: WatchedPage
    cookies: dict[str, str]
    closing: AsyncExitStack

    async def reset(self) -> bool:
        """Empty the page and what it has stored; return whether the session is as before."""
        page = self.page.page
        await page.goto(_EMPTY)
        await page.evaluate(_CLEAR)
        await self.page.show(WIDE)
        await page.context.clear_permissions()
        self.page.faults.clear()
        return await cookies_of(page.context) == self.cookies


@dataclass(kw_only=True)
class Site:
    """A running gateway in this loop, its fake engine, and the browser."""

    browser: Browser
    gateway: Gateway
    fake: Fake
    keys: dict[Role, str]
    # Those that no visit uses, by role: a new one costs as much as loading a page.
    _profiles: dict[Role | None, Profile] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @asynccontextmanager
    async def visit(
        self,
        role: Role | None = None,
        *,
        first: bool = False,
        permissions: Sequence[str] = (),
        **options: Any,
    ) -> AsyncIterator[WatchedPage]:
        """Open an empty page, logged in by the key of a role; it must have no fault at the end.

        The profile may be that of an earlier visit, with what browsers cache; with `first` or
        options it is a new one. `permissions` are those that a user gives to the site.
        """
        own = first or bool(options)
        profile = None if own else self._profiles.pop(role, None)
        if profile is None:
            profile = await self._log_in(role, options)
        async with profile.closing as closing:
            if permissions:
                await profile.page.page.context.grant_permissions(permissions, origin=self.origin)
            yield profile.page
            profile.page.assert_faultless()
            if not own and role not in self._profiles and await profile.reset():
                self._profiles[role] = replace(profile, closing=closing.pop_all())

    async def _log_in(self, role: Role | None, options: dict[str, Any]) -> Profile:
        async with AsyncExitStack() as stack:
            context = await stack.enter_async_context(
                fresh_context(self.browser, self.origin, **options)
            )
            if role is not None:
                await log_in(context, self.keys[role])
            page = await stack.enter_async_context(watched(context, self.origin))
            return Profile(page, await cookies_of(context), stack.pop_all())

    async def aclose(self) -> None:
        """Close the profiles that are left."""
        while self._profiles:
            await self._profiles.popitem()[1].closing.aclose()


async def log_in(context: BrowserContext, key: str) -> None:
    """Begin a session in a profile, as the form of the login page does."""
    answer = await context.request.post(
        "/console/login", form={"key": key}, headers=SAME_ORIGIN, max_redirects=0
    )
    assert answer.status == 303, await answer.text()


async def cookies_of(context: BrowserContext) -> dict[str, str]:
    """Return the cookies of a profile by name."""
    return {cookie.get("name", ""): cookie.get("value", "") for cookie in await context.cookies()}


@asynccontextmanager
async def serving_site(browser: Browser, directory: Path, **sections: Any) -> AsyncIterator[Site]:
    """Run a gateway before a fake engine."""
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(Fake())
        gateway = await stack.enter_async_context(serving_demo(directory, fake.url, **sections))
        keys = {role: await key_of(gateway, role) for role in Role}
        site = Site(browser=browser, gateway=gateway, fake=fake, keys=keys)
        yield await stack.enter_async_context(aclosing(site))


async def key_of(gateway: Gateway, role: Role) -> str:
    """Make a key of a role; return it."""
    header = await make_key(gateway, f"{role}'s key", role=role, **SCOPES.get(role, {}))
    return header["authorization"].removeprefix("Bearer ")
