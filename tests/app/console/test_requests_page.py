"""The pages of requests: who sees and cancels which, what they show, and what they cost."""

import asyncio
import html
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter, time

import httpx
import pytest

from app.auth import Role
from app.console.key_names import KeyNames
from app.console.rendering import Renderer
from app.console.request_regions import FIRST_ROWS, FRESH_S, RequestRegions
from app.telemetry import EndedRequest, RequestRecord, RequestTimeline
from app.usage import RequestFilter
from app.usage.token_usage import Usage
from tests.app.console.visits import visiting
from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, KEY, KEY_ID, ROOT_KEY, Gateway, serving_demo
from tests.waiting import wait_until

HOSTILE = "<img src=x onerror=alert(1)>"
PAGE, REFRESH = "/console/requests", "/console/api/requests"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "a canary of a prompt"}]}


@asynccontextmanager
async def in_flight(gateway: Gateway, headers: Mapping[str, str] = AUTH) -> AsyncIterator[str]:
    """Have a stream in flight; yield its ID."""
    body = {**BODY, "stream": True, "fake": "stall:3"}
    path = "/v1/chat/completions"
    async with gateway.client.stream("POST", path, json=body, headers=headers) as response:
        lines = response.aiter_lines()  # held: the response ends with it
        await anext(lines)
        (view,) = gateway.state.requests.in_flight()
        yield view.id


def end(
    gateway: Gateway, key_id: str = KEY_ID, status: int = 200, seconds: float = 1.0, **facts: object
) -> str:
    """Add a request that has ended; return its ID."""
    timeline = RequestTimeline(perf_counter())
    record = RequestRecord("r", "/v1/chat/completions", "POST", status, seconds, key_id, **facts)  # type: ignore[arg-type]
    ended = EndedRequest(record, timeline, time(), gateway.state.ledger.gateway)
    gateway.state.requests._recent.end(ended)
    return ended.id


async def regions(visitor: httpx.AsyncClient, query: str = "") -> dict[str, str]:
    response = await visitor.get(f"{REFRESH}?{query}")
    assert response.status_code == 200, response.text
    found: dict[str, str] = response.json()
    return found


async def test_a_client_sees_and_cancels_the_requests_of_its_own_key_only(
    gateway: Gateway, fake: Fake
) -> None:
    other = await make_key(gateway, "other")
    other_key = other["authorization"].removeprefix("Bearer ")
    ended = end(gateway)
    async with (
        visiting(gateway, KEY) as owner,
        visiting(gateway, other_key) as stranger,
        in_flight(gateway) as id_,
    ):
        for query in ("", f"key={KEY_ID}", "outcome=in_flight", "model=demo"):
            shown = "".join((await regions(stranger, query)).values())
            page = (await stranger.get(f"{PAGE}?{query}")).text
            for name in (id_, ended):
                assert name not in shown
                assert name not in page
        for name in (id_, ended):
            assert (await stranger.get(f"{PAGE}/{name}")).status_code == 404
            assert (await stranger.post(f"{REFRESH}/{name}/cancel")).status_code == 404
            assert (await owner.get(f"{PAGE}/{name}")).status_code == 200
        assert id_ in (await regions(owner))["in-flight"]
        assert ended in (await regions(owner))["ended"]
        assert (await owner.post(f"{REFRESH}/{id_}/cancel")).status_code == 200
        await fake.until_idle()
        await wait_until(lambda: not gateway.state.requests.in_flight())
        after = await regions(owner)
        assert id_ not in after["in-flight"]
        assert "canceled" in after["ended"]


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.MANAGER])
async def test_roles_that_only_read_cancel_nothing(gateway: Gateway, role: Role) -> None:
    header = await make_key(gateway, "reads", role=role)
    key = header["authorization"].removeprefix("Bearer ")
    async with visiting(gateway, key) as visitor, in_flight(gateway) as id_:
        shown = await regions(visitor)
        assert id_ in shown["in-flight"]
        assert "data-action" not in shown["in-flight"]
        assert "data-action" not in (await visitor.get(f"{PAGE}/{id_}")).text
        for path in (f"{REFRESH}/{id_}/cancel", f"/console/api/admin/requests/{id_}/cancel"):
            assert (await visitor.post(path)).status_code == 403
        async with visiting(gateway, ROOT_KEY) as admin:
            assert "data-action" in (await regions(admin))["in-flight"]
            assert (await admin.post(f"{REFRESH}/{id_}/cancel")).status_code == 200
        # What the other role was shown a moment ago is not shown to this one.
        assert "data-action" not in (await regions(visitor))["in-flight"]


