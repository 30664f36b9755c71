"""Queued requests, through the real server with a fake engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import LimitSettings, digest
from app.sse import COMMENT
from tests.app.raw import answers, asking, connected, request
from tests.app.tenants import tokens
from tests.fakes.vllm import Fake
from tests.gateway import KEY, Gateway, remote, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

OTHER_KEY = "sk-other-0123456789abcdef"
PATHS = ["/v1/chat/completions", "/v1/messages"]


def serving(
    *urls: str, tmp_path: Path, server: dict[str, Any] | None = None, **queue: Any
) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway whose engines take one request each by default."""
    engines = [remote(url) for url in urls]
    model = {"name": "demo", "engines": engines, "queue": {"max_in_flight": 1, **queue}}
    unlimited = {"default": dict.fromkeys(LimitSettings.model_fields)}
    settings = settings_for(model, run_dir=tmp_path, server=server or {}, limits=unlimited)
    keys = tuple(digest(key.encode()) for key in (KEY, OTHER_KEY))
    return running(settings.model_copy(update={"api_keys": keys}))


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving(fake.url, tmp_path=tmp_path) as one:
        yield one
        await at_rest(one)
        await fake.until_idle()


async def at_rest(gateway: Gateway) -> None:
    """Return when nothing is under way; nothing may wait or be counted then."""
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    assert gateway.state.admission.in_flight == 0
    await until_waiting(gateway, 0)
    assert await gateway.metric("gateway_queue_depth", model="demo") == 0
    assert await gateway.metric("gateway_requests_in_flight", model="demo") == 0


async def until_waiting(gateway: Gateway, count: int) -> None:
    """Return when so many requests wait."""
    await wait_until(lambda: gateway.state.admission.waiting == count)


@asynccontextmanager
async def engine_busy(gateway: Gateway, fake: Fake) -> AsyncIterator[None]:
    """Hold the engine's only slot."""
    async with connected(gateway) as holder:
        holder.send(request(asking(fake="hang")))
        await fake.until_running(timeout=PATIENCE_S)
        yield


def prompts(fake: Fake) -> list[str]:
    """Return the field `user` of every request that reached the engine and has one."""
    posts = [seen.json for seen in fake.seen if seen.method == "POST"]
    return [body["user"] for body in posts if "user" in body]


async def test_request_waits_until_an_engine_has_a_free_slot(
    gateway: Gateway, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await gateway.chat()).status_code == 200
    async with engine_busy(gateway, fake):
        task = asyncio.create_task(gateway.chat(user="waits"))
        await until_waiting(gateway, 1)
        assert await gateway.metric("gateway_queue_depth", model="demo") == 1
        assert await gateway.metric("gateway_requests_in_flight", model="demo") == 1
        assert prompts(fake) == []
    assert (await task).status_code == 200
    assert await gateway.metric("gateway_queue_wait_seconds_count", model="demo") == 1
    gateway.state.access.flush()
    lines = [line for line in capsys.readouterr().err.splitlines() if '"status":200' in line]
    assert ['"queue_ms":null' in line for line in lines] == [True, False]


async def test_without_a_bound_all_requests_reach_the_engine(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake.url, tmp_path=tmp_path, max_in_flight=None) as gateway:
        tasks = [asyncio.create_task(gateway.chat(fake="hang")) for _ in range(20)]
        await fake.until_running(20, PATIENCE_S)
        assert gateway.state.admission.waiting == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await at_rest(gateway)


