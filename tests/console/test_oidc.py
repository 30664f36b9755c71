"""Sign-in by a real identity provider, in Chromium."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from app.auth.tokens import provider as provider_module
from tests.clients.environments import Unavailable
from tests.console.site import Site, serving_site
from tests.console.watched_page import fresh_context
from tests.fakes.identity_provider import SigningKey
from tests.oidc_provider import CONSOLE_ID, CONSOLE_SECRET, OidcProvider

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET_ENV = "CONSOLE_OIDC_SECRET"
PEOPLE: dict[str, Any] = {
    "ada": {"name": "Ada Lovelace", "groups": ["llm-admins", "staff"], "team": "research"},
    "bob": {"name": "Bob", "groups": ["llm-users"], "team": "sales"},
    "eve": {"name": "Eve", "groups": ["others"], "team": "sales"},
    "tim": {"name": "Tim"},
}


@pytest.fixture(scope="module")
def provider() -> Iterator[OidcProvider]:
    try:
        server = OidcProvider(SigningKey.make("RS256"), people=PEOPLE)
    except Unavailable as error:
        pytest.skip(str(error))
    yield server
    server.remove()


def accepting(provider: OidcProvider, **fields: Any) -> dict[str, Any]:
    """Return the section `console` for a provider."""
    oidc = {
        "issuer": provider.issuer,
        "client_id": CONSOLE_ID,
        "client_secret_env": SECRET_ENV,
        "role_claim": "groups",
        "roles": {"llm-admins": "admin", "llm-users": "client"},
        "owner_claim": "team",
        **fields,
    }
    return {"oidc": oidc}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(
    browser: Browser, provider: OidcProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """A gateway that has started before its provider."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_module, "COOLDOWN_S", 0.0)
        patch.setenv(SECRET_ENV, CONSOLE_SECRET)
        directory = tmp_path_factory.mktemp("site")
        async with serving_site(browser, directory, console=accepting(provider)) as site:
            provider.console = site.origin
            await asyncio.to_thread(provider.start)
            yield site


async def sign_in(page: Page, name: str) -> None:
    """Sign in at the provider, from the login page."""
    await page.get_by_role("button", name=re.compile("Sign in with localhost")).click()
    await page.get_by_placeholder("Enter any login").fill(name)
    await page.get_by_placeholder("and password").fill("any")
    await page.get_by_role("button", name="Sign-in").click()
    await page.get_by_role("button", name="Continue").click()


async def test_a_claim_gives_the_role_and_leads_to_the_page_that_was_asked_for(site: Site) -> None:
    async with fresh_context(site.browser, site.origin) as context:
        page = await context.new_page()
        await page.goto("/console/engines")
        await sign_in(page, "ada")
        await expect(page).to_have_url(f"{site.origin}/console/engines")
        who = page.locator(".who")
        await expect(who).to_contain_text("Ada Lovelace")
        await expect(who).to_contain_text("admin")
