"""OpenAPI paths of the data plane, which FastAPI does not route.

Paths and methods come from the endpoints of `app.api.data_plane`; the table here adds the content
types of each. Schemas of bodies stay open, since vLLM adds fields with every version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.api.data_plane import (
    CANCEL_RESPONSE,
    ENDPOINTS,
    RESPONSE_ID,
    STORED_RESPONSE,
    TOKENIZER_INFO,
)
from app.api.error_responses import (
    BODY,
    CLIENT,
    ENGINE_HEADERS,
    ErrorClass,
    JsonObject,
    error_responses,
    rate_headers,
)
from app.errors import (
    EndpointNotServed,
    EngineFailed,
    EngineOverloaded,
    EngineTooSlow,
    EngineUnavailable,
    FieldNotAllowed,
    MediaNotAllowed,
    MediaNotTaken,
    MissingModel,
    ModelNotFound,
    OutputTooLong,
    QuotaUsedUp,
    RouteNotFound,
    UnsupportedCoding,
    dialect_of,
)
from app.request_body import Endpoint

JSON, EVENTS, FORM = "application/json", "text/event-stream", "multipart/form-data"
BYTES, TEXT = "application/octet-stream", "text/plain"
SOUND, IMAGE, ZIP = "audio/*", "image/png", "application/zip"

_COMMON: tuple[ErrorClass, ...] = (
    *CLIENT, *BODY, QuotaUsedUp, EngineUnavailable, EngineOverloaded, EngineFailed,
    EngineTooSlow,
)  # fmt: skip
_BY_MODEL: tuple[ErrorClass, ...] = (
    MissingModel, ModelNotFound, FieldNotAllowed, MediaNotAllowed, MediaNotTaken, OutputTooLong,
    EndpointNotServed, UnsupportedCoding,
)  # fmt: skip
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
# `itemSchema` is of OpenAPI 3.2; FastAPI writes it into 3.1 documents as well.
_CONTENTS: dict[str, JsonObject] = {
    JSON: {"schema": {"type": "object", "description": "The engine's JSON, unchanged."}},
    EVENTS: {"itemSchema": _EVENT},
    BYTES: {"schema": {"type": "string", "format": "binary"}},
    TEXT: {"schema": {"type": "string"}},
    **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in (SOUND, IMAGE, ZIP)},
}
_MODEL = {"type": "string", "minLength": 1, "description": "A model or alias of /v1/models."}
_STREAM = {"type": "boolean", "description": "Answer with server-sent events."}
_FILE = {"type": "string", "format": "binary"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Content types of an endpoint's request and responses."""

    summary: str
    responses: tuple[str, ...] = (JSON,)
    request: str = JSON
    file: str = "file"  # the form's


_STREAMED = (JSON, EVENTS)
_SHAPES = {
    "/v1/chat/completions": Shape("Answer a conversation.", _STREAMED),
    "/v1/chat/completions/batch": Shape("Answer several conversations, a choice for each."),
    "/v1/completions": Shape("Continue a text.", _STREAMED),
    "/v1/embeddings": Shape("Return embeddings of texts.", (JSON, BYTES)),
    "/v1/responses": Shape("Answer a conversation (OpenAI Responses).", _STREAMED),
    "/v1/messages": Shape("Answer a conversation (Anthropic Messages).", _STREAMED),
    "/v1/messages/count_tokens": Shape("Count the tokens of a conversation (Anthropic)."),
    "/v1/rerank": Shape("Rank documents by relevance to a query."),
    "/v1/score": Shape("Score pairs of texts."),
    "/v1/audio/transcriptions": Shape("Transcribe speech.", (*_STREAMED, TEXT), FORM),
    "/v1/audio/translations": Shape("Translate speech into English.", (*_STREAMED, TEXT), FORM),
    "/v1/audio/speech": Shape("Speak a text (vllm-omni).", (SOUND, EVENTS)),
    "/v1/images/generations": Shape("Make images (vllm-omni).", (JSON, IMAGE, ZIP)),
    "/v1/images/edits": Shape("Change images (vllm-omni).", _STREAMED, FORM, "image"),
    "/tokenize": Shape("Return the tokens of a text or a conversation."),
    "/detokenize": Shape("Return the text of tokens."),
    "/pooling": Shape("Return the pooled output for texts.", (JSON, BYTES)),
    "/classify": Shape("Return the class of each text."),
    "/rerank": Shape("The same as /v1/rerank."),
    "/score": Shape("The same as /v1/score."),
    TOKENIZER_INFO.label: Shape("Return the tokenizer's configuration, with the chat template."),
    STORED_RESPONSE.label: Shape("Return a stored response.", _STREAMED),
    CANCEL_RESPONSE.label: Shape("Cancel a background response."),
}


def dataplane_paths() -> dict[str, Any]:
    """Return the data plane's `paths`."""
    endpoints = (*ENDPOINTS.values(), TOKENIZER_INFO, STORED_RESPONSE, CANCEL_RESPONSE)
    return {endpoint.label: dict(_operations(endpoint)) for endpoint in endpoints}


def _operations(endpoint: Endpoint) -> Iterator[tuple[str, JsonObject]]:
    shape, dialect = _SHAPES[endpoint.label], dialect_of(endpoint.label)
    own = _BY_MODEL if endpoint.names_model else (RouteNotFound,)
    errors = error_responses(*_COMMON, *own, dialect=dialect, relayed=True)
    success = {
        "description": "The engine's answer.",
        "headers": rate_headers() | ENGINE_HEADERS,
        "content": {kind: _CONTENTS[kind] for kind in shape.responses},
    }
    words = endpoint.label.replace("{id}", "response").strip("/").split("/")
    for method in endpoint.methods:
        operation: JsonObject = {
            "tags": ["data plane"],
            "summary": shape.summary,
            "operationId": "_".join((*words, method.lower())),
            "responses": {"200": success, **{str(status): one for status, one in errors.items()}},
        }
        if endpoint is TOKENIZER_INFO:
            operation["parameters"] = [{"name": "model", "in": "query", "schema": _MODEL}]
        elif endpoint.names_model:
            operation["requestBody"] = _body(shape)
        else:
            operation["parameters"] = list(_parameters(method))
        yield method.lower(), operation


def _body(shape: Shape) -> JsonObject:
    properties: JsonObject = {"model": _MODEL}
    if shape.request == FORM:
        properties[shape.file] = _FILE
    schema = {
        "type": "object",
        "required": [*properties],
        "properties": properties | ({"stream": _STREAM} if EVENTS in shape.responses else {}),
        "additionalProperties": True,
    }
    return {"required": True, "content": {shape.request: {"schema": schema}}}


def _parameters(method: str) -> Iterator[JsonObject]:
    pattern = {"type": "string", "pattern": f"^{RESPONSE_ID}$"}
    yield {"name": "id", "in": "path", "required": True, "schema": pattern}
    if method == "GET":
        yield {"name": "stream", "in": "query", "schema": _STREAM}
