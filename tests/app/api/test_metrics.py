"""The pages for Prometheus: who may read them and where, and that every request is counted."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.settings import digest
from tests.app.raw import asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, remote, running, serving_demo, settings_for

METRICS_KEY = "sk-metrics-0123456789abcdef"
WITH_KEY = {"authorization": f"Bearer {METRICS_KEY}"}
CHAT = "/v1/chat/completions"
# A series as a reader knows it: its name and its labels.
Place = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    engine = remote(fake.url, served_model_name="demo")
    hasty = {**engine, "timeouts": {"first_byte_s": 0.1}}
    queue = {"max_in_flight": 1, "max_waiting": 1, "timeout_s": 1.0}
    models: list[dict[str, Any]] = [
        {"name": "demo", "aliases": ["org/al"], "engines": [engine]},
        {"name": "hasty", "engines": [hasty]},
        {"name": "narrow", "queue": queue, "engines": [engine]},
        {"name": "limited", "limits": {"requests_per_minute": 0}, "engines": [engine]},
        {"name": "down", "engines": [remote("http://127.0.0.1:1")]},
    ]
    async with running(settings_for(*models, run_dir=tmp_path)) as one:
        yield one


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each scrape make the page anew: on a busy machine one is kept for a second."""
    monkeypatch.setattr("app.api.kept_page.MAX_AGE_S", 0.0)


async def scrape(gateway: Gateway) -> dict[Place, float]:
    """Return every sample but those of the process."""
    text = (await gateway.client.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("process_")
    }


async def requests(gateway: Gateway) -> dict[tuple[str, str, str], float]:
    """Return gateway_requests_total by model, endpoint and status."""
    found = {}
    for (name, labels), value in (await scrape(gateway)).items():
        if name == "gateway_requests_total":
            named = dict(labels)
            found[named["model"], named["endpoint"], named["status"]] = value
    return found