async def test_a_cancel_without_the_token_is_refused(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as owner, in_flight(gateway) as id_:
        for forged in ({"x-csrf-token": ""}, {"sec-fetch-site": "cross-site"}):
            answer = await owner.post(f"{REFRESH}/{id_}/cancel", headers=forged)
            assert answer.status_code == 403
        assert (await owner.post(f"{REFRESH}/{id_}/cancel")).status_code == 200


async def test_without_a_login_there_are_no_requests_to_see(fake: Fake, tmp_path: Path) -> None:
    async with (
        serving_demo(tmp_path, fake.url, auth={"enabled": False}) as open_gateway,
        visiting(open_gateway, None) as visitor,
    ):
        id_ = end(open_gateway, "anonymous")
        for path in (PAGE, f"{PAGE}/{id_}", REFRESH):
            assert (await visitor.get(path)).status_code == 403
        assert (await visitor.post(f"{REFRESH}/{id_}/cancel")).status_code == 403


async def test_a_fault_is_shown_without_secrets_and_as_text(gateway: Gateway) -> None:
    secret = "hf_canary0123456789abc"
    id_ = end(gateway, fault=f"{HOSTILE} \x1b[31m\u202e --hf-token {secret}", error="engine_failed")
    async with visiting(gateway, ROOT_KEY) as admin:
        page = (await admin.get(f"{PAGE}/{id_}")).text
    assert "&lt;img src=x" in page
    for hidden in (HOSTILE, secret, "\x1b", "\u202e"):
        assert hidden not in page


async def test_names_of_keys_are_text(gateway: Gateway) -> None:
    made = await make_key(gateway, HOSTILE)
    async with visiting(gateway, ROOT_KEY) as admin, in_flight(gateway, made) as id_:
        for html in (
            (await regions(admin))["in-flight"],
            (await admin.get(PAGE)).text,
            (await admin.get(f"{PAGE}/{id_}")).text,
        ):
            assert "&lt;img src=x" in html
            assert HOSTILE not in html


@pytest.mark.parametrize(
    "query",
    [
        "status=%22%3E%3Cscript%3E",
        "model=%22%20onfocus=x%20autofocus%3E",
        "key=%27%22%3E%3Csvg%20onload=x%3E",
        "outcome=%3Cb%3E",
        "nothing=%22%3E%3Cb%3E",
    ],
)
async def test_a_hostile_query_is_text(gateway: Gateway, query: str) -> None:
    async with visiting(gateway, ROOT_KEY) as admin:
        page = await admin.get(f"{PAGE}?{query}")
        assert page.status_code == 200
        for mark in ("<script>", "<svg onload", "<b>", '" onfocus'):
            assert mark not in page.text


async def test_the_filters_select(gateway: Gateway) -> None:
    good, bad = end(gateway), end(gateway, "k2", error="rate_limit_exceeded")
    async with visiting(gateway, ROOT_KEY) as admin:
        assert good in (await regions(admin, f"key={KEY_ID}"))["ended"]
        assert bad not in (await regions(admin, f"key={KEY_ID}"))["ended"]
        assert good in (await regions(admin, "status=2xx"))["ended"]
        assert good not in (await regions(admin, "status=4xx"))["ended"]
        for faulty in ("status=999", "outcome=none"):
            assert (await admin.get(f"{REFRESH}?{faulty}")).status_code == 400
            page = await admin.get(f"{PAGE}?{faulty}")
            assert 'role="alert"' in page.text


async def test_the_page_of_a_request_says_where_its_time_went(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as owner:
        await gateway.chat()
        (view,) = gateway.state.requests.recent()
        page = (await owner.get(f"{PAGE}/{view.id}")).text
    assert "Generated" in page
    assert "<rect" in page
    assert "canary" not in page


async def test_a_stream_that_its_engine_broke_shows_as_failed(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as owner:
        answer = await gateway.chat(stream=True, fake="error_event")
        assert answer.status_code == 200
        (view,) = gateway.state.requests.recent()
        page = (await owner.get(f"{PAGE}/{view.id}")).text
        failed, completed = [
            (await regions(owner, f"outcome={outcome}"))["ended"]
            for outcome in ("failed", "completed")
        ]
    assert "engine_error" in page
    assert view.id in failed
    assert "engine_error" in failed
    assert view.id not in completed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("ended", [FIRST_ROWS - 1, FIRST_ROWS + 5])
async def test_a_page_begins_with_the_rows_of_a_window_and_its_script_gets_the_others(
    gateway: Gateway, ended: int
) -> None:
    ids = [end(gateway) for _ in range(ended)][::-1]
    async with visiting(gateway, ROOT_KEY) as admin:
        page = (await admin.get(PAGE)).text
        shown = re.findall(r'id="request-(\w+)"', page)
        assert shown == ids[:FIRST_ROWS]
        assert ("data-more" in page) == (ended > FIRST_ROWS)
        assert re.findall(r'id="request-(\w+)"', (await regions(admin))["ended"]) == ids


async def test_pages_that_show_the_same_share_one_rendering(gateway: Gateway) -> None:
    clock, asked = Clock(), 0

    class Counted(KeyNames):
        async def find(self, key_ids: object) -> Mapping[str, str]:
            nonlocal asked
            asked += 1
            return {KEY_ID: "name"}

    end(gateway)
    names = Counted(gateway.state.key_store)
    shared = RequestRegions(Renderer(), gateway.state.requests, names, clock)
    everything, own = RequestFilter(), RequestFilter(key_id=KEY_ID)
    await asyncio.gather(*(shared.html(everything, "/requests") for _ in range(50)))
    assert asked == 1
    await shared.html(everything, "")  # may not cancel
    await shared.html(own, "/requests")
    assert asked == 3
    clock.now += FRESH_S
    await shared.html(everything, "/requests")
    assert asked == 4
    shared.outdate()
    await shared.html(everything, "/requests")
    assert asked == 5


@pytest.mark.parametrize("steps", range(4))
async def test_a_visitor_that_leaves_takes_nothing_from_others(
    gateway: Gateway, steps: int
) -> None:
    end(gateway)
    names = KeyNames(gateway.state.key_store)
    shared = RequestRegions(Renderer(), gateway.state.requests, names)
    leaves, stays = (asyncio.create_task(shared.html(RequestFilter(), "")) for _ in range(2))
    for _ in range(steps):
        await asyncio.sleep(0)
    leaves.cancel()
    assert KEY_ID in (await stays)["ended"]


async def test_stored_requests_are_found_by_duration_a_page_at_a_time(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.console.requests_page.ENDED_ROWS", 2)
    async with visiting(gateway, KEY) as owner, visiting(gateway, ROOT_KEY) as admin:
        for _ in range(3):
            await gateway.chat()
        ids = [view.id for view in gateway.state.requests.recent()]
        first = (await owner.get(f"{PAGE}?order=slowest&model=demo")).text
        [following] = re.findall(r'rel="next" href="([^"]*)"', first)
        second = (await owner.get(html.unescape(following))).text
        assert [sum(one in page for one in ids) for page in (first, second)] == [2, 1]
        assert 'rel="next"' not in second
        assert "data-refresh" not in first
        assert "No request fits" in (await admin.get(f"{PAGE}?slower_than_s=600")).text
        assert "No request fits" in (await admin.get(f"{PAGE}?order=latest&request_id=x")).text
        for faulty in ("slower_than_s=long", "from=yesterday", "order=random", "cursor=1"):
            assert 'role="alert"' in (await admin.get(f"{PAGE}?{faulty}")).text
        other = await make_key(gateway, "other")
        async with visiting(gateway, other["authorization"].removeprefix("Bearer ")) as stranger:
            page = (await stranger.get(f"{PAGE}?order=latest&key={KEY_ID}")).text
            assert not any(one in page for one in ids)


async def test_bars_of_durations_are_of_the_requests_that_are_shown(gateway: Gateway) -> None:
    other = await make_key(gateway, "other tenant")
    for seconds in (0.3, 1.5, 1.7):
        end(gateway, seconds=seconds)
    end(gateway, "key-00000000", seconds=70.0)
    end(gateway, seconds=0.001, status=429, error="rate_limit_exceeded")
    async with visiting(gateway, KEY) as owner:
        bars = (await regions(owner))["durations"]
        assert "2 requests, 1.0 s to 2.0 s" in bars
        assert 'href="/console/requests?slower_than_s=1&amp;at_most_s=2"' in bars
        assert "50.0 s to" not in bars
        assert "of 3 requests" in bars
        assert (
            bars.split()
            == (await owner.get(PAGE))
            .text.partition('data-live="durations">')[2]
            .partition("</section>")[0]
            .split()
        )
    async with visiting(gateway, other["authorization"].removeprefix("Bearer ")) as stranger:
        assert not (await regions(stranger))["durations"].strip()


async def test_bars_of_stored_requests_lead_to_those_requests(gateway: Gateway) -> None:
    for _ in range(3):
        await gateway.chat()
    async with visiting(gateway, KEY) as owner, asyncio.timeout(20):
        page = ""
        while "of 3 requests" not in page:  # the ledger is written in batches
            page = (await owner.get(f"{PAGE}?from=1h")).text
        bars = re.findall(r'<a href="([^"]+)" aria-label="(\d) request', page)
        assert sum(int(count) for _, count in bars) == 3
        for path, count in bars:
            page = (await owner.get(html.unescape(path))).text
            assert page.count('id="request-') == int(count)
            assert f'aria-label="{count} request' in page
            assert "; show all" in page
            assert "of 3 requests" in page
        assert "must be a number of seconds" in (await owner.get(f"{PAGE}?at_most_s=-1")).text


async def test_a_rate_is_shown_unless_the_tokens_came_at_once(gateway: Gateway) -> None:
    async with visiting(gateway, ROOT_KEY) as admin:
        for seconds, shown in ((1.5, True), (0.501, False)):
            id_ = end(gateway, seconds=seconds, ttft_s=0.5, usage=Usage(5, 101))
            page = (await admin.get(f"{PAGE}/{id_}")).text
            assert ("100 per second" in page) is shown
            assert ("per second" in page) is shown
