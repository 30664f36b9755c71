"""The playground: asking, comparing, stopping, limits, and what stays in the browser."""

import asyncio
import os
import re

import pytest
from playwright.async_api import Locator, Page, Route, expect

from app.auth import Role
from tests.app.tenants import make_key
from tests.console.accessibility import assert_accessible
from tests.console.site import Site, log_in
from tests.console.watched_page import PHONE, WIDE, fresh_context, watched

pytestmark = pytest.mark.asyncio(loop_scope="session")
THOUGHTFUL = "say:<think>Both begin with 9.</think>9.9 is **larger**."


async def ask(page: Page, text: str) -> Locator:
    """Send a message; return its last answer."""
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()
    return page.get_by_role("article").last


async def complete(answer: Locator) -> None:
    """Return when an answer has ended."""
    await expect(answer.get_by_role("button", name="Copy answer")).to_be_visible()


async def test_thought_and_answer_are_apart(site: Site) -> None:
    site.fake.fault = THOUGHTFUL
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        answer = await ask(page, "Which is larger?")
        await complete(answer)
        await expect(answer.get_by_text("Both begin with 9.")).to_be_hidden()
        await expect(answer.get_by_text("9.9 is larger.")).to_be_visible()
        await expect(answer.locator("strong")).to_have_text("larger")
        await answer.get_by_text(re.compile("^Thought.* tokens$")).click()
        await expect(answer.get_by_text("Both begin with 9.")).to_be_visible()
        await expect(
            answer.get_by_text(re.compile("to the first token .* → .* tokens"))
        ).to_be_visible()
        await answer.get_by_text("More", exact=True).click()
        await expect(answer.get_by_role("definition").first).to_be_visible()
        await assert_accessible(watched_page)


async def test_settings_are_compared_side_by_side_on_one_message(site: Site) -> None:
    site.fake.fault = None
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        await page.get_by_role("button", name="Add a column").click()
        second = page.get_by_role("region", name="Column B")
        await second.get_by_label("temperature").fill("0")
        before = len(site.fake.seen)
        await ask(page, "hi")
        answers = page.get_by_role("article")
        await expect(answers).to_have_count(2)
        for answer in await answers.all():
            await complete(answer)
        sent = [request.json for request in site.fake.seen[before:] if request.body]
        assert sorted(body.get("temperature", -1) for body in sent) == [-1, 0]
        left, right = [await answer.bounding_box() for answer in await answers.all()]
        assert left is not None
        assert right is not None
        assert (left["y"], left["x"] < right["x"]) == (right["y"], True)
        await assert_accessible(watched_page)
        await watched_page.show(PHONE)
        left, right = [await answer.bounding_box() for answer in await answers.all()]
        assert left is not None
        assert right is not None
        assert left["x"] == right["x"]
        await watched_page.show(WIDE)


async def test_stop_ends_the_generation_and_keeps_what_there_is(site: Site) -> None:
    site.fake.fault = "tokens:10000:20"
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        answer = await ask(page, "Count")
        await expect(answer).to_contain_text("answering")
        await site.fake.until_running()
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_hidden()
        await page.get_by_role("button", name="Stop", exact=True).click()
        await site.fake.until_idle()
        await complete(answer)
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()


async def test_a_limit_is_said_with_the_time_to_wait_in_the_chat_and_in_forms(site: Site) -> None:
    site.fake.fault = None
    header = await make_key(site.gateway, "one a minute", requests_per_minute=1)
    async with fresh_context(site.browser, site.origin) as context:
        await log_in(context, header["authorization"].removeprefix("Bearer "))
        async with watched(context, site.origin) as watched_page:
            page, again = watched_page.page, re.compile("Try again in \\d+ s")
            await page.goto("/console/playground")
            await complete(await ask(page, "one"))
            with watched_page.expecting("status 429", "console error: .*429"):
                answer = await ask(page, "two")
                await expect(answer.get_by_role("button", name=again)).to_be_disabled()
                await expect(answer.locator(".notice.bad")).to_contain_text("per minute")
            await assert_accessible(watched_page)
            await page.get_by_role("tab", name="Embeddings").click()
            form = page.get_by_role("tabpanel", name="Embeddings")
            await form.get_by_label("Texts").fill("two")
            with watched_page.expecting("status 429", "console error: .*429"):
                await form.get_by_role("button", name="Embed").click()
                await expect(form.get_by_role("button", name=again)).to_be_disabled()
                await expect(form.locator(".fault")).to_contain_text("per minute")


async def test_an_answer_goes_on_when_the_session_ends_meanwhile(site: Site) -> None:
    site.fake.fault = "tokens:60:20"
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        answer = await ask(page, "Count")
        await site.fake.until_running()
        await page.context.clear_cookies()
        await complete(answer)
        await expect(answer.locator("[data-part=text]")).not_to_be_empty()
        await expect(answer.locator(".markdown")).to_be_visible()
        with watched_page.expecting("status 401: .*/console/api/", "console error: .*401"):
            await ask(page, "Go on")
            await expect(page.get_by_role("link", name="Log in again")).to_be_visible()


