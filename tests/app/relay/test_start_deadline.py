"""Requests with a deadline, through the real server with a fake engine."""

import asyncio
import re
from pathlib import Path
from time import perf_counter

import pytest

from app.auth import KeyFields
from tests.app.raw import asking, connected, request
from tests.app.relay.test_queue import engine_busy, serving, until_waiting
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, demo_gateway

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"

gateway = demo_gateway()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "soon", "1e3", "9" * 31, "86400001", "٣"])
async def test_a_deadline_that_is_none_is_refused(gateway: Gateway, value: str) -> None:
    headers = {b"x-request-deadline-ms": value.encode()}
    answer = await gateway.client.post(PATH, json=BODY, headers=headers)
    assert answer.status_code == 400
    assert "whole number from 1 to 86400000" in answer.json()["error"]["message"]


async def test_a_request_in_time_is_served(gateway: Gateway, fake: Fake) -> None:
    headers = {"x-request-deadline-ms": "86400000"}
    assert (await gateway.client.post(PATH, json=BODY, headers=headers)).status_code == 200
    assert not fake.seen[-1].header("x-request-deadline-ms")


async def test_a_waiting_request_is_refused_when_its_time_is_over(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake.url, tmp_path=tmp_path) as gateway, engine_busy(gateway, fake):
        headers = {"x-request-deadline-ms": "50"}
        answer = await gateway.client.post(PATH, json=BODY, headers=headers)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_overloaded"
        await until_waiting(gateway, 0)


@pytest.mark.parametrize("deadline_ms", [20_000, 50_000])
async def test_a_request_that_may_well_be_late_is_refused_at_once(
    fake: Fake, tmp_path: Path, deadline_ms: int
) -> None:
    async with serving(fake.url, tmp_path=tmp_path) as gateway:
        queue = gateway.state.admission._queues["demo"]
        async with engine_busy(gateway, fake), connected(gateway) as waiting:
            waiting.send(request(asking()))
            await until_waiting(gateway, 1)
            # As if one request had been served in the last 30 s.
            queue._service_rate._times.appendleft(queue._service_rate._times[0] - 30)
            headers = {"x-request-deadline-ms": str(deadline_ms)}
            answer = await asyncio.wait_for(
                gateway.client.post(PATH, json=BODY, headers=headers), 15
            )
            assert answer.status_code == 503
            assert 31 <= int(answer.headers["retry-after"]) <= 45
            message = answer.json()["error"]["message"]
            # Deadlines may be shorter than a second.
            waits = re.findall(
                r"would wait for about (\d+\.\d\d) s .* perhaps (\d+\.\d\d) s", message
            )
            assert [20 < float(expected) < float(likely) for expected, likely in waits] == [True]
        assert await gateway.metric("gateway_queue_wait_ratio_count", model="demo") in (None, 0)


async def test_a_key_has_a_deadline_for_requests_that_state_none(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake.url, tmp_path=tmp_path) as gateway:
        _, made = await gateway.state.key_store.create(KeyFields(name="app", max_wait_s=1))
        gateway.client.headers["authorization"] = f"Bearer {made.text}"
        assert (await gateway.client.get("/v1/usage")).json()["max_wait_s"] == 1
        async with engine_busy(gateway, fake):
            answer = await gateway.client.post(PATH, json=BODY)
            assert answer.json()["error"]["code"] == "engine_overloaded"
            headers = {"x-request-deadline-ms": "86400000"}
            later = asyncio.create_task(gateway.client.post(PATH, json=BODY, headers=headers))
            await until_waiting(gateway, 1)
            [context] = [one for one in gateway.state.in_flight if one.principal.max_wait_s == 1]
            assert context.deadline is not None
            assert context.deadline - perf_counter() > 80_000
        assert (await later).status_code == 200