async def test_each_engine_takes_its_maximum(tmp_path: Path) -> None:
    async with (
        Fake() as one,
        Fake() as two,
        serving(one.url, two.url, tmp_path=tmp_path, max_in_flight=2) as gateway,
    ):
        tasks = [asyncio.create_task(gateway.chat(fake="hang")) for _ in range(6)]
        await one.until_running(2, PATIENCE_S)
        await two.until_running(2, PATIENCE_S)
        await until_waiting(gateway, 2)
        assert (one.running, two.running) == (2, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await at_rest(gateway)


async def test_keys_take_turns(gateway: Gateway, fake: Fake) -> None:
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    body = {"model": "demo", "messages": []}
    tasks: list[asyncio.Task[httpx.Response]] = []
    async with engine_busy(gateway, fake):
        for count, name in enumerate(["a1", "a2", "a3", "b1", "b2"], start=1):
            ask = gateway.client.post(
                "/v1/chat/completions",
                json={**body, "user": name},
                headers=other if name.startswith("b") else None,
            )
            tasks.append(asyncio.create_task(ask))
            await until_waiting(gateway, count)
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    # Of "a" two count, and of "b" one: the last of each does not go on waiting.
    index = await gateway.metric("gateway_queue_fairness", model="demo")
    assert index == pytest.approx(3**2 / (2 * (2**2 + 1**2)))
    assert prompts(fake) == ["a1", "b1", "a2", "b2", "a3"]


@pytest.mark.parametrize(
    ("generated", "order"),
    [
        ("all that it may", ["H1", "s1", "s2", "s3", "H2"]),
        ("two tokens", ["H1", "s1", "H2", "s2", "s3"]),  # its next turn goes by what it took
    ],
)
async def test_small_requests_overtake_huge_ones_of_another_key(
    gateway: Gateway, fake: Fake, generated: str, order: list[str]
) -> None:
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    tasks: list[asyncio.Task[httpx.Response]] = []
    async with engine_busy(gateway, fake):
        for count, name in enumerate(["H1", "H2", "s1", "s2", "s3"], start=1):
            messages = [{"role": "user", "content": "x"}]
            tokens = 2000 if name.startswith("H") else 20
            body = {"model": "demo", "messages": messages, "max_tokens": tokens}
            if generated == "all that it may":
                body["fake"] = "fill"
            ask = gateway.client.post(
                "/v1/chat/completions",
                json={**body, "user": name},
                headers=other if name.startswith("s") else None,
            )
            tasks.append(asyncio.create_task(ask))
            await until_waiting(gateway, count)
    await asyncio.gather(*tasks)
    assert prompts(fake) == order


async def test_requests_for_other_models_or_none_do_not_wait(fake: Fake, tmp_path: Path) -> None:
    async with Fake(model="free") as free:
        fake.stored = {"resp_1"}
        busy = {"name": "demo", "engines": [remote(fake.url)], "queue": {"max_in_flight": 1}}
        other = {"name": "free", "engines": [remote(free.url)], "queue": {"max_in_flight": 1}}
        async with running(settings_for(busy, other, run_dir=tmp_path)) as gateway:
            async with engine_busy(gateway, fake):
                assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 404
                assert (await gateway.chat("free")).status_code == 200
                assert (await gateway.client.get("/v1/models")).status_code == 200
            await at_rest(gateway)


def refused(response: httpx.Response, path: str) -> str:
    """Return the message of a refusal because of load, in the dialect of the path."""
    assert response.status_code == 503
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = response.json()["error"]
    if path == "/v1/messages":
        assert response.json()["type"] == "error"
        assert error["type"] == "overloaded_error"
    else:
        assert error["code"] == "engine_overloaded"
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path", PATHS)
async def test_full_queue_is_503_with_retry_after(fake: Fake, tmp_path: Path, path: str) -> None:
    async with serving(fake.url, tmp_path=tmp_path, max_waiting=1) as gateway:
        async with engine_busy(gateway, fake):
            waiting = asyncio.create_task(gateway.chat(user="waits"))
            await until_waiting(gateway, 1)
            body = {"model": "demo", "user": "late"}
            response = await gateway.client.post(path, json=body)
            assert "the queue of model 'demo' is full" in refused(response, path)
        assert (await waiting).status_code == 200
        assert prompts(fake) == ["waits"]
        counted = {"model": "demo", "endpoint": path, "status": "503"}
        assert await gateway.metric("gateway_requests_total", **counted) == 1
        await at_rest(gateway)


@pytest.mark.parametrize("path", PATHS)
async def test_waiting_too_long_is_503_with_retry_after(
    fake: Fake, tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(fake.url, tmp_path=tmp_path, timeout_s=0.02) as gateway:
        async with engine_busy(gateway, fake):
            response = await gateway.client.post(path, json={"model": "demo", "user": "late"})
            assert "became free within 0.02 s" in refused(response, path)
        await at_rest(gateway)
        assert prompts(fake) == []
        gateway.state.access.flush()
        [line] = [line for line in capsys.readouterr().err.splitlines() if '"status":503' in line]
        assert '"engine":null' in line
        assert '"queue_ms":null' not in line
        assert "within 0.02 s" in line


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_disconnect_while_queued_is_never_served(
    gateway: Gateway, fake: Fake, path: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine_busy(gateway, fake):
        async with connected(gateway) as client:
            client.send(request(asking(stream=stream, user="left"), path=path.encode()))
            await until_waiting(gateway, 1)
        await until_waiting(gateway, 0)
        assert await gateway.metric("gateway_requests_in_flight", model="demo") == 1
        assert await gateway.metric("gateway_client_disconnects_total") == 1
        counted = {"model": "demo", "endpoint": path, "status": "499"}
        assert await gateway.metric("gateway_requests_total", **counted) == 1
        stays = asyncio.create_task(gateway.chat(user="stays"))
        await until_waiting(gateway, 1)
    assert (await stays).status_code == 200
    assert prompts(fake) == ["stays"]
    gateway.state.access.flush()
    left = f'"endpoint":"{path}","status":499'
    [line] = [line for line in capsys.readouterr().err.splitlines() if left in line]
    assert '"engine":null' in line
    assert '"queue_ms":null' not in line
    assert '"client_gone":true' in line


async def test_mass_disconnect_frees_the_queue_for_the_remaining_request(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as holder:
        holder.send(request(asking(fake="hang")))
        await fake.until_running(timeout=PATIENCE_S)
        leaving = [asyncio.create_task(gateway.chat(user="left")) for _ in range(40)]
        await until_waiting(gateway, 40)
        stays = asyncio.create_task(gateway.chat(user="stays"))
        await until_waiting(gateway, 41)
        # The slot comes free while they are on their way out.
        for task in leaving[:20]:
            task.cancel()
        holder.writer.transport.abort()
        for task in leaving[20:]:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert (await stays).status_code == 200
    assert prompts(fake)[-1] == "stays"


async def test_dead_engine_ends_the_wait_of_queued_requests(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake.url, tmp_path=tmp_path) as gateway:
        tasks = [asyncio.create_task(gateway.chat(fake="hang")) for _ in range(6)]
        await fake.until_running(timeout=PATIENCE_S)
        await until_waiting(gateway, 5)
        await fake.stop()
        async with asyncio.timeout(PATIENCE_S):
            codes = {answer.json()["error"]["code"] for answer in await asyncio.gather(*tasks)}
        assert codes <= {"engine_failed", "engine_unavailable"}
        await at_rest(gateway)


async def test_drain_serves_queued_requests_and_refuses_new_ones(
    gateway: Gateway, fake: Fake
) -> None:
    async with engine_busy(gateway, fake):
        waiting = [asyncio.create_task(gateway.chat(user=f"waits-{n}")) for n in range(3)]
        await until_waiting(gateway, 3)
        gateway.state.admission.drain()
        idle = asyncio.create_task(gateway.state.admission.wait_until_idle())
        response = await gateway.chat(user="late")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert not idle.done()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    await asyncio.wait_for(idle, PATIENCE_S)
    assert sorted(prompts(fake)) == ["waits-0", "waits-1", "waits-2"]


# Streams that are kept alive

QUIET = {"sse_keepalive_s": 0.02}


async def test_queued_stream_is_kept_alive_and_served(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake.url, tmp_path=tmp_path, server=QUIET) as gateway:
        async with connected(gateway) as client:
            async with engine_busy(gateway, fake):
                client.send(request(asking(stream=True), path=b"/v1/chat/completions"))
                raw = await client.until(b"\r\n\r\n")
                assert raw.startswith(b"HTTP/1.1 200 ")
                for _ in range(3):
                    raw += await client.until(COMMENT)
                assert gateway.state.admission.waiting == 1
            raw += await client.until(b"0\r\n\r\n")
        [answer] = await answers(raw)
        assert answer.whole
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await at_rest(gateway)


@pytest.mark.parametrize("fault", ["status:400", "status:500", "close"])
async def test_refused_kept_alive_stream_costs_no_tokens(
    fake: Fake, tmp_path: Path, fault: str
) -> None:
    """The status 200 that has left is not the engine's."""
    async with serving(fake.url, tmp_path=tmp_path, server=QUIET) as gateway:
        async with connected(gateway) as client:
            async with engine_busy(gateway, fake):
                body = asking(stream=True, fake=fault, messages=[{"content": "x" * 400}])
                client.send(request(body, path=b"/v1/chat/completions"))
                await client.until(COMMENT)
            await client.chunked()
        await at_rest(gateway)
        assert await tokens(gateway, "prompt") < 100  # of the one before it in the queue


@pytest.mark.parametrize("path", PATHS)
async def test_kept_alive_stream_that_times_out_ends_in_an_error_event(
    fake: Fake, tmp_path: Path, path: str
) -> None:
    async with serving(fake.url, tmp_path=tmp_path, server=QUIET, timeout_s=0.2) as gateway:
        async with engine_busy(gateway, fake), connected(gateway) as client:
            client.send(request(asking(stream=True), path=path.encode()))
            [answer] = await answers(await client.chunked())
        assert answer.status == 200
        assert b"[DONE]" not in answer.body
        data = answer.body.replace(COMMENT, b"").split(b"data: ")[1]
        error = json.loads(data)["error"]
        if path == "/v1/messages":
            assert error["type"] == "overloaded_error"
        else:
            assert error["code"] == "engine_overloaded"
        await at_rest(gateway)


async def test_disconnect_of_a_kept_alive_queued_stream_frees_its_slot(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake.url, tmp_path=tmp_path, server=QUIET) as gateway:
        async with engine_busy(gateway, fake):
            async with connected(gateway) as client:
                client.send(request(asking(stream=True, user="left")))
                await client.until(COMMENT)
            await until_waiting(gateway, 0)
        await at_rest(gateway)
        assert prompts(fake) == []
