"""Sign-in by a real identity provider, in Chromium."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AuthenticationError, DefaultAsyncHttpxClient
from playwright.async_api import Browser, Page, expect

from app.auth import Role
from app.auth.tokens import provider as provider_module
from tests.clients.environments import Unavailable
from tests.console.site import Site, serving_site
from tests.console.watched_page import fresh_context
from tests.fakes.identity_provider import SigningKey
from tests.gateway import ROOT
from tests.oidc_provider import CONSOLE_SECRET, OidcProvider
from tests.reverse_proxies import BEHIND_PROXY, Nginx

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_module, "COOLDOWN_S", 0.0)
        patch.setenv(SECRET_ENV, CONSOLE_SECRET)
        yield server
    server.remove()


def accepting(provider: OidcProvider, client: str, **fields: Any) -> dict[str, Any]:
    """Return the section `console` for a client of a provider."""
    oidc = {
        "issuer": provider.issuer,
        "client_id": client,
        "client_secret_env": SECRET_ENV,
        "role_claim": "groups",
        "roles": {"llm-admins": "admin", "llm-users": "client"},
        "owner_claim": "team",
        "own_keys": {"max_keys": 2, "limits": {"requests_per_minute": 9}},
        **fields,
    }
    return {"oidc": oidc}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proxied(
    browser: Browser, provider: OidcProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Site, Nginx]]:
    """A gateway behind nginx, below a prefix; its provider may not have started yet."""
    directory, client = tmp_path_factory.mktemp("proxied"), "proxied"
    console = accepting(provider, client)
    async with serving_site(browser, directory, server=BEHIND_PROXY, console=console) as site:
        proxy = Nginx(site.gateway.port)
        provider.consoles[client], provider.console_certificate = proxy.url, proxy.certificate
        await asyncio.to_thread(proxy.__enter__)
        yield site, proxy
        proxy.remove()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(
    browser: Browser,
    provider: OidcProvider,
    proxied: tuple[Site, Nginx],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """A gateway that has started before its provider."""
    directory, client = tmp_path_factory.mktemp("site"), "console"
    async with serving_site(browser, directory, console=accepting(provider, client)) as site:
        provider.consoles[client] = site.origin
        await asyncio.to_thread(provider.start)
        yield site


async def sign_in(page: Page, name: str) -> None:
    """Sign in at the provider, from the login page."""
    await page.get_by_role("button", name=re.compile("Sign in with localhost")).click()
    await page.get_by_placeholder("Enter any login").fill(name)
    await page.get_by_placeholder("and password").fill("any")
    await page.get_by_role("button", name="Sign-in").click()
    await page.get_by_role("button", name="Continue").click()


async def end_session(page: Page, provider: OidcProvider) -> None:
    """Log out at the provider, as by another program, which knows nothing of the console."""
    await page.goto(f"{provider.issuer}/session/end")
    await page.get_by_role("button", name="Yes, sign me out").click()
    await expect(page.get_by_text("Sign-out Success")).to_be_visible()


@asynccontextmanager
async def new_page(site: Site) -> AsyncIterator[Page]:
    """Open an empty page of a profile of its own."""
    async with fresh_context(site.browser, site.origin) as context:
        yield await context.new_page()


async def test_a_claim_gives_the_role_and_leads_to_the_page_that_was_asked_for(site: Site) -> None:
    async with new_page(site) as page:
        await page.goto("/console/engines")
        controls = await page.locator("input:visible, button").all()
        assert len(controls) == 5
        for control in controls:
            await page.keyboard.press("Tab")
            await expect(control).to_be_focused()
        await sign_in(page, "ada")
        await expect(page).to_have_url(f"{site.origin}/console/engines")
        who = page.locator(".who")
        await expect(who).to_contain_text("Ada Lovelace")
        await expect(who).to_contain_text("admin")
        (cookie,) = await page.context.cookies(f"{site.origin}/console")
        assert cookie.get("sameSite") == "Strict"
        assert await page.evaluate("document.cookie") == ""


@pytest.mark.parametrize("name", ["eve", "tim"])
async def test_a_person_without_a_role_is_refused_in_one_line(site: Site, name: str) -> None:
    async with new_page(site) as page:
        await page.goto("/console/login")
        await sign_in(page, name)
        fault = "No access: groups of your account has no role."
        await expect(page.get_by_role("alert")).to_have_text(fault)
        await page.goto("/console/overview")
        await expect(page).to_have_url(re.compile("/console/login"))
        audit = await site.gateway.client.get("/admin/audit", headers=ROOT)
        newest = audit.json()["data"][0]
        assert (newest["who"], newest["action"]) == (f"sso:{name}", "session.refuse")


async def ask(site: Site, key: str) -> str:
    """Return an answer of the model, by OpenAI's SDK."""
    async with AsyncOpenAI(base_url=f"{site.origin}/v1", api_key=key, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}]
        )
    return str(answer.choices[0].message.content)


