"""The console on real vLLM: one walk through it with the demo model of the shared gateway."""

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
import yaml
from playwright.async_api import Browser, BrowserContext, expect

from tests.console.site import log_in
from tests.console.test_playground import ask, complete
from tests.console.watched_page import WatchedPage, fresh_context, watched
from tests.e2e.deployment import ADMIN_KEY, KEY, START_S, Deployment
from tests.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def context(browser: Browser, gateway: Deployment) -> AsyncIterator[BrowserContext]:
    """An administrator's profile."""
    async with fresh_context(browser, gateway.url) as context:
        await log_in(context, ADMIN_KEY)
        yield context


@pytest_asyncio.fixture(loop_scope="session")
async def watched_page(context: BrowserContext, gateway: Deployment) -> AsyncIterator[WatchedPage]:
    """A page of it, which must have no fault."""
    async with watched(context, gateway.url) as page:
        yield page


@pytest.mark.parametrize(
    ("question", "thought", "text"),
    [
        ("Which is larger, 9.9 or 9.11?", "Both have 9 before", "9.9 is larger than 9.11."),
        ("鸡兔同笼，共有3个头、8只脚，鸡和兔各有几只？", "如果3只都是鸡", "有2只鸡和1只兔子。"),
    ],
)
async def test_the_model_thinks_and_answers(
    watched_page: WatchedPage, question: str, thought: str, text: str
) -> None:
    page = watched_page.page
    await page.goto("/console/playground")
    answer = await ask(page, question)
    await complete(answer)
    await expect(answer.locator("[data-part=text]")).to_have_text(text)
    await expect(answer.locator("[data-part=thought-text]")).to_contain_text(thought)
    await expect(answer.locator("[data-part=thought-text]")).to_be_hidden()


async def test_two_settings_are_compared(watched_page: WatchedPage) -> None:
    page = watched_page.page
    await page.goto("/console/playground")
    await page.get_by_role("button", name="Add a column").click()
    second = page.get_by_role("region", name="Column B")
    await second.get_by_label("Maximum tokens").fill("3")
    await ask(page, "Count from one to ten.")
    answers = page.get_by_role("article")
    await expect(answers).to_have_count(2)
    for answer in await answers.all():
        await complete(answer)
    await expect(answers.first).to_contain_text("8, 9, 10.")
    await expect(answers.last).not_to_contain_text("10.")


async def test_a_canceled_request_ends_in_vllm(
    watched_page: WatchedPage, gateway: Deployment
) -> None:
    page = watched_page.page
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
        "ignore_eos": True,
        "max_tokens": 1900,
        "n": 8,
        "temperature": 0.5,
    }
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
        await page.goto("/console/requests")
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("dialog").get_by_role("button", name="Cancel the request").click()
        answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "request_canceled")
    ended = page.get_by_role("region", name="Requests that have ended")
    await expect(ended.get_by_role("row").nth(1)).to_contain_text("canceled")
    await wait_until(lambda: running(gateway) == 0)


def running(gateway: Deployment) -> float:
    """Return how many sequences vLLM generates."""
    with gateway.engine() as engine:
        lines = engine.get("/metrics").text.splitlines()
    found = [one for one in lines if one.startswith("vllm:num_requests_running{")]
    return sum(float(one.rpartition(" ")[2]) for one in found)


async def test_a_key_is_made_used_with_curl_and_limited(
    browser: Browser, watched_page: WatchedPage, gateway: Deployment
) -> None:
    page = watched_page.page
    await page.goto("/console/keys/new")
    await page.get_by_label("Name", exact=True).fill("By hand")
    await page.get_by_label("Requests per minute").fill("1")
    await page.get_by_role("button", name="Create key").click()
    key = await page.get_by_role("dialog").get_by_label("The key").inner_text()
    await page.get_by_role("button", name="I have copied it").click()
    assert await curl_status(gateway, key) == "200"
    async with (
        fresh_context(browser, gateway.url) as other,
        watched(other, gateway.url) as limited,
    ):
        await log_in(other, key)
        await limited.page.goto("/console/playground")
        with limited.expecting("status 429", "console error: .*429"):
            answer = await ask(limited.page, "Hello!")
            await expect(answer.get_by_role("button", name=re.compile("in \\d+ s"))).to_be_visible()
            await expect(answer).to_contain_text("per minute")


async def curl_status(gateway: Deployment, key: str) -> str:
    """Ask for a completion with curl; return the status."""
    process = await asyncio.create_subprocess_exec(
        "curl",
        *("--silent", "--output", "/dev/null", "--write-out", "%{http_code}"),
        *("--header", f"Authorization: Bearer {key}"),
        *("--json", '{"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}'),
        f"{gateway.url}/v1/chat/completions",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


async def test_the_log_of_an_engine_is_read_and_searched(
    watched_page: WatchedPage, gateway: Deployment
) -> None:
    page = watched_page.page
    with gateway.client() as client:
        client.post("/tokenize", json={"model": "demo", "prompt": "Hello!"}).raise_for_status()
    await page.goto("/console/engines/demo-0")
    await expect(page.get_by_label("Command line")).to_contain_text("--max-model-len")
    await page.get_by_role("link", name="Log", exact=True).click()
    log = page.get_by_role("region", name="Log")
    found = log.locator(".line:visible").filter(has_text="POST /tokenize")
    await expect(found).not_to_have_count(0)
    await page.get_by_label("Search").fill("post /tokenize")
    await expect(log.locator(".line:visible").filter(has_not_text="POST /tokenize")).to_have_count(
        0
    )
    await expect(found).not_to_have_count(0)


async def test_a_reload_is_tried_without_doing_it(
    watched_page: WatchedPage, gateway: Deployment
) -> None:
    page = watched_page.page
    file = gateway.run_dir.parent / "gateway.yaml"
    before = file.read_text()
    settings = yaml.safe_load(before)
    settings["models"][0]["engines"][0]["args"]["max-num-seqs"] = 3
    file.write_text(yaml.safe_dump(settings))
    try:
        await page.goto("/console/configuration")
        await expect(page.get_by_text("model demo: args.max-num-seqs")).to_be_visible()
        # vLLM's parser checks the flags first, and takes as long to import as a start.
        reload = page.get_by_role("button", name="Reload")
        await expect(reload).to_be_enabled(timeout=START_S * 1000)
    finally:
        file.write_text(before)  # other tests reload this gateway
    await page.get_by_role("button", name="Compare again").click()
    await expect(page.get_by_text("Nothing differs")).to_be_visible()
