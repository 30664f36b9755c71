"""A client that closes its connection once it has the event that ends a stream has not left early.

Agents do this: Codex closes at `response.completed`, before the engine has ended the body.
"""

import asyncio
from typing import Any

import pytest

from app.telemetry import RequestRecord
from tests.fakes.stream_faults import BEHIND_END, StreamFault
from tests.fakes.vllm import Fake
from tests.gateway import Gateway
from tests.waiting import PATIENCE_S

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
HIDDEN = {"messages": MESSAGES, "include_reasoning": False}
ENDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": MESSAGES}, "data: [DONE]"),
    "two choices": (CHAT, {"messages": MESSAGES, "n": 2}, "data: [DONE]"),
    "hidden thoughts": (CHAT, HIDDEN, "data: [DONE]"),
    "completion": ("/v1/completions", {"prompt": "hi"}, "data: [DONE]"),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, "event: message_stop"),
    "responses": ("/v1/responses", {"input": "hi"}, "event: response.completed"),
}


@pytest.mark.parametrize("name", ENDS)
async def test_stream_that_is_left_behind_its_last_event_is_complete(
    gateway: Gateway, fake: Fake, name: str
) -> None:
    path, body, mark = ENDS[name]
    fake.stream_fault = StreamFault("stall", BEHIND_END, times=2)
    records: list[RequestRecord] = []
    gateway.state.ledger.watch(lambda _batch, ended: records.append(ended.record))
    text = await _read_until(gateway, path, {"model": "demo", "stream": True, **body}, mark)
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    [record] = records
    choices = body.get("n", 1)
    assert record.usage is not None
    assert (record.status, record.outcome) == (200, "completed"), text
    assert (record.usage.completion, record.usage.estimated) == (2 * choices, False)
    assert await gateway.metric("gateway_client_disconnects_total") == 0


async def test_stream_that_is_left_before_its_last_event_is_not(
    gateway: Gateway, fake: Fake
) -> None:
    """A text that looks like an end mark ends nothing."""
    fake.stream_fault = StreamFault("stall", 12)
    records: list[RequestRecord] = []
    gateway.state.ledger.watch(lambda _batch, ended: records.append(ended.record))
    body = {"model": "demo", "stream": True, "messages": MESSAGES}
    body["fake"] = "say:\ndata: [DONE]\n\nand more of this"
    await _read_until(gateway, CHAT, body, "[")
    await fake.until_idle()
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    assert [(one.status, one.outcome) for one in records] == [(499, "disconnected")]


async def _read_until(gateway: Gateway, path: str, body: dict[str, Any], mark: str) -> str:
    """Read a stream to the end of the event with the mark, then close the connection."""
    text = ""
    async with gateway.client.stream("POST", path, json=body) as response:
        async for piece in response.aiter_text():
            text += piece
            if mark in text and text.endswith("\n\n"):
                return text
    raise AssertionError(text)
