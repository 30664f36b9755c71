"""The overview, the models' page and the engines' pages: what they show, and to whom."""

import json
import re
from collections.abc import AsyncIterator
from html import unescape
from typing import Any

import httpx
import pytest
import pytest_asyncio

from engines.base import EngineState
from tests.app.console.fleet import CANARY, HOSTILE, engine_of, fleet
from tests.app.console.visits import new_key, visiting
from tests.gateway import KEY, Gateway
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGES = (
    "/console/overview",
    "/console/models",
    "/console/models/ready",
    "/console/engines",
    "/console/engines/ready-0",
    "/console/engines/ready-0?tab=log",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with fleet(tmp_path_factory.mktemp("fleet")) as one:
        yield one


async def text_of(visitor: httpx.AsyncClient, path: str) -> str:
    response = await visitor.get(path)
    assert response.status_code == 200, response.text
    return response.text


async def first_regions(visitor: httpx.AsyncClient, page: str) -> dict[str, str]:
    """Return the live regions of a page, as they are when it is opened."""
    async with visitor.stream("GET", f"/console/api/events/{page}") as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                regions: dict[str, str] = json.loads(line.removeprefix("data: "))
                return regions
    raise AssertionError("no event came")


@pytest.mark.parametrize("path", PAGES)
async def test_a_client_does_not_see_the_page(gateway: Gateway, path: str) -> None:
    async with visiting(gateway, KEY) as client:
        assert (await client.get(path)).status_code == 403
        page = path.removeprefix("/console/").partition("/")[0]
        assert (await client.get(f"/console/api/events/{page}")).status_code == 403


@pytest.mark.parametrize("path", PAGES)
async def test_hostile_names_and_errors_are_text_and_secrets_are_hidden(
    admin: httpx.AsyncClient, path: str
) -> None:
    page = await text_of(admin, path)
    assert "<script>alert" not in page
    assert CANARY not in page
    regions = await first_regions(admin, path.removeprefix("/console/").partition("/")[0])
    for html in regions.values():
        assert "<script>" not in html
        assert CANARY not in html


async def test_the_overview_says_what_failed_and_what_to_change(admin: httpx.AsyncClient) -> None:
    page = unescape(await text_of(admin, "/console/overview"))
    assert f"Engine failed-0 of {HOSTILE} failed" in page
    assert "lower gpu-memory-utilization" in page


async def test_the_overview_shows_how_far_a_start_is(admin: httpx.AsyncClient) -> None:
    page = await text_of(admin, "/console/overview")
    assert "Loading weights, shard 2 of 5" in page
    assert "20.0 s so far, about 40.0 s left" in page
    assert 'value="0.4"' in page


async def test_discovered_servers_without_requests_are_shown_with_the_reason(
    admin: httpx.AsyncClient,
) -> None:
    assert "1 discovered server gets no requests" in await text_of(admin, "/console/overview")
    page = await text_of(admin, "/console/engines")
    assert "Discovered servers without requests" in page
    regions = await first_regions(admin, "engines")
    assert "listed-127.0.0.1-" in regions["unused"]
    assert "Connection refused" in regions["unused"]


async def test_the_overview_says_which_model_has_no_server(admin: httpx.AsyncClient) -> None:
    page = await text_of(admin, "/console/overview")
    assert "Model listed has no server" in page


async def test_a_chart_has_a_title_and_a_description(admin: httpx.AsyncClient) -> None:
    page = await text_of(admin, "/console/overview")
    for name in ("tokens", "requests", "ttft", "errors"):
        assert f'aria-labelledby="{name}-title {name}-desc"' in page
        assert f'<title id="{name}-title">' in page
        assert f'<desc id="{name}-desc">' in page
    assert "in the last 60 min" in page


async def test_memory_is_shown_by_engine_and_device(admin: httpx.AsyncClient) -> None:
    memory = (await first_regions(admin, "overview"))["memory"]
    assert "12.5" in memory
    assert "GPU 0, 1" in memory


async def test_a_model_shows_how_it_is_served(admin: httpx.AsyncClient) -> None:
    regions = await first_regions(admin, "models")
    ready = regions["model ready"]
    for shown in (
        "alias of ready",
        "far",
        "session",
        "eager",
        "1 of 1",
        "/console/engines/ready-0",
    ):
        assert shown in ready


async def test_actions_are_there_for_those_who_may_take_them(
    admin: httpx.AsyncClient, auditor: httpx.AsyncClient
) -> None:
    for path in ("/console/models", "/console/engines/ready-0"):
        assert "data-action=" in await text_of(admin, path)
        assert "data-action=" not in await text_of(auditor, path)
    for page in ("models", "engines"):
        assert "data-action=" in "".join((await first_regions(admin, page)).values())
        assert "data-action=" not in "".join((await first_regions(auditor, page)).values())
    for path in ("models/ready/unload", "models/ready/load", "engines/ready-0/restart"):
        response = await auditor.post(f"/console/api/admin/{path}")
        assert response.status_code == 403


async def test_sleep_is_offered_only_where_it_is_configured(admin: httpx.AsyncClient) -> None:
    assert "/sleep" not in await text_of(admin, "/console/models")


async def test_a_remote_engine_has_no_actions_and_no_log(admin: httpx.AsyncClient) -> None:
    assert "data-action=" not in await text_of(admin, "/console/engines/far-0")
    page = await text_of(admin, "/console/engines/far-0?tab=log")
    assert "data-action=" not in page
    assert "it runs elsewhere" in page
    assert 'id="log"' not in page


async def test_the_button_restarts_the_engine(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    engine = engine_of(gateway, "ready")
    starts: list[EngineState] = []
    states = engine.changes.next()
    states.add_done_callback(lambda _: starts.append(engine.state))
    response = await admin.post("/console/api/admin/engines/ready-0/restart?wait=true")
    assert response.status_code == 200
    await wait_until(lambda: bool(starts))
    assert engine.state is EngineState.READY


async def test_engines_are_compared_flag_by_flag(admin: httpx.AsyncClient) -> None:
    query = "engine=ready-0&engine=starting-0"
    page = await text_of(admin, f"/console/engines?{query}&rows=all")
    one, other = ('data-engine="ready-0">bfloat16', 'data-engine="starting-0">float16')
    marked = f'<td class="value differs" {other}<span class="visually-hidden"> (differs)</span>'
    assert f'<th scope="row">dtype</th><td class="value" {one}</td>{marked}' in page
    assert '<th scope="row">max model len</th>' in page
    assert "--enforce-eager" in page
    only = await text_of(admin, f"/console/engines?{query}")
    assert "max model len" not in only
    assert "--max-num-seqs" in only


async def test_engines_elsewhere_and_those_that_failed_are_not_compared(
    admin: httpx.AsyncClient,
) -> None:
    page = await text_of(admin, "/console/engines?engine=ready-0&engine=far-0&engine=failed-0")
    choices = re.findall(r'name="engine" value="([^"]+)"', page)
    assert choices == ["ready-0", "starting-0"]


@pytest.mark.parametrize("names", [["nope"], ["<b>"], ["ready-0"] * 900])
async def test_any_choice_of_engines_is_a_page(admin: httpx.AsyncClient, names: list[str]) -> None:
    response = await admin.get("/console/engines", params={"engine": names})
    assert response.status_code == 200
    assert "<b>" not in response.text


async def test_an_engine_that_is_not_there_is_said_so(admin: httpx.AsyncClient) -> None:
    response = await admin.get("/console/engines/<b>nope")
    assert response.status_code == 404
    assert "there is no engine" in response.text
    assert "<b>" not in response.text


async def test_the_command_line_has_its_secrets_hidden(admin: httpx.AsyncClient) -> None:
    page = await text_of(admin, "/console/engines/ready-0")
    assert "--hf-token=***" in page
    assert 'data-copy="runs"' in page


def log_path(gateway: Gateway) -> Any:
    return gateway.state.settings.server.run_dir / "ready-0" / "engine.log"


async def test_a_line_without_an_end_neither_stops_the_log_nor_comes_whole(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    log = log_path(gateway)
    log.write_bytes(b"first\n" + b"x" * 10_000_000 + b"\n\x1b[31mred\x07\n")
    path = "/console/api/admin/engines/ready-0/log?lines=500"
    lines = (await admin.get(path)).text.splitlines()
    assert lines[-1] == "red"
    assert max(map(len, lines)) < 20_000
    async with admin.stream("GET", f"{path}&follow=true") as response:
        received = 0
        async for line in response.aiter_lines():
            received += len(line)
            if line == "red":
                break
    assert received < 100_000


async def test_a_log_ends_with_the_session_of_who_reads_it(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.log_stream.CHECK_S", 0.0)
    made = await new_key(gateway, admin, name="leaves", role="auditor")
    log_path(gateway).write_bytes(b"one line\n")
    async with visiting(gateway, made["key"]) as reader:
        path = "/console/api/admin/engines/ready-0/log?follow=true"
        async with reader.stream("GET", path) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "one line"
            disabled = await admin.post(f"/console/api/admin/keys/{made['id']}/disable")
            assert disabled.status_code == 200
            await gateway.state.authenticator.poll()
            assert [line async for line in lines] == []
