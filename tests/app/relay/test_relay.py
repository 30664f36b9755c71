"""The relay, through the real application and server with a fake engine."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.api import ENDPOINTS
from engines.base import EngineState
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, Gateway, free_port, remote, running, serving_demo, settings_for
from tests.waiting import PATIENCE_S, wait_until


@asynccontextmanager
async def serving(fake: Fake, tmp_path: Path, **timeouts: float) -> AsyncIterator[Gateway]:
    """Run a gateway, by default with long timeouts for its engine."""
    model = {"name": "demo", "aliases": ["al"], "engines": [remote(fake.url, timeouts=timeouts)]}
    async with running(settings_for(model, run_dir=tmp_path)) as one:
        yield one
        # Whatever a test did: no slot, lease or connection may be left behind.
        await asyncio.wait_for(one.state.admission.wait_until_idle(), PATIENCE_S)
        replicas = [r for m in one.state.catalogue.models for r in m.replicas]
        assert [r.in_flight for r in replicas] == [0] * len(replicas)
        assert await one.metric("gateway_requests_in_flight", model="demo") == 0
        await fake.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Gateway, Fake]]:
    """A gateway and its engine for tests that leave nothing behind, on a loop that they share."""
    async with Fake() as fake, serving(fake, tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway, fake


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving(fake, tmp_path) as one:
        yield one


def error_of(response: httpx.Response) -> Any:
    return response.json()["error"]


async def test_plain_response_is_byte_for_byte_the_engines(gateway: Gateway, fake: Fake) -> None:
    through = await gateway.chat()
    async with httpx.AsyncClient() as direct:
        straight = await direct.post(f"{fake.url}/v1/chat/completions", content=fake.seen[-1].body)
    assert through.content == straight.content
    assert through.headers["content-type"] == straight.headers["content-type"]
    assert through.headers["content-length"] == straight.headers["content-length"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True}},
    ],
)
async def test_stream_equals_a_direct_call(
    gateway: Gateway, fake: Fake, fields: dict[str, Any]
) -> None:
    through = await gateway.chat(stream=True, **fields)
    assert fake.seen[-1].json["stream_options"] == {"include_usage": True}
    async with httpx.AsyncClient() as direct:
        body = {**fake.seen[-1].json, "stream_options": None, **fields}
        straight = await direct.post(f"{fake.url}/v1/chat/completions", json=body)
    assert through.content == straight.content
    assert through.headers["content-type"] == straight.headers["content-type"]
    assert through.headers["x-accel-buffering"] == "no"


async def test_request_reaches_the_engine_unchanged(gateway: Gateway, fake: Fake) -> None:
    body = b'{ "temperature":0.10, "model" : "demo","x":[1e400,12345678901234567890123] }'
    headers = {"content-type": "application/json"}
    await gateway.client.post("/v1/chat/completions", content=body, headers=headers)
    salt = b'"cache_salt":"%s",' % fake.seen[-1].json["cache_salt"].encode()
    assert fake.seen[-1].body == b"{" + salt + body[1:]


async def test_alias_reaches_the_engine_as_the_served_name(gateway: Gateway, fake: Fake) -> None:
    assert (await gateway.chat("al", temperature=0.5)).status_code == 200
    assert fake.seen[-1].json["model"] == "demo"
    assert fake.seen[-1].json["temperature"] == 0.5


async def test_client_secrets_and_identity_do_not_reach_the_engine(
    gateway: Gateway, fake: Fake
) -> None:
    headers = {"cookie": "c=1", "x-forwarded-for": "1.2.3.4", "x-data-parallel-rank": "3"}
    body = {"model": "demo", "messages": []}
    await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    names = {name for name, _ in fake.seen[-1].headers}
    assert names == {"host", "accept", "content-type", "content-length", "x-request-id"}


async def test_query_string_reaches_the_engine(gateway: Gateway, fake: Fake) -> None:
    await gateway.client.post("/v1/messages?beta=true", json={"model": "demo"})
    assert fake.seen[-1].target == "/v1/messages?beta=true"


async def test_trace_context_reaches_the_engine(gateway: Gateway, fake: Fake) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"model": "demo"}
    await gateway.client.post("/v1/completions", json=body, headers={"traceparent": parent})
    assert fake.seen[-1].header("traceparent") == parent


async def test_engines_own_4xx_passes_unchanged(gateway: Gateway) -> None:
    response = await gateway.chat(max_tokens=-1)
    assert response.status_code == 400
    assert error_of(response)["message"] == "max_tokens must be at least 1"


async def test_engines_json_500_passes_unchanged(gateway: Gateway) -> None:
    response = await gateway.chat(fake="status:500")
    assert response.status_code == 500
    assert response.json() == {"detail": "as asked"}


async def test_text_500_of_an_engine_is_replaced(gateway: Gateway) -> None:
    response = await gateway.chat(fake="text:500")
    assert response.status_code == 502
    assert error_of(response)["code"] == "engine_failed"


async def test_redirect_of_an_engine_is_never_forwarded(gateway: Gateway) -> None:
    response = await gateway.chat(fake="redirect")
    assert response.status_code == 502
    assert "location" not in response.headers
    assert "evil" not in response.text


@pytest.mark.parametrize("fault", ["close", "reset", "garbage", "huge_head", "truncate", "dead"])
async def test_broken_response_before_the_first_byte_is_502(gateway: Gateway, fault: str) -> None:
    response = await gateway.chat(fake=fault)
    assert response.status_code == 502
    assert error_of(response)["code"] == "engine_failed"


@pytest.mark.slow
async def test_engine_timeout_is_504(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, first_byte_s=0.3) as gateway:
        response = await gateway.chat(fake="hang")
    assert response.status_code == 504
    assert error_of(response)["code"] == "engine_timeout"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "events", "code"),
    [
        ("die:2", 2, "engine_failed"),
        ("die_in_event", 1, "engine_failed"),
        ("bad_chunk", 1, "engine_failed"),
        ("dead_stream:0", 0, "engine_failed"),
        ("dead_stream:2", 2, "engine_failed"),
        ("stall:3", 3, "engine_timeout"),
    ],
)
async def test_fault_in_mid_stream_is_one_error_event_and_no_done(
    fake: Fake, tmp_path: Path, fault: str, events: int, code: str
) -> None:
    body = json.dumps({"model": "demo", "stream": True, "fake": fault}).encode()
    async with serving(fake, tmp_path, stall_s=0.3) as gateway:
        answer = await gateway.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\nauthorization: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (AUTH["authorization"].encode(), len(body), body)
        )
    text = answer.split(b"\r\n\r\n", 1)[1]
    assert text.endswith(b"0\r\n\r\n"), "the body ends in order"
    datas = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: ")]
    assert len(datas) == events + 1
    assert datas[-1]["error"]["code"] == code
    assert b"[DONE]" not in text


async def test_request_of_a_dead_engine_is_retried_once(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, *(fake.url for _ in range(3))) as gateway:
        assert (await gateway.chat(fake="dead")).status_code == 502
        assert sum(one.target == "/v1/chat/completions" for one in fake.seen) == 2
        assert await gateway.metric("gateway_retries_total", reason="EngineDied") == 1


@pytest.mark.slow
async def test_fault_in_an_anthropic_stream_is_an_anthropic_event(gateway: Gateway) -> None:
    body = {"model": "demo", "stream": True, "fake": "die:1"}
    async with gateway.client.stream("POST", "/v1/messages", json=body) as response:
        lines = response.aiter_lines()
        while await anext(lines) != "event: error":
            pass
        last = json.loads((await anext(lines)).removeprefix("data: "))
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


@pytest.mark.parametrize("size", [1, 5, 64, 4096])
async def test_split_events_arrive_as_the_same_bytes(gateway: Gateway, size: int) -> None:
    whole = await gateway.chat(stream=True, fake="split:1000000")
    assert (await gateway.chat(stream=True, fake=f"split:{size}")).content == whole.content


@pytest.mark.parametrize("size", [100, 1100, 5000])
async def test_usage_of_a_large_response_is_found_at_any_position(
    gateway: Gateway, size: int
) -> None:
    assert len((await gateway.chat(fake=f"long:{size}")).content) > size * 1024
    count = "gateway_tokens_total"
    assert await gateway.metric(count, model="demo", kind="prompt") == 3
    assert await gateway.metric(count, model="demo", kind="completion") == 2


async def test_chunks_are_forwarded_as_they_arrive(gateway: Gateway) -> None:
    body = {"model": "demo", "stream": True, "fake": "pace:20"}
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.aiter_raw()
        first = await anext(pieces)
        assert first.count(b"data: ") == 1
        assert (await anext(pieces)).count(b"data: ") == 1


# The pace leaves a busy machine time for the abort before the next event is written.
@pytest.mark.parametrize("fault", ["hang", "pace:2000", "stall:1"])
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.asyncio(loop_scope="module")
async def test_disconnect_aborts_the_engines_work(
    shared: tuple[Gateway, Fake], fault: str, path: str
) -> None:
    gateway, fake = shared
    counted = {"model": "demo", "endpoint": path, "status": "499"}

    async def counts() -> list[float]:
        left = await gateway.metric("gateway_client_disconnects_total")
        return [fake.aborted, left, await gateway.metric("gateway_requests_total", **counted)]

    before = await counts()
    body = json.dumps({"model": "demo", "fake": fault}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: x\r\nauthorization: %s\r\ncontent-length: %d\r\n\r\n%s"
        % (path.encode(), AUTH["authorization"].encode(), len(body), body)
    )
    await fake.until_running()
    writer.close()
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    assert await counts() == [count + 1 for count in before]
    (replica,) = gateway.state.catalogue.models[0].replicas
    assert replica.in_flight == 0
    assert await gateway.metric("gateway_requests_in_flight", model="demo") == 0


async def test_disconnect_while_connecting_to_the_engine_aborts_the_connection(
    tmp_path: Path,
) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        # Whoever comes after the one that fits into the backlog waits for ever.
        with socket.create_connection(("127.0.0.1", port)):
            timeouts = {"connect_s": 600}
            model = {
                "name": "m",
                "engines": [remote(f"http://127.0.0.1:{port}", timeouts=timeouts)],
            }
            app = running(settings_for(model, run_dir=tmp_path), settle=False)
            async with app as gateway:
                (replica,) = gateway.state.catalogue.models[0].replicas
                await wait_until(lambda: replica.engine.state is not EngineState.STOPPED)
                body = b'{"model":"m"}'
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: %s\r\n"
                    b"content-length: %d\r\n\r\n%s"
                    % (AUTH["authorization"].encode(), len(body), body)
                )
                async with asyncio.timeout(PATIENCE_S):
                    await wait_until(lambda: replica.in_flight != 0)
                    writer.close()
                    await wait_until(lambda: not replica.in_flight)
                    await gateway.state.admission.wait_until_idle()
                assert await gateway.metric("gateway_client_disconnects_total") == 1


async def test_disconnect_before_the_body_is_complete_is_recorded(
    gateway: Gateway, fake: Fake
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: %s\r\n"
        b"content-length: 100\r\nexpect: 100-continue\r\n\r\n{" % AUTH["authorization"].encode()
    )
    async with asyncio.timeout(PATIENCE_S):
        assert b" 100 " in await reader.readline(), "the body is being read"
    writer.close()
    async with asyncio.timeout(PATIENCE_S):
        while await gateway.metric("gateway_client_disconnects_total") == 0:
            await asyncio.sleep(0.005)
    assert not [seen for seen in fake.seen if seen.method == "POST"]


async def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    def request(status: int, close: bool = False) -> bytes:
        body = json.dumps({"model": "demo", "fake": f"status:{status}"}).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: %s\r\n%s"
            b"content-length: %d\r\n\r\n%s"
            % (
                AUTH["authorization"].encode(),
                b"connection: close\r\n" if close else b"",
                len(body),
                body,
            )
        )

    answer = await gateway.raw(request(200) + request(404) + request(201, close=True))
    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404", b"201"]


# Replicas


async def test_unreachable_replica_is_skipped(tmp_path: Path) -> None:
    async with Fake() as alive:
        dead = remote(f"http://127.0.0.1:{free_port()}")
        model = {"name": "demo", "engines": [dead, remote(alive.url)]}
        async with running(settings_for(model, run_dir=tmp_path)) as gateway:
            # A server that dies between two requests is READY in our eyes, so it is asked first.
            answers = [await gateway.chat() for _ in range(6)]
            assert {answer.status_code for answer in answers} == {200}


async def test_request_is_retried_when_an_engine_dies_before_the_first_byte(tmp_path: Path) -> None:
    async with Fake() as alive:
        dying = await asyncio.start_server(_close_posts, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{dying.sockets[0].getsockname()[1]}"
        async with serving_demo(tmp_path, url, alive.url) as gateway:
            answers = [await gateway.chat() for _ in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            assert await gateway.metric("gateway_retries_total", reason="ClosedBeforeAnswer") > 0
        dying.close()
        await dying.wait_closed()


async def _close_posts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers questions of health and dies of everything else."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
    writer.close()


async def test_request_that_kills_engines_is_tried_twice_at_most(tmp_path: Path) -> None:
    async with Fake() as one, Fake() as two, Fake() as three:
        engines = [remote(fake.url) for fake in (one, two, three)]
        settings = settings_for({"name": "demo", "engines": engines}, run_dir=tmp_path)
        async with running(settings) as gateway:
            response = await gateway.chat(fake="close")
            assert response.status_code == 502
            asked = [f for f in (one, two, three) if any(s.method == "POST" for s in f.seen)]
            assert len(asked) == 2


async def test_no_engine_up_is_503_with_retry_after(tmp_path: Path) -> None:
    dead = remote(f"http://127.0.0.1:{free_port()}")
    settings = settings_for({"name": "demo", "engines": [dead]}, run_dir=tmp_path)
    async with running(settings) as gateway:
        response = await gateway.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"
        assert int(response.headers["retry-after"]) > 0
        assert (await gateway.client.get("/ready")).status_code == 503
        assert (await gateway.client.get("/health")).status_code == 200


async def test_engine_that_has_just_gone_is_not_called_ready(tmp_path: Path) -> None:
    async with Fake() as fake:
        settings = settings_for({"name": "demo", "engines": [remote(fake.url)]}, run_dir=tmp_path)
        async with running(settings) as gateway:
            await fake.stop()
            error = error_of(await gateway.chat())
            assert error["message"] == "no engine is up for model 'demo' (unreachable)"


async def test_requests_spread_over_replicas_by_least_in_flight(tmp_path: Path) -> None:
    async with (
        Fake() as one,
        Fake() as two,
        serving_demo(tmp_path, one.url, two.url) as gateway,
    ):
        waiting = [asyncio.create_task(gateway.chat(fake="hang")) for _ in range(6)]
        await one.until_running(3)
        await two.until_running(3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await one.until_idle()
        await two.until_idle()


async def test_remote_server_gets_its_own_key_and_never_the_clients(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOX_KEY", "box-secret")
    engine = remote(fake.url, api_key_env="BOX_KEY", served_model_name="org/real")
    fake.model = "org/real"
    settings = settings_for({"name": "demo", "engines": [engine]}, run_dir=tmp_path)
    async with running(settings) as gateway:
        assert (await gateway.chat()).status_code == 200
        assert fake.seen[-1].header("authorization") == "Bearer box-secret"
        assert fake.seen[-1].json["model"] == "org/real"
