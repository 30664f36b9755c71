"""/admin/requests over HTTP: what it shows, and what it never does."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from app.database import DatabaseUnavailable
from app.relay import request_directory
from app.usage import RequestHistory
from tests.app.console.visits import visiting
from tests.app.raw import connected, request
from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import KEY, KEY_ID, ROOT, Gateway, demo_gateway, serving_demo
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
        assert "no request with this id" in error["error"]["message"]


async def test_ended_requests_survive_a_reload(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway:
        await chat(gateway, "before")
        answer = await gateway.client.post("/admin/reload", headers=ROOT)
        assert answer.status_code == 200
        await chat(gateway, "after")
        assert await ended(gateway) == ["after", "before"]


async def test_requests_of_an_earlier_process_show_where_their_time_went(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving_demo(tmp_path, fake.url, console={"enabled": False}) as gateway:
        await chat(gateway, "good", model="demo")
        await chat(gateway, "failed", fake="dead")
        shown = [await admin(gateway, "GET", f"/{id_}") for id_ in await ids(gateway)]
    async with serving_demo(tmp_path, fake.url) as gateway:
        again = [await admin(gateway, "GET", f"/{id_}") for id_ in await ids(gateway)]
    assert [one["request_id"] for one in again] == ["failed", "good"]
    assert [one["outcome"] for one in again] == ["failed", "completed"]
    for before, after in zip(shown, again, strict=True):
        for one, other in zip(_parts(after), _parts(before), strict=True):
            assert one == pytest.approx(other, abs=2e-6)
        facts = ("id", "request_id", "key_id", "engine", "status", "error", "fault", "ttft_s")
        assert {name: after[name] for name in facts} == {name: before[name] for name in facts}


async def test_request_that_no_engine_could_take_is_stored_and_not_counted(
    tmp_path: Path,
) -> None:
    async with serving_demo(tmp_path, "http://127.0.0.1:9") as gateway:
        assert await chat(gateway, "waited") == 503
    async with serving_demo(tmp_path, "http://127.0.0.1:9") as gateway:
        [row] = (await admin(gateway, "GET", "?outcome=failed"))["ended"]
        assert (row["request_id"], row["engine"], row["status"]) == ("waited", None, 503)
        assert row["prompt_tokens"] is None
        shown = await admin(gateway, "GET", f"/{row['id']}")
        assert phase_names(shown)[:2] == ["auth", "limits"]
        assert (await request_as_root("/admin/usage", gateway, "GET"))["data"] == []


async def test_pages_show_every_request_once_in_both_orders(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway:
        for number in range(3):
            await chat(gateway, f"old-{number}")
    async with serving_demo(tmp_path, fake.url) as gateway:
        for number in range(4):
            await chat(gateway, f"new-{number}")
        every = (await admin(gateway, "GET"))["ended"]
        assert [row["request_id"] for row in every] == [
            "new-3", "new-2", "new-1", "new-0", "old-2", "old-1", "old-0",
        ]  # fmt: skip
        for order, expected in (
            ("latest", every),
            ("slowest", sorted(every, key=lambda row: row["elapsed_s"], reverse=True)),
        ):
            seen: list[str] = []
            cursor: str | None = ""
            while cursor is not None:
                more = f"&cursor={cursor}" if cursor else ""
                page = await admin(gateway, "GET", f"?limit=2&order={order}{more}")
                seen += [row["id"] for row in page["ended"]]
                cursor = page["next"]
            assert seen == [row["id"] for row in expected], order
        *_, third, fourth = sorted((row["elapsed_s"] for row in every), reverse=True)[:4]
        between = (third + fourth) / 2
        assert len(await ended(gateway, f"?slower_than_s={between}")) == 3
        assert await ended(gateway, "?to=2026-01-01") == []
        assert len(await ended(gateway, "?from=2026-01-01&to=2099-01-01T00:00:00Z")) == 7


async def test_without_the_database_the_requests_in_memory_are_shown(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await chat(gateway, "good")

    async def down(*_: object) -> NoReturn:
        raise DatabaseUnavailable("the database does not answer")

    monkeypatch.setattr(RequestHistory, "list", down)
    found = await admin(gateway, "GET")
    assert ([row["request_id"] for row in found["ended"]], found["complete"]) == (["good"], False)


async def test_a_key_has_one_search_at_a_time(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with a ledger that takes long to search would keep all others from theirs."""
    await chat(gateway, "good")
    search, begun, goes_on = RequestHistory.list, asyncio.Event(), asyncio.Event()

    async def slow(*asked: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await search(*asked)

    monkeypatch.setattr(RequestHistory, "list", slow)
    monkeypatch.setattr(request_directory, "SEARCH_WAIT_S", 0.02)
    history = "/console/requests?order=slowest"
    as_root = partial(gateway.client.get, "/admin/requests", headers=ROOT)
    async with visiting(gateway, KEY) as visitor:
        first = asyncio.create_task(visitor.get(history))
        await begun.wait()
        refused = await visitor.get(history)
        assert refused.status_code == 503
        assert "another search of this key runs" in refused.text
        begun.clear()
        others = asyncio.create_task(as_root())
        await begun.wait()
        refused = await as_root()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        goes_on.set()
        assert (await first).status_code == (await others).status_code == 200
        assert (await visitor.get(history)).status_code == 200
    assert not gateway.state.requests._searching


@pytest.mark.parametrize(
    "query",
    [
        "?from=yesterday", "?to=9999-12-31", "?from=2026-11-02&to=2026-11-01", "?cursor=1",
        "?from=0001-01-01T00:00%2B14:00", "?to=0001-01-02", "?to=9999-12-31T23:00-14:00",
        "?order=random", "?slower_than_s=-1", "?slower_than_s=nan", "?slower=1", "?Limit=5",
    ],
)  # fmt: skip
async def test_parameters_that_mean_nothing_are_refused(gateway: Gateway, query: str) -> None:
    error = (await admin(gateway, "GET", query, status=400))["error"]
    assert query[1:].partition("=")[0] in error["message"]


async def ids(gateway: Gateway) -> list[str]:
    return [row["id"] for row in (await admin(gateway, "GET"))["ended"]]


def _parts(shown: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = shown["phases"] + shown["attempts"]
    return parts