async def test_the_conversation_survives_a_reload_and_nothing_else_has_it(site: Site) -> None:
    site.fake.fault = None
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        await complete(await ask(page, "Remember this"))
        await page.reload()
        await expect(page.get_by_text("Remember this")).to_be_visible()
        assert "Remember this" not in (await page.evaluate("() => JSON.stringify(localStorage)"))
        assert await page.evaluate("() => indexedDB.databases().then((all) => all.length)") == 0
        await page.get_by_role("button", name="Conversations").click()
        await page.get_by_role("button", name="New chat").click()
        await expect(page.get_by_text("Remember this")).to_be_hidden()


async def test_conversations_stay_on_the_device_if_one_wants_that(site: Site) -> None:
    site.fake.fault = None
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.set_viewport_size({"width": 1600, "height": 900})
        await page.goto("/console/playground")
        keep = page.get_by_label("Keep conversations on this device")
        await keep.check()
        await complete(await ask(page, "First talk"))
        await page.get_by_role("button", name="New chat").click()
        await complete(await ask(page, "Second talk"))
        chats = page.get_by_role("complementary", name="Conversations").get_by_role("listitem")
        await expect(chats).to_have_text(["Second talk", "First talk"])
        await page.evaluate("() => sessionStorage.clear()")
        await page.reload()
        await chats.get_by_text("First talk").click()
        await expect(page.locator(".asked")).to_contain_text("First talk")
        await page.get_by_role("button", name="Delete Second talk").click()
        await expect(chats).to_have_text(["First talk"])
        await assert_accessible(watched_page)
        await page.set_viewport_size({"width": 1600, "height": 900})
        await keep.click()
        await page.get_by_role("dialog").get_by_role("button", name="Delete them").click()
        await expect(chats).to_have_count(0)


PASTE = """() => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array([137, 80, 78, 71])], "a.png", {type: "image/png"}));
    const message = document.getElementById("message");
    message.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true}));
    message.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
}"""


CODE = "@a\ndef f(x): return 'b' + 1  # c"  # in all colors


async def test_keys_send_and_break_and_images_are_pasted_and_dropped(site: Site) -> None:
    site.fake.fault = f"say:```py\n{CODE}\n```"
    async with site.visit(Role.CLIENT, permissions=["clipboard-read", "clipboard-write"]) as opened:
        page = opened.page
        await page.goto("/console/playground")
        await page.get_by_role("button", name="Call a tool").click()
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("And Rome?")
        await page.evaluate(PASTE)
        await expect(page.get_by_role("button", name="Remove image")).to_have_count(2)
        await page.keyboard.press("Enter")
        answer = page.get_by_role("article").last
        await complete(answer)
        sent = [one.json for one in site.fake.seen if one.body][-1]
        first, second, text = sent["messages"][0]["content"]
        assert first == second
        assert first["image_url"]["url"].startswith("data:image/png;base64,")
        assert text["text"].endswith("in Paris?\nAnd Rome?")
        assert sent["tools"][0]["function"]["name"] == "get_weather"
        await answer.get_by_role("button", name="Copy the code").click()
        await expect(page.get_by_role("status").filter(has_text="copied")).to_be_visible()
        assert (await page.evaluate("() => navigator.clipboard.readText()")).strip() == CODE
        await expect(answer.locator("pre .hljs-keyword")).to_have_text(["def", "return"])
        await assert_accessible(opened)


async def test_a_message_is_sent_when_the_model_has_started(site: Site) -> None:
    site.fake.fault = None
    loading = {"phase": "loading weights", "step": "shard 2 of 5", "share": 0.4, "left_s": 20}
    async with site.visit(Role.CLIENT) as watched_page:
        page, starting = watched_page.page, True

        async def models(route: Route) -> None:
            response = await route.fetch()
            found = await response.json()
            if starting:
                found["models"][0] |= {"ready": False, "starting": loading}
            await route.fulfill(response=response, json=found)

        await page.route("**/console/api/playground/models", models)
        await page.goto("/console/playground")
        before = len(site.fake.seen)
        answer = await ask(page, "hi")
        await expect(answer).to_contain_text("shard 2 of 5, about 20 s left")
        await assert_accessible(watched_page)
        assert not [one for one in site.fake.seen[before:] if one.body]
        starting = False
        await complete(answer)
        await expect(answer).to_contain_text("hello there")
        await page.unroute_all()


async def test_the_copied_command_sends_the_same_request(site: Site) -> None:
    site.fake.fault = None
    allowed = ["clipboard-read", "clipboard-write"]
    async with site.visit(Role.CLIENT, permissions=allowed) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        answer = await ask(page, "It's $5 \\ 你好")
        await complete(answer)
        shown = [one.json for one in site.fake.seen if one.body][-1]
        await answer.get_by_text("More", exact=True).click()
        await answer.get_by_role("button", name="curl").click()
        await expect(page.get_by_role("status").filter(has_text="copied")).to_be_visible()
        command = await page.evaluate("() => navigator.clipboard.readText()")
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        command,
        env={**os.environ, "API_KEY": site.keys[Role.CLIENT]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    assert output.endswith(b"data: [DONE]\n\n")
    assert [one.json for one in site.fake.seen if one.body][-1] == shown