class TestKey:
    @pytest.fixture
    async def guarded(self, fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
        key = digest(METRICS_KEY.encode())
        async with serving_demo(tmp_path, fake.url, metrics_key=key) as one:
            yield one

    async def test_the_token_grants_access(self, guarded: Gateway) -> None:
        answer = await guarded.client.get("/metrics", headers=WITH_KEY)
        assert answer.status_code == 200
        assert "gateway_info{" in answer.text

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": ""},
            {"authorization": "Bearer"},
            {"authorization": f"Basic {METRICS_KEY}"},
            {"authorization": f"Bearer {METRICS_KEY[:-1]}"},
            {"authorization": f"Bearer {digest(METRICS_KEY.encode()).hex()}"},
            {},  # a client's key, which the test's client sends
            ROOT,
        ],
    )
    async def test_others_are_refused_in_json(
        self, guarded: Gateway, headers: Mapping[str, str]
    ) -> None:
        answer = await guarded.client.get("/metrics", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "gateway_" not in answer.text
        head = await guarded.client.head("/metrics", headers=headers)
        assert head.status_code == 401

    async def test_the_token_grants_nothing_else(self, guarded: Gateway) -> None:
        for path in ("/v1/models", "/admin/keys"):
            assert (await guarded.client.get(path, headers=WITH_KEY)).status_code == 401

    async def test_health_and_readiness_ask_for_none(self, guarded: Gateway) -> None:
        for path in ("/health", "/ready"):
            answer = await guarded.client.get(path, headers={"authorization": ""})
            assert answer.status_code == 200

    async def test_refusals_are_counted(self, guarded: Gateway) -> None:
        await guarded.client.get("/metrics")
        del guarded.client.headers["authorization"]
        await guarded.client.get("/metrics")
        for reason in ("missing", "invalid"):
            assert await guarded.metric("gateway_auth_failures_total", reason=reason) == 1


class TestPort:
    @pytest.fixture
    async def separate(self, fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
        metrics = {"host": "127.0.0.1", "port": 0}
        async with serving_demo(tmp_path, fake.url, metrics=metrics) as one:
            yield one

    @pytest.fixture
    async def scraper(self, separate: Gateway) -> AsyncIterator[httpx.AsyncClient]:
        url = f"http://127.0.0.1:{separate.metrics_port}"
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            yield client

    async def test_the_page_is_there_and_not_on_the_main_port(
        self, separate: Gateway, scraper: httpx.AsyncClient
    ) -> None:
        await separate.chat()
        page = (await scraper.get("/metrics")).text
        assert f'gateway_requests_total{{endpoint="{CHAT}",model="demo",status="200"}} 1.0' in page
        assert (await scraper.head("/metrics")).status_code == 200
        hidden = await separate.client.get("/metrics")
        assert hidden.status_code == 404
        assert hidden.json()["error"]["code"] == "not_found"

    async def test_nothing_else_is_there(
        self, separate: Gateway, scraper: httpx.AsyncClient
    ) -> None:
        for path in (CHAT, "/v1/models", "/admin/keys", "/health", "/openapi.json", "/docs"):
            answer = await scraper.get(path, headers=ROOT)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
        assert (await separate.client.get("/health")).status_code == 200

    async def test_scrapers_are_no_clients(
        self, separate: Gateway, scraper: httpx.AsyncClient
    ) -> None:
        assert (await separate.client.get("/health")).status_code == 200
        page = (await scraper.get("/metrics")).text
        assert "\ngateway_connections 1.0\n" in page
        assert "\ngateway_connections_limit 4096.0\n" in page


async def test_invented_names_create_no_series(gateway: Gateway) -> None:
    """After the first of each kind, a hundred others leave the same series behind."""

    async def make_up(number: int) -> None:
        client, word = gateway.client, f"canary{number}"
        await gateway.chat(word)
        await gateway.chat("org/al", user=word, fake_field=word)
        await client.post(f"/{word}/v1/chat/completions", json={"model": word})
        await client.post(f"{CHAT}/{word}", json={"model": word})
        await client.get(f"/v1/responses/{word}")
        await client.get(f"/v1/models/{word}")
        await client.get(f"/admin/keys/{word}", headers=ROOT)
        await client.get(f"/admin/{word}")
        await client.request(f"CANARY{number}", CHAT)
        await client.post(CHAT, content=word, headers={"content-type": word})
        await client.post(
            CHAT, json={"model": "demo", "user": word}, headers={"x-request-id": word}
        )
        key = {"authorization": f"Bearer sk-{word}-0123456789abcdef"}
        await client.post(CHAT, json={"model": "demo"}, headers=key)
        await client.get("/v1/models", headers={"host": word})

    await make_up(0)
    before = await scrape(gateway)
    for number in range(1, 8):
        await make_up(number)
    after = await scrape(gateway)
    assert after.keys() == before.keys()
    assert not re.search("canary", repr(after), re.IGNORECASE)
    # And none of it got lost: each of the seven is one more where the first was.
    changed = [place for place in after if place[0] == "gateway_requests_total"]
    assert [after[place] - before[place] for place in changed] == pytest.approx(
        [7 * before[place] for place in changed]
    )


@pytest.mark.slow
async def test_every_way_a_request_may_end_is_counted_once(gateway: Gateway, fake: Fake) -> None:
    client = gateway.client
    expected: dict[tuple[str, str, str], float] = {}

    def expect(model: str, status: int, endpoint: str = CHAT) -> None:
        place = model, endpoint, str(status)
        expected[place] = expected.get(place, 0) + 1

    assert (await gateway.chat()).status_code == 200
    expect("demo", 200)
    assert (await gateway.chat(stream=True)).status_code == 200
    expect("demo", 200)
    assert (await gateway.chat(max_tokens=-1)).status_code == 400  # the engine's own
    expect("demo", 400)
    assert (await gateway.chat("hasty", fake="hang")).status_code == 504
    expect("hasty", 504)
    assert (await gateway.chat(fake="die:2", stream=True)).status_code == 200  # in mid-stream
    expect("demo", 200)
    assert (await gateway.chat("down")).status_code == 503
    expect("down", 503)
    assert (await gateway.chat("limited")).status_code == 429
    expect("limited", 429)
    assert (await gateway.chat("nobody")).status_code == 404
    expect("unknown", 404)
    assert (await client.post(CHAT, content=b"{")).status_code == 400
    expect("unknown", 400)
    assert (await client.get(CHAT)).status_code == 405
    expect("unknown", 405)
    assert (await client.post(CHAT, headers={"authorization": "x"})).status_code == 401
    expect("unknown", 401)
    assert (await client.post("/tokenize", json={"model": "demo"})).status_code == 200
    expect("demo", 200, "/tokenize")
    assert (await client.get("/v1/responses/none")).status_code == 404
    expect("unknown", 404, "/v1/responses/{id}")
    assert (await client.get("/v1/models")).status_code == 200
    expect("unknown", 200, "/v1/models")
    assert (await client.get("/v1/nothing")).status_code == 404
    expect("unknown", 404, "none")
    assert (await client.get("/admin/keys", headers=ROOT)).status_code == 200
    expect("unknown", 200, "/admin")
    assert (await client.get("/admin/keys")).status_code in (401, 403)
    expect("unknown", 403, "/admin")

    async with connected(gateway) as holder:  # a client that leaves in mid-stream
        holder.send(request(asking(stream=True, fake="pace:20"), path=CHAT.encode()))
        await fake.until_running()
    await gateway.state.admission.wait_until_idle()
    expect("demo", 499)

    async with connected(gateway) as holder:
        body = json.dumps({"model": "narrow", "stream": True, "fake": "pace:20"}).encode()
        holder.send(request(body, path=CHAT.encode()))
        await fake.until_running()
        late = asyncio.create_task(gateway.chat("narrow"))  # waits for too long
        while gateway.state.admission.waiting == 0:
            await asyncio.sleep(0)
        assert (await gateway.chat("narrow")).status_code == 503  # one too many
        assert (await late).status_code == 503
    await gateway.state.admission.wait_until_idle()
    expect("narrow", 499)
    expect("narrow", 503)
    expect("narrow", 503)

    async with connected(gateway) as rude:
        rude.send(b"this is not HTTP\r\n\r\n")
        assert (await rude.answer()).status == 400
    expect("unknown", 400, "none")

    async with asyncio.timeout(20):
        while (found := await requests(gateway)) != expected and sum(found.values()) < sum(
            expected.values()
        ):
            await asyncio.sleep(0.01)
    assert found == expected
    durations = {
        (labels["model"], labels["endpoint"]): value
        for (name, place), value in (await scrape(gateway)).items()
        if name == "gateway_request_duration_seconds_count" and (labels := dict(place))
    }
    by_endpoint: dict[tuple[str, str], float] = {}
    for (model, endpoint, _), value in expected.items():
        by_endpoint[model, endpoint] = by_endpoint.get((model, endpoint), 0) + value
    by_endpoint.pop(("unknown", "none"))
    assert durations.pop(("unknown", "none")) == 1  # what is no HTTP has no duration
    assert durations == by_endpoint
    metric = gateway.metric
    assert await metric("gateway_client_disconnects_total") == 2
    assert await metric("gateway_queue_wait_seconds_count", model="narrow") == 1
    assert await metric("gateway_queue_limit", model="narrow") == 1
    assert await metric("gateway_queue_limit", model="demo") == 256
    assert await metric("gateway_rate_limited_total", limit="requests") == 1
    outcomes = {"completed": 3, "refused": 1, "failed": 2, "disconnected": 2}
    for outcome, count in outcomes.items():
        assert await metric("gateway_usage_records_total", outcome=outcome) == count, outcome
    for model in ("demo", "hasty", "narrow", "limited", "down"):
        assert await metric("gateway_requests_in_flight", model=model) == 0
        assert await metric("gateway_queue_depth", model=model) == 0


async def test_unwritten_usage_is_shown(gateway: Gateway) -> None:
    assert await gateway.metric("gateway_usage_records_pending") == 0
    await gateway.chat()
    assert await gateway.metric("gateway_usage_records_pending") == 1


async def test_version_and_start_time_are_shown(gateway: Gateway) -> None:
    page = await scrape(gateway)
    assert any(name == "gateway_info" for name, _ in page)
    started = await gateway.metric("process_start_time_seconds")
    assert time.time() - 7 * 86_400 < started < time.time()
    assert await gateway.metric("process_resident_memory_bytes") > 10_000_000
    assert await gateway.metric("process_open_fds") > 3
