"""Errors in a stream that has begun, as the events that its client understands.

OpenAI's chats and completions have `data: {"error": …}`, Anthropic's messages `event: error`, and
Responses `response.failed`, which has the ID and the fields of the response that was created.
"""

import re
import time
from typing import Any

import msgspec

from app.errors import GatewayError
from app.relay.engine_errors import ErrorObject, read_error
from app.relay.request_context import RequestContext
from app.request_body import RESPONSES
from app.sse import as_event, read_data, split_events

# An error of the engine's own. Lines cannot begin so inside of JSON.
_ENGINE_ERROR = re.compile(
    rb'^(?:data: ?\{"error"|event: ?(?:error|response\.failed|speech\.audio\.error)\r?$)',
    re.MULTILINE,
)
# It refuses the request: vLLM's code, or a type of OpenAI's or Anthropic's.
_REFUSAL = re.compile(rb'"code": ?4[0-9]{2}\b|"(?:invalid_request_error|BadRequestError)"')
# The quotes of a model's text are escaped.
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?([0-9]{1,15})')


class _Created(msgspec.Struct):
    type: str | None = None
    response: dict[str, Any] | None = None


_created = msgspec.json.Decoder(_Created)


def reports_error(events: bytes) -> bool:
    """Return whether an error of an engine is among these events."""
    return _ENGINE_ERROR.search(events) is not None


def reports_refusal(events: bytes) -> bool:
    """Return whether an error among these events is of the request's making."""
    return _REFUSAL.search(events) is not None


def error_event(error: GatewayError, request: RequestContext) -> bytes:
    """Return an error as the last event of the request's stream."""
    if request.endpoint.label == RESPONSES:
        return _failed_response(error.code, error.message, request)
    dialect = request.exchange.dialect
    return as_event(error.body(dialect), dialect)


def engine_error_event(body: bytes, request: RequestContext) -> bytes:
    """Return the JSON of an engine's error as the last event of the request's stream."""
    if request.endpoint.label == RESPONSES:
        parsed = read_error(body)
        error = (parsed and parsed.error) or ErrorObject("the engine refused the request")
        code = error.code if isinstance(error.code, str) else error.type or str(error.code)
        return _failed_response(code, error.message or code, request)
    return as_event(body, request.exchange.dialect)


def _failed_response(code: str, message: str, request: RequestContext) -> bytes:
    """Return the event `response.failed` (OpenAI's Responses API) that follows those sent."""
    response = _created_response(request.first_events) or {
        "id": f"resp_{request.exchange.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.requested_model,
        "output": [],
    }
    response |= {"status": "failed", "error": {"code": code, "message": message}}
    numbers = _SEQUENCE_NUMBER.findall(request.last_events)
    event = {
        "type": "response.failed",
        "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        "response": response,
    }
    return b"event: response.failed\ndata: %s\n\n" % msgspec.json.encode(event)


def _created_response(events: bytes) -> dict[str, Any] | None:
    """Return the response of the event `response.created`; None: it is not among these events."""
    for event in split_events(events):
        try:
            created = _created.decode(read_data(event))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if created.type == "response.created":
            return created.response
    return None
