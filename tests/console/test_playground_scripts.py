"""The modules of the playground that show nothing, run by Chromium: streams, requests, snippets."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page

from app.auth import Role
from tests.console.site import Site
from tests.console.watched_page import WatchedPage

pytestmark = pytest.mark.asyncio(loop_scope="session")
EVENTS = (
    "data: one\n\n: comment\n\ndata: two\r\ndata: lines\r\n\r\n"
    "event: x\ndata:tight\r\rdata: é你😀\n\n"
)
EXPECTED = ["one", "two\nlines", "tight", "é你😀"]
# Everything that a shell, Python or JSON could take for more than text.
NASTY = (
    "It's $HOME `id` $(id) \\ \\n \"q\" !x 'JSON'\nJSON\n你好 😀 \u2028 \t </script> ${x} {y} %s"
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def playground(shared_site: Site) -> AsyncIterator[WatchedPage]:
    """The playground, which the tests of a module leave as it is."""
    async with shared_site.visit(Role.CLIENT) as watched:
        await watched.page.goto("/console/playground")
        yield watched


@pytest.fixture
def page(playground: WatchedPage) -> Iterator[Page]:
    """A page that may load the modules of the console."""
    yield playground.page
    playground.assert_faultless()


async def call(page: Page, module: str, function: str, *arguments: object) -> Any:
    """Call a function that a module exports."""
    program = """async ([module, name, args]) => {
        const base = document.querySelector("link[rel=stylesheet]").href;
        return (await import(new URL(module, base).href))[name](...args);
    }"""
    return await page.evaluate(program, [module, function, list(arguments)])


async def evaluate(page: Page, program: str, argument: object = None) -> Any:
    """Run a program that loads modules by `load(name)`."""
    load = """const load = (name) => import(
        new URL(name, document.querySelector("link[rel=stylesheet]").href).href);"""
    return await page.evaluate(f"async (given) => {{ {load} {program} }}", argument)


async def test_events_are_found_wherever_the_stream_is_cut(page: Page) -> None:
    found = await evaluate(
        page,
        """const {SseParser} = await load("sse.js");
        const results = [];
        for (let cut = 0; cut <= given.length; cut++) {
            const parser = new SseParser();
            results.push([...parser.push(given.slice(0, cut)), ...parser.push(given.slice(cut))]);
        }
        const single = new SseParser();
        results.push([...given].flatMap((character) => single.push(character)));
        return results;""",
        EVENTS,
    )
    assert all(result == EXPECTED for result in found)


async def test_events_are_found_wherever_the_bytes_are_cut(page: Page) -> None:
    found = await evaluate(
        page,
        """const {eventsOf} = await load("sse.js");
        const bytes = new TextEncoder().encode(given);
        const results = [];
        for (let cut = 0; cut <= bytes.length; cut++) {
            const body = new ReadableStream({start(control) {
                control.enqueue(bytes.slice(0, cut));
                control.enqueue(bytes.slice(cut));
                control.close();
            }});
            const events = [];
            for await (const event of eventsOf(new Response(body))) events.push(event);
            results.push(events);
        }
        return results;""",
        EVENTS,
    )
    assert all(result == EXPECTED for result in found)


async def test_an_event_without_its_end_is_not_taken(page: Page) -> None:
    found = await evaluate(
        page,
        """const {SseParser} = await load("sse.js");
        return new SseParser().push("data: whole\\n\\ndata: half\\n");""",
    )
    assert found == ["whole"]


async def test_an_answer_is_made_of_its_events(page: Page) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Think"},
        {"reasoning_content": "ing"},
        {"content": "Yes"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    events += [
        json.dumps({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}),
        json.dumps({"choices": [], "usage": usage}),
        "[DONE]",
    ]
    answer, opened, cost = await evaluate(
        page,
        """const {newAnswer, addEvent, costOf} = await load("answer.js");
        const answer = newAnswer("demo", {});
        const open = given.map((event, at) => addEvent(answer, event, at * 1000));
        const price = {prompt: 500e6, cached: 100e6, completion: 1500e6};
        return [answer, open, costOf(answer.usage, price)];""",
        events,
    )
    assert (answer["thought"], answer["text"], answer["finish"]) == (
        "Thinking",
        "Yes",
        "tool_calls",
    )
    assert [(one["id"], one["name"], one["arguments"]) for one in answer["calls"]] == [
        ("a", "f", '{"x": 1}'),
        ("b", "g", "{}"),
    ]
    assert (answer["times"]["first"], answer["times"]["last"]) == (1000, 6000)
    assert opened == [True] * (len(events) - 1) + [False]
    assert cost == pytest.approx((6 * 500 + 4 * 100 + 5 * 1500) / 1e9)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ('{"error": {"message": "The engine failed."}}', "The engine failed."),
        ("not JSON", "not JSON"),
    ],
)
async def test_a_fault_in_a_stream_is_said(page: Page, event: str, message: str) -> None:
    said = await evaluate(
        page,
        """const {newAnswer, addEvent} = await load("answer.js");
        const answer = newAnswer("demo", {});
        try { addEvent(answer, given, 0); } catch (error) { return error.message; }""",
        event,
    )
    assert message in said


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("temperature", "warm", "not a number"),
        ("temperature", "3", "from 0 to 2"),
        ("top_k", "1.5", "whole number"),
        ("max_tokens", "0", "from 1"),
        ("schema", "{", "not valid JSON"),
        ("schema", "[]", "must be an object"),
        ("tools", "{}", "must be a list"),
        ("other", "null", "must be an object"),
    ],
)
async def test_what_cannot_be_sent_is_said(page: Page, field: str, text: str, message: str) -> None:
    found = await evaluate(
        page,
        """const {newSettings, fieldsOf} = await load("chat_request.js");
        try { fieldsOf({...newSettings("demo"), ...given}); } catch (error) {
            return [error.field, error.message];
        }""",
        {field: text},
    )
    assert found[0] == field
    assert message in found[1]


SETTINGS = {
    "model": "demo",
    "system": NASTY,
    "temperature": "0.5",
    "top_k": "3",
    "seed": "7",
    "stop": "END\n\nSTOP",
    "schema": '{"type": "object"}',
    "tools": json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    "other": '{"chat_template_kwargs": {"enable_thinking": false, "nothing": null}, "list": []}',
}
TOOL_CALL = {"id": "a", "name": "f", "arguments": "{}", "result": "7"}
MAKE_BODY = """const {newSettings, askWith, bodyOf} = await load("chat_request.js");
    const settings = {...newSettings("demo"), ...given.settings};
    const answer = askWith(settings);
    const done = (text, calls = []) => ({...askWith(settings), text, calls});
    const turns = [
        {text: "first", images: [], answers: [[done("", [given.call]), done("one")], []]},
        {text: "second", images: [], answers: [[], [done("elsewhere")]]},
        {text: given.text, images: given.images, answers: [[answer]]},
    ];
    const body = bodyOf(turns, 0, answer);"""


async def body_of(page: Page, **given: Any) -> dict[str, Any]:
    """Return the body of a conversation in which the first column has not answered all messages."""
    defaults = {"settings": {}, "text": "third", "images": [], "call": TOOL_CALL}
    body: dict[str, Any] = await evaluate(page, f"{MAKE_BODY} return body;", {**defaults, **given})
    return body


async def test_settings_that_are_empty_are_not_sent(page: Page) -> None:
    body = await body_of(page)
    assert set(body) == {"model", "messages", "stream", "stream_options"}


async def test_the_body_has_all_settings(page: Page) -> None:
    body = await body_of(page, settings=SETTINGS)
    assert body["messages"][0] == {"role": "system", "content": NASTY}
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.5, 3, 7)
    assert body["stop"] == ["END", "STOP"]
    schema = {"name": "answer", "schema": {"type": "object"}}
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert body["tools"][0]["function"]["name"] == "f"
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "nothing": None}


async def test_a_column_sends_only_its_own_answers(page: Page) -> None:
    body = await body_of(page, images=["data:image/png;base64,AA=="])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "assistant", "content": "one"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                {"type": "text", "text": "third"},
            ],
        },
    ]


@pytest.mark.parametrize("language", ["curl", "python"])
async def test_a_snippet_sends_exactly_the_request(page: Page, site: Site, language: str) -> None:
    body = await body_of(page, settings=SETTINGS, text=NASTY)
    url = f"{site.origin}/v1/chat/completions"
    text = await call(page, "snippets.js", f"{language}Of", url, body)
    command = ["sh", "-c", text] if language == "curl" else [sys.executable, "-c", text]
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "API_KEY": site.keys[Role.CLIENT], "NO_PROXY": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert output.rstrip().endswith(b"data: [DONE]" if language == "curl" else b"hello there")
    seen = [one.json for one in site.fake.seen if one.body][-1]
    del seen["cache_salt"]  # the gateway adds it
    assert seen == body


async def test_the_javascript_snippet_sends_exactly_the_request(page: Page, site: Site) -> None:
    body = await body_of(page, settings=SETTINGS, text=NASTY)
    sent = await evaluate(
        page,
        """const {javascriptOf} = await load("snippets.js");
        const text = javascriptOf(given.url, given.body);
        // The page's policy forbids to run it: what stands between the parentheses is JSON.
        return text.match(/JSON\\.stringify\\(([^]*)\\),\\n\\}\\);/)[1];""",
        {"url": f"{site.origin}/v1/chat/completions", "body": body},
    )
    assert json.loads(sent) == body
