"""Conversations in the playground: interruptions, tool calls, messages that are edited, forms."""

import json
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from app.auth import Role
from tests.console.accessibility import assert_accessible
from tests.console.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="session")
ARGUMENTS = {"city": "Paris"}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})


async def ask(page: Page, text: str) -> Locator:
    """Send a message with the keyboard; return its last answer, complete."""
    await page.get_by_label("Message", exact=True).fill(text)
    await expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    await page.keyboard.press("Enter")
    return await complete(page)


async def complete(page: Page) -> Locator:
    """Return the last answer when it is complete."""
    answer = page.get_by_role("article").last
    await expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def last_chat(site: Site) -> dict[str, Any]:
    """Return the last request that the engine got."""
    body: dict[str, Any] = [one.json for one in site.fake.seen if one.body][-1]
    return body


async def send_field(page: Page, **fields: object) -> None:
    """Have the first column send fields with its requests."""
    column = page.get_by_role("region", name="Column A")
    await column.get_by_text("Tools and other fields").click()
    await column.get_by_label("Other fields").fill(json.dumps(fields))


async def test_an_interrupted_answer_is_said_and_can_be_tried_again(site: Site) -> None:
    site.fake.fault = None
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        await send_field(page, fake="say:one two three four", fake_fault="close:2")
        # The page stops reading at the error event, and so may not see how the connection ends.
        with watched_page.accepting("console error: .*ERR_INCOMPLETE", "failed: .*ERR_INCOMPLETE"):
            answer = await ask(page, "Count")
            await expect(answer.locator(".notice.bad")).to_contain_text("interrupted")
            await expect(answer).to_contain_text("failed")
            await page.get_by_label("Other fields").fill('{"fake": "say:one two"}')
            await answer.get_by_role("button", name="Try again").click()
            await expect(page.get_by_text("one two", exact=True)).to_be_visible()
            await expect(page.get_by_role("article")).to_have_count(1)


async def test_a_call_is_shown_and_its_result_is_sent(site: Site) -> None:
    site.fake.fault = None
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        await send_field(page, fake=f"say:<tool_call>\n{CALL}\n</tool_call>")
        answer = await ask(page, "Weather?")
        await expect(answer.locator("code")).to_have_text("get_weather")
        assert json.loads(await answer.locator("pre").inner_text()) == ARGUMENTS
        await page.get_by_label("Other fields").fill('{"fake": "say:It is warm."}')
        await answer.get_by_label("Result of the call").fill("20 degrees")
        await answer.get_by_role("button", name="Send the results").click()
        await expect(page.get_by_text("It is warm.", exact=True)).to_be_visible()
        asked, called, result = last_chat(site)["messages"]
        assert asked == {"role": "user", "content": "Weather?"}
        (call,) = called["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        expected = {"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"}
        assert result == expected
        await assert_accessible(watched_page)


async def test_an_edited_message_replaces_what_followed(site: Site) -> None:
    site.fake.fault = None
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        await ask(page, "first")
        await ask(page, "second")
        assert [one["role"] for one in last_chat(site)["messages"]] == ["user", "assistant", "user"]
        await page.get_by_role("button", name="Edit").first.click()
        form = page.locator("form.asked")
        await form.get_by_label("Message").fill("changed")
        await form.get_by_role("button", name="Send again").click()
        await expect(page.get_by_role("article")).to_have_count(1)
        await complete(page)
        assert last_chat(site)["messages"] == [{"role": "user", "content": "changed"}]


async def test_a_setting_that_cannot_be_sent_is_shown(site: Site) -> None:
    before = len(site.fake.seen)
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        column = page.get_by_role("region", name="Column A")
        await column.get_by_label("Temperature").fill("hot")
        await column.get_by_text("Sampling").click()
        await page.get_by_label("Message", exact=True).fill("hi")
        await page.get_by_role("button", name="Send", exact=True).click()
        await expect(column.get_by_role("alert")).to_have_text("Temperature is not a number.")
        await expect(column.get_by_label("Temperature")).to_be_focused()
        await assert_accessible(watched_page)
    assert not [one for one in site.fake.seen[before:] if one.body]


async def test_tabs_are_moved_through_by_arrow_keys(site: Site) -> None:
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        tabs = page.get_by_role("tab")
        await expect(tabs).to_have_text(["Chat", "Embeddings", "Rerank", "Score"])
        await tabs.first.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.get_by_role("tab", name="Score")).to_be_focused()
        await expect(page.get_by_role("tabpanel", name="Score")).to_be_visible()
        await expect(page.get_by_role("tabpanel", name="Chat")).to_be_hidden()
        await assert_accessible(watched_page)
