"""A model is added and removed on pages, checked while the form is filled in."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.app.console.editable import PROCESS, EditableGateway, editable
from tests.console.accessibility import assert_accessible
from tests.console.site import log_in
from tests.console.watched_page import WatchedPage, fresh_context, watched
from tests.fakes.vllm import Fake
from tests.gateway import ROOT_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fake() -> AsyncIterator[Fake]:
    async with Fake() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(
    fake: Fake, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EditableGateway]:
    async with editable(tmp_path_factory.mktemp("editable"), fake.url, PROCESS) as one:
        yield one


@pytest_asyncio.fixture(params=[True, False], ids=["scripts", "no scripts"], loop_scope="session")
async def visit(
    request: pytest.FixtureRequest, browser: Browser, served: EditableGateway
) -> AsyncIterator[WatchedPage]:
    origin = f"http://127.0.0.1:{served.gateway.port}"
    scripts = {"java_script_enabled": request.param}
    async with fresh_context(browser, origin, **scripts) as context:
        await log_in(context, ROOT_KEY)
        async with watched(context, origin) as page:
            yield page


async def fill_in(page: Page, fake: Fake) -> None:
    """Fill in a new model that is served elsewhere."""
    await page.goto("/console/models")
    await page.get_by_role("link", name="Add a model").click()
    await page.get_by_label("Name", exact=True).fill("new")
    await page.get_by_label("A server that runs elsewhere").check()
    await expect(page.get_by_label("Memory, in GiB")).to_be_hidden()
    await page.get_by_label("URL").fill(fake.url)
    await page.get_by_label("Name of the model there").fill("demo")


async def test_a_model_is_added_and_removed_with_and_without_scripts(
    visit: WatchedPage, served: EditableGateway, fake: Fake
) -> None:
    before, page = served.text, visit.page
    await fill_in(page, fake)
    await page.get_by_role("button", name="Check").click()
    findings = page.get_by_role("region", name="What changes in the file")
    await expect(findings).to_contain_text("+  - name: new")
    await expect(findings).to_contain_text("+ model new (starts new-0)")
    assert served.text == before
    await page.get_by_role("button", name="Write and reload").click()
    await expect(page.get_by_role("heading", name="new is in force")).to_be_visible()
    assert served.names == ["demo", "own", "new"]
    await page.get_by_role("link", name="Its page").click()
    await page.get_by_role("link", name="Change", exact=True).click()
    await page.get_by_role("link", name="Remove …").click()
    await page.get_by_role("button", name="Remove and reload").click()
    await expect(page.get_by_role("heading", name="new was removed")).to_be_visible()
    assert served.text == before


@pytest.mark.parametrize("visit", [True], indirect=True, ids=["scripts"])
async def test_the_form_is_checked_while_it_is_filled_in(
    visit: WatchedPage, served: EditableGateway, fake: Fake
) -> None:
    page = visit.page
    await page.goto("/console/configuration/model?name=own")
    limit = page.get_by_label("Unload after, in seconds")
    await limit.fill("soon")
    await page.get_by_label("Name", exact=True).focus()
    fault = page.get_by_text("must be a number, not 'soon'")
    await expect(fault).to_be_visible()
    await expect(limit).to_have_attribute("aria-invalid", "true")
    await limit.fill("60")
    await page.get_by_label("Name", exact=True).focus()
    await expect(fault).to_be_hidden()
    await expect(page.get_by_label("Difference of the file")).to_contain_text("idle_unload_s: 60")
    await page.get_by_role("button", name="Check").click()
    await expect(page.get_by_role("button", name="Write and reload")).to_be_visible()
    await assert_accessible(visit)
    await page.goto("/console/configuration/edit")
    await assert_accessible(visit)
