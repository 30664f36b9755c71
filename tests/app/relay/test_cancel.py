"""An operator cancels a request, at every stage."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from app.relay import RequestView
from app.server.connection import ClientConnection
from app.telemetry import RequestRecord
from app.usage import RequestFilter
from tests.app.raw import Client, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import KEY_ID, Gateway, demo_gateway
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
PATHS = [b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/v1/completions"]
CANCELED = "canceled by an operator"
WAITING = "waits"  # the x-request-id of the request that is canceled


gateway = demo_gateway(model={"queue": {"max_in_flight": 1}})


def asked(path: bytes = PATHS[0], **fields: Any) -> bytes:
    """Return the bytes of the request that is canceled."""
    body = asking(messages=[], input="hi", prompt="hi", **fields)
    return request(body, b"x-request-id: " + WAITING.encode(), path=path)


async def until_in_phase(gateway: Gateway, phase: str) -> RequestView:
    """Return the request once it is in a phase."""
    chosen = RequestFilter(request_id=WAITING)

    def found() -> list[RequestView]:
        views = gateway.state.requests.in_flight(chosen)
        return [view for view in views if view.phases[-1].name == phase]

    await wait_until(found)
    [view] = found()
    return view


async def cancel_in_phase(gateway: Gateway, phase: str) -> None:
    view = await until_in_phase(gateway, phase)
    assert gateway.state.requests.cancel(view.id, "root") is not None


async def ended(gateway: Gateway) -> RequestView:
    """Return the request, which has ended."""
    chosen = RequestFilter(request_id=WAITING)
    await wait_until(lambda: gateway.state.requests.recent(chosen))
    [view] = gateway.state.requests.recent(chosen)
    assert (view.outcome, view.record.error) == ("canceled", "request_canceled")
    assert view.phases[-1].end_s == view.record.total_s
    return view


async def is_refused(client: Client, path: bytes = PATHS[0]) -> None:
    answer = await client.answer()
    assert answer.status == 403
    error = json.loads(answer.body)["error"]
    assert CANCELED in error["message"]
    if path == b"/v1/messages":
        assert error["type"] == "permission_error"
    else:
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_canceled")


@pytest.mark.parametrize("stream", [False, True])
async def test_cancel_while_queued(gateway: Gateway, fake: Fake, stream: bool) -> None:
    async with connected(gateway) as other, connected(gateway) as client:
        other.send(request(asking(fake="hang")))
        await fake.until_running()
        client.send(asked(stream=stream))
        await cancel_in_phase(gateway, "queue")
        await is_refused(client)
    view = await ended(gateway)
    assert view.phases[-1].note == "position 1"
    assert view.record.engine is None
    assert sum(seen.method == "POST" for seen in fake.seen) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_cancel_during_prefill_ends_generation(
    gateway: Gateway, fake: Fake, path: bytes, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[RequestRecord] = []
    gateway.state.ledger.watch(lambda _batch, ended: records.append(ended.record))
    async with connected(gateway) as client:
        client.send(asked(path, stream=stream, fake="hang"))
        await fake.until_running()
        await cancel_in_phase(gateway, "generate")
        await is_refused(client, path)
        await fake.until_idle()
        client.send(request())  # its connection is as good as ever
        assert (await client.answer()).status == 200
    await ended(gateway)
    assert [(one.status, one.outcome) for one in records] == [(403, "canceled"), (200, "completed")]
    labels = {"model": "demo", "endpoint": path.decode(), "status": "403"}
    assert await gateway.metric("gateway_requests_total", **labels) == 1
    assert await gateway.metric("gateway_usage_records_total", outcome="canceled") == 1
    gateway.state.access.flush()
    [line] = [one for one in capsys.readouterr().err.splitlines() if WAITING in one]
    assert CANCELED in json.loads(line)["fault"]


@pytest.mark.parametrize("path", PATHS)
async def test_cancel_during_a_stream(gateway: Gateway, fake: Fake, path: bytes) -> None:
    async with connected(gateway) as client:
        client.send(asked(path, stream=True, fake="pace:2"))
        await client.until(b"data: ")
        await client.until(b"data: ")
        await cancel_in_phase(gateway, "decode")
        said = await client.chunked()
    last = json.loads(said.partition(b"\n\n\r\n0\r\n")[0].rpartition(b"data: ")[2])
    assert CANCELED in (last.get("response") or last)["error"]["message"]
    assert b"[DONE]" not in said, "the stream does not pass for whole"
    view = await ended(gateway)
    assert view.record.status == 200
    assert view.record.usage is not None
    assert view.record.usage.estimated


async def test_cancel_of_a_stalled_client(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(asked(stream=True, fake="flood:32"))
        connections = cast(set[ClientConnection], gateway.server.connections)
        await wait_until(lambda: any(one.flow.write_paused for one in connections))
        await cancel_in_phase(gateway, "decode")
        await fake.until_idle()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert b"[DONE]" not in await client.chunked()
    view = await ended(gateway)
    assert view.record.client_wait_s > 0
    assert view.phases[-1].name == "client_wait"


async def test_cancel_while_the_body_is_read(gateway: Gateway) -> None:
    payload = asked(filler="f" * 1000)
    async with connected(gateway) as client:
        client.send(payload[:-200])
        await cancel_in_phase(gateway, "body")
        await is_refused(client)
    await ended(gateway)


@pytest.mark.slow
async def test_cancel_during_a_load(tmp_path: Path) -> None:
    from tests.app.relay.test_on_demand import at_rest, model, serving

    loaded = tmp_path / "loaded"
    slow = model(args={"fake-load-until": str(loaded)})
    async with serving(slow, tmp_path=tmp_path) as gateway:
        async with connected(gateway) as client:
            client.send(asked())
            await cancel_in_phase(gateway, "load_wait")
            await is_refused(client)
        await ended(gateway)
        loaded.touch()
        assert (await gateway.chat()).status_code == 200
        await at_rest(gateway)


async def test_only_a_key_s_own_request_is_found_and_canceled_with_it(
    gateway: Gateway, fake: Fake
) -> None:
    requests = gateway.state.requests
    async with connected(gateway) as client:
        client.send(asked(fake="hang"))
        await fake.until_running()
        view = await until_in_phase(gateway, "generate")
        assert await requests.find(view.id, RequestFilter(key_id="key-other")) is None
        assert requests.cancel(view.id, "x", RequestFilter(key_id="key-other")) is None
        assert requests.in_flight(RequestFilter(key_id="key-other")) == []
        own = requests.cancel(view.id, KEY_ID, RequestFilter(key_id=KEY_ID))
        assert own is not None
        assert b"canceled with its own key" in (await client.answer()).body
    assert requests.cancel(view.id, "root") is None
    found = await requests.find(view.id, RequestFilter(key_id=KEY_ID))
    assert found is not None
    assert found.outcome == "canceled"
    assert await requests.find(view.id, RequestFilter(key_id="key-other")) is None


async def test_of_two_requests_with_one_request_id_only_one_is_canceled(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as first, connected(gateway) as second:
        first.send(asked(fake="hang"))
        await fake.until_running()
        second.send(asked())
        chosen = RequestFilter(request_id=WAITING)
        requests = gateway.state.requests
        await wait_until(lambda: len(requests.in_flight(chosen)) == 2)
        older, newer = requests.in_flight(chosen)
        assert older.id != newer.id
        requests.cancel(older.id, "root")
        await is_refused(first)
        assert (await second.answer()).status == 200


async def test_openai_clients_do_not_retry(gateway: Gateway, fake: Fake) -> None:
    from openai import AsyncOpenAI, PermissionDeniedError

    base_url = f"http://127.0.0.1:{gateway.port}/v1"
    async with AsyncOpenAI(
        base_url=base_url, api_key=_key(gateway.client), max_retries=5
    ) as openai:
        asking_ = asyncio.create_task(
            openai.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"fake": "hang"},
                extra_headers={"x-request-id": WAITING},
            )
        )
        await fake.until_running()
        await cancel_in_phase(gateway, "generate")
        with pytest.raises(PermissionDeniedError) as caught:
            await asking_
    assert caught.value.code == "request_canceled"
    assert sum(seen.method == "POST" for seen in fake.seen) == 1


def _key(client: httpx.AsyncClient) -> str:
    return client.headers["authorization"].removeprefix("Bearer ")
