"""Streams that fail: what the client is sent last, and what is booked."""

import json
from typing import Any

import pytest

from app.errors import EngineFailed
from app.relay.request_context import RequestContext
from app.relay.stream_errors import (
    engine_error_event,
    error_event,
    reports_error,
    reports_refusal,
)
from app.request_body import Endpoint
from app.telemetry import RequestTimeline
from tests.app.raw import answers, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import Gateway

CREATED = (
    b"event: response.created\n"
    b'data: {"type":"response.created","sequence_number":0,"response":'
    b'{"id":"resp_7","object":"response","created_at":5,"model":"demo","status":"in_progress",'
    b'"output":[],"error":null}}\n\n'
)
DELTA = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","delta":"\\"sequence_number\\": 99",'
    b'"sequence_number":41}\n\n'
)


class _Exchange:
    """As far as an event of an error needs it."""

    request_id = "abc"
    path = "/v1/responses"


def context(first: bytes, last: bytes) -> RequestContext:
    timeline = RequestTimeline(0.0)
    exchange: Any = _Exchange()
    return RequestContext(
        exchange, Endpoint("/v1/responses"), timeline, first_events=first, last_events=last
    )


def data_of(event: bytes) -> Any:
    name, data = event.rstrip().split(b"\n")
    assert name == b"event: response.failed"
    return json.loads(data.removeprefix(b"data: "))


class TestResponses:
    def test_failure_follows_the_response_that_was_created(self) -> None:
        event = data_of(error_event(EngineFailed("it died"), context(CREATED, DELTA)))
        assert (event["type"], event["sequence_number"]) == ("response.failed", 42)
        response = event["response"]
        assert (response["id"], response["model"], response["status"]) == (
            "resp_7", "demo", "failed",
        )  # fmt: skip
        assert response["error"] == {"code": "engine_failed", "message": "it died"}

    @pytest.mark.parametrize("first", [b"", b"data: nonsense\n\n", b": comment\n\n"])
    def test_failure_before_the_response_was_created_has_an_id_of_its_own(
        self, first: bytes
    ) -> None:
        event = data_of(error_event(EngineFailed("it died"), context(first, first)))
        assert event["sequence_number"] == 0
        assert (event["response"]["id"], event["response"]["output"]) == ("resp_abc", [])

    def test_engines_refusal_behind_a_comment_keeps_its_words(self) -> None:
        body = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
        event = data_of(engine_error_event(body, context(b"", b"")))
        assert event["response"]["error"] == {"code": "BadRequestError", "message": "too long"}
        event = data_of(engine_error_event(b"oops", context(b"", b"")))
        assert event["response"]["error"]["message"] == "the engine refused the request"


class TestReportsError:
    @pytest.mark.parametrize(
        "events",
        [
            b'data: {"error": {"message": "x"}}\n\n',
            b'data: {"a":1}\n\ndata: {"error":{"message":"x"}}\n\n',
            b'event: error\ndata: {"type":"error"}\n\n',
            b'event: error\r\ndata: {"type":"error"}\r\n\r\n',
            b'event: response.failed\ndata: {"type":"response.failed"}\n\n',
        ],
    )
    def test_error_of_any_dialect_is_seen(self, events: bytes) -> None:
        assert reports_error(events)

    @pytest.mark.parametrize(
        "events",
        [
            CREATED,
            DELTA,
            b'data: {"choices":[{"delta":{"content":"data: {\\"error\\": 1}"}}]}\n\n',
            b'event: response.completed\ndata: {"response":{"error":null}}\n\n',
        ],
    )
    def test_text_about_errors_is_none(self, events: bytes) -> None:
        assert not reports_error(events)

    @pytest.mark.parametrize(
        ("error", "refused"),
        [
            (b'{"message":"x","type":"BadRequestError","param":null,"code":400}', True),
            (b'{"message": "x", "code": 422}', True),
            (b'{"type":"invalid_request_error","message":"x"}', True),
            (b'{"message":"x","type":"InternalServerError","code":500}', False),
            (b'{"message":"said \\"code\\": 400","code":500}', False),
            (b'{"message":"x","code":4000}', False),
            (b'{"message":"x"}', False),
        ],
    )
    def test_refusals_are_told_from_failures(self, error: bytes, refused: bool) -> None:
        assert reports_refusal(b'data: {"error": %b}\n\n' % error) is refused


@pytest.mark.parametrize("verb", ["die:3", "die_in_event", "bad_chunk"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages", b"/v1/responses"])
async def test_broken_stream_ends_in_order_behind_an_error_event(
    gateway: Gateway, path: bytes, verb: str
) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake=verb, n=2), path=path))
        [answer] = await answers(await client.chunked())
    assert answer.whole
    last = answer.body.rstrip().rpartition(b"\n\n")[2]
    assert b"[DONE]" not in last
    match path:
        case b"/v1/messages":
            assert last.startswith(b"event: error\ndata: ")
        case b"/v1/responses":
            assert data_of(last)["response"]["error"]["code"] == "engine_failed"
        case _:
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == (
        "no-cache", "no",
    )  # fmt: skip


async def test_error_of_the_engines_own_is_booked_as_a_failure(
    gateway: Gateway, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    before = await gateway.metric("gateway_usage_records_total", outcome="failed")
    answer = await gateway.chat(stream=True, fake="error_event")
    assert answer.status_code == 200
    assert '"error"' in answer.text, "it is relayed"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert await gateway.metric("gateway_usage_records_total", outcome="failed") == before + 1
    gateway.state.access.flush()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    id_ = answer.headers["x-request-id"]
    [entry] = [line for line in lines if line.get("request_id") == id_ and "status" in line]
    assert entry["fault"] == "the engine reported an error in its stream"
