"""/admin/requests over HTTP: what it shows, and what it never does."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.app.raw import connected, request
from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import KEY_ID, ROOT, Gateway, demo_gateway, serving_demo
from tests.waiting import wait_until

PROMPT, ANSWER = "a canary of a prompt", "hello"
BODY = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
CHAT = "/v1/chat/completions"


gateway = demo_gateway(model={"aliases": ["gpt-4o-mini"]})


admin = partial(request_as_root, "/admin/requests")


async def ended(gateway: Gateway, query: str = "") -> list[str]:
    """Return the request IDs of ended requests that a query selects."""
    return [row["request_id"] for row in (await admin(gateway, "GET", query))["ended"]]


def phase_names(shown: dict[str, Any]) -> list[str]:
    """Return the names of a request's phases; whether it waited for its body depends on packets."""
    return [phase["name"] for phase in shown["phases"] if phase["name"] != "body"]


async def chat(
    gateway: Gateway, name: str, headers: dict[str, str] | None = None, **fields: object
) -> int:
    answer = await gateway.client.post(
        CHAT, json=BODY | fields, headers={"x-request-id": name, **(headers or {})}
    )
    return answer.status_code


async def test_request_in_flight_is_shown_and_canceled(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        body = json.dumps({**BODY, "stream": True, "fake": "stall:3"}).encode()
        client.send(request(body, b"x-request-id: slow", path=CHAT.encode()))
        await client.until(b"data: ")
        found = await admin(gateway, "GET")
        assert found["ended"] == []
        [row] = found["in_flight"]
        facts = (row["request_id"], row["outcome"], row["phase"], row["key_id"], row["model"])
        assert facts == ("slow", "in_flight", "decode", KEY_ID, "demo")
        assert (row["engine"], row["endpoint"], row["status"]) == ("demo-0", CHAT, 200)
        assert row["elapsed_s"] >= row["ttft_s"] > 0
        assert row["arrived_at"].endswith("Z")
        await wait_until(lambda: gateway.state.requests.in_flight()[0].answer_tokens == 2)
        shown = await admin(gateway, "GET", f"/{row['id']}")
        assert phase_names(shown) == ["auth", "limits", "prefill", "decode"]
        [attempt] = shown["attempts"]
        assert attempt["start_s"] < attempt["answered_s"] < row["ttft_s"]
        canceled = await admin(gateway, "POST", f"/{row['id']}/cancel")
        assert canceled["id"] == row["id"]
        assert b"request_canceled" in await client.chunked()
    await wait_until(lambda: not gateway.server.tasks)
    error = await admin(gateway, "POST", f"/{row['id']}/cancel", status=404)
    assert "in flight" in error["error"]["message"]
    shown = await admin(gateway, "GET", f"/{row['id']}")
    assert (shown["outcome"], shown["error"]) == ("canceled", "request_canceled")


async def test_ended_request_shows_where_its_time_went(gateway: Gateway) -> None:
    assert await chat(gateway, "plain", model="gpt-4o-mini") == 200
    [row] = (await admin(gateway, "GET"))["ended"]
    shown = await admin(gateway, "GET", f"/{row['id']}")
    assert row == {name: shown[name] for name in row}
    assert (row["model"], row["requested_model"]) == ("demo", "gpt-4o-mini")
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (3, 0, 2)
    phases = shown["phases"]
    assert phase_names(shown) == ["auth", "limits", "generate"]
    assert phases[0]["start_s"] == 0
    assert phases[-1]["end_s"] == pytest.approx(row["elapsed_s"], abs=1e-6)
    assert phases[-1]["note"] == "demo-0"
    [attempt] = shown["attempts"]
    assert (attempt["engine"], attempt["status"], attempt["fault"]) == ("demo-0", 200, None)
    assert 0 < attempt["start_s"] < row["elapsed_s"]


async def test_filters(gateway: Gateway) -> None:
    other = await make_key(gateway, "other", owner="team")
    await chat(gateway, "good")
    await chat(gateway, "theirs", other)
    await chat(gateway, "refused", model="canary")
    await chat(gateway, "failed", fake="dead")
    assert await ended(gateway) == ["failed", "refused", "theirs", "good"]
    assert await ended(gateway, "?limit=2") == ["failed", "refused"]
    assert await ended(gateway, "?key=other") == ["theirs"]
    assert await ended(gateway, f"?key={KEY_ID}&outcome=completed") == ["good"]
    assert await ended(gateway, "?model=demo&status=2xx") == ["theirs", "good"]
    assert await ended(gateway, "?status=404") == ["refused"]
    assert await ended(gateway, "?status=5xx") == ["failed"]
    assert await ended(gateway, "?outcome=refused") == ["refused"]
    assert await ended(gateway, "?outcome=in_flight") == []
    assert await ended(gateway, "?request_id=good") == ["good"]
    [row] = (await admin(gateway, "GET", "?key=other"))["ended"]
    assert row["owner"] == "team"
    for query in ("?status=999", "?status=4x", "?limit=0", "?outcome=lost"):
        await admin(gateway, "GET", query, status=400)
    await admin(gateway, "GET", "?key=nobody-has-it", status=404)


async def test_nothing_of_prompt_answer_or_key_is_shown(gateway: Gateway) -> None:
    key = await make_key(gateway, "other")
    for fields in (
        {},
        {"stream": True},
        {"fake": "close"},
        {"temperature": "hot"},
        {"max_tokens": -1},
    ):
        await chat(gateway, "request", key, **fields)
    found = (await admin(gateway, "GET"))["ended"]
    assert len(found) == 5
    text = json.dumps([found, [await admin(gateway, "GET", f"/{row['id']}") for row in found]])
    for secret in (PROMPT, ANSWER, key["authorization"].removeprefix("Bearer ")):
        assert secret not in text


async def test_request_without_a_key_is_not_kept(gateway: Gateway) -> None:
    assert await chat(gateway, "stranger", {"authorization": "Bearer sk-nobody-0123456789"}) == 401
    assert await ended(gateway) == []


async def test_unknown_request_is_404(gateway: Gateway) -> None:
    for path in ("/0", "/canary"):
        error = await admin(gateway, "GET", path, status=404)
        assert "no such request" in error["error"]["message"]


async def test_ended_requests_survive_a_reload(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway:
        await chat(gateway, "before")
        answer = await gateway.client.post("/admin/reload", headers=ROOT)
        assert answer.status_code == 200
        await chat(gateway, "after")
        assert await ended(gateway) == ["after", "before"]


async def test_disabled_console_keeps_no_ended_request(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url, console={"enabled": False}) as gateway:
        await chat(gateway, "before")
        async with connected(gateway) as client:
            body = json.dumps({**BODY, "fake": "hang"}).encode()
            client.send(request(body, path=CHAT.encode()))
            await fake.until_running()
            found = await admin(gateway, "GET")
            assert found["ended"] == []
            [row] = found["in_flight"]
            assert row["phase"] is None
            shown = await admin(gateway, "GET", f"/{row['id']}")
            assert (shown["phases"], shown["attempts"]) == ([], [])
            await admin(gateway, "POST", f"/{row['id']}/cancel")
            assert (await client.answer()).status == 403