async def test_a_person_makes_a_key_uses_it_and_revokes_it_until_the_session_ends(
    site: Site, provider: OidcProvider
) -> None:
    async with new_page(site) as page:
        await page.goto("/console/own_keys")
        await sign_in(page, "bob")
        await page.get_by_label("Name, such as where it is used").fill("laptop")
        await page.wait_for_load_state()  # the form acts once its script is there
        await page.get_by_role("button", name="Create key").click()
        secret = page.get_by_label("The key", exact=True)
        await expect(secret).to_contain_text("sk-gw-")
        key = await secret.text_content()
        await page.get_by_role("button", name="I have copied it").click()
        await expect(page.get_by_text("laptop (sso:bob)")).to_be_visible()
        assert key is not None
        assert await ask(site, key)
        await page.get_by_role("button", name="Revoke").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        await expect(page.get_by_text("You have no key yet.")).to_be_visible()
        with pytest.raises(AuthenticationError):
            await ask(site, key)
        await end_session(page, provider)
        await page.goto("/console/own_keys")
        await expect(page).to_have_url(re.compile("/console/login"))


async def test_log_out_ends_the_session_at_the_provider_and_that_of_another_window(
    site: Site, provider: OidcProvider
) -> None:
    """The provider tells the console by a back-channel logout of its other sessions."""
    async with new_page(site) as page:
        await page.goto("/console/playground")
        await sign_in(page, "bob")
        await expect(page.locator(".who")).to_contain_text("Bob")
        other = await site.browser.new_context(storage_state=await page.context.storage_state())
        stolen = await other.new_page()
        await stolen.goto(f"{site.origin}/console/playground")
        await expect(stolen.locator(".who")).to_contain_text("Bob")
        await page.get_by_role("button", name="Log out").click()
        await page.get_by_role("button", name="Yes, sign me out").click()
        await expect(page).to_have_url(f"{site.origin}/console/login")
        await stolen.goto(f"{site.origin}/console/playground")
        await expect(stolen).to_have_url(re.compile("/console/login"))
        await other.close()
        await page.get_by_role("button", name=re.compile("Sign in with")).click()
        await expect(page.get_by_placeholder("Enter any login")).to_be_visible()


async def test_keys_rotate_and_a_provider_that_is_down_is_said(
    site: Site, provider: OidcProvider
) -> None:
    async with new_page(site) as page:
        await asyncio.to_thread(provider.restart, SigningKey.make("RS256"))
        await page.goto("/console/overview")
        await sign_in(page, "ada")
        await expect(page.locator(".who")).to_contain_text("Ada Lovelace")
        await asyncio.to_thread(provider.stop)
        await page.reload()
        await expect(page.locator(".who")).to_contain_text("Ada Lovelace")
    async with new_page(site) as page:
        await page.goto("/console/overview")
        await page.get_by_role("button", name=re.compile("Sign in with")).click()
        down = "The identity provider does not answer now. Try again later."
        await expect(page.get_by_role("alert")).to_have_text(down)
        await page.get_by_label("API key").fill(site.keys[Role.ADMIN])
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await asyncio.to_thread(provider.start)


async def test_through_nginx_below_a_prefix_with_tls(
    site: Site, proxied: tuple[Site, Nginx], provider: OidcProvider
) -> None:
    """What ends when: the session with the provider's, a key of one's own when it is deleted."""
    behind, proxy = proxied
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            fresh_context(site.browser, proxy.origin, ignore_https_errors=True)
        )
        page = await context.new_page()
        await page.goto(f"{proxy.url}/console/own_keys")
        await sign_in(page, "bob")
        await expect(page).to_have_url(f"{proxy.url}/console/own_keys")
        await page.get_by_label("Name, such as where it is used").fill("laptop")
        await page.wait_for_load_state()  # the form acts once its script is there
        await page.get_by_role("button", name="Create key").click()
        secret = page.get_by_label("The key", exact=True)
        await expect(secret).to_contain_text("sk-gw-")
        key = str(await secret.text_content())
        await page.get_by_role("button", name="I have copied it").click()
        await expect(page.get_by_text("laptop (sso:bob)")).to_be_visible()
        client = await stack.enter_async_context(
            AsyncOpenAI(
                base_url=f"{proxy.url}/v1",
                api_key=key,
                max_retries=0,
                http_client=DefaultAsyncHttpxClient(verify=proxy.context),
            )
        )
        assert [model.id async for model in client.models.list()] == ["demo"]

        await end_session(page, provider)
        await page.goto(f"{proxy.url}/console/own_keys")
        await expect(page).to_have_url(re.compile(f"{proxy.url}/console/login"))
        assert [model.id async for model in client.models.list()] == ["demo"]

        admin = behind.gateway.client
        keys = (await admin.get("/admin/keys", headers=ROOT)).json()["data"]
        (own,) = [one["id"] for one in keys if one["name"] == "laptop (sso:bob)"]
        deleted = await admin.delete(f"/admin/keys/{own}?now=true", headers=ROOT)
        assert deleted.is_success
        with pytest.raises(AuthenticationError):
            await client.models.list()
