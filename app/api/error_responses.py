"""OpenAPI error responses: a schema for each class of `app.errors`, responses made of these.

A route declares the error classes it raises, `responses=error_responses(*ADMIN, Conflict)`; those
common to all routes are added. Status, code and type come from the classes alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from app.errors import (
    BadRequest,
    Dialect,
    FieldNotAllowed,
    GatewayError,
    HeadTooLarge,
    InvalidApiKey,
    InvalidJson,
    MethodNotAllowed,
    OutputTooLong,
    PermissionDenied,
    RateLimited,
    RequestTimeout,
    RequestTooLarge,
    ServiceUnavailable,
    TooManyConnections,
    UnsupportedCoding,
    UpgradeNotOffered,
)
from app.limits import HEADER_NAMES

ErrorClass = type[GatewayError]
JsonObject = dict[str, Any]
# The type of FastAPI's parameter `responses`.
Responses = dict[int | str, JsonObject]

# Raised below the application (`app.server.connection`), in OpenAI's dialect on every path.
CONNECTION: tuple[ErrorClass, ...] = (
    BadRequest, RequestTimeout, HeadTooLarge, TooManyConnections,
)  # fmt: skip
EVERY_ROUTE: tuple[ErrorClass, ...] = (*CONNECTION, MethodNotAllowed, GatewayError)
# Routes that require a key: any, a client key, an admin key.
KEYED: tuple[ErrorClass, ...] = (InvalidApiKey, ServiceUnavailable)
CLIENT = (*KEYED, RateLimited)
ADMIN = (*KEYED, PermissionDenied)
BODY: tuple[ErrorClass, ...] = (InvalidJson, RequestTooLarge)

ENGINE_ERROR = "engine_error"
# Every other status is an engine's own.
ENGINE_STATUSES = ("4XX", "5XX")
_NAMES = {Dialect.OPENAI: "openai", Dialect.ANTHROPIC: "anthropic"}

RATE_HEADERS = tuple(name.decode() for names in HEADER_NAMES.values() for name in names)
REQUEST_ID = "x-request-id"
MODEL = "x-gateway-model"
DROPPED_FIELDS = "x-gateway-dropped-fields"
CAPTURED = "x-gateway-captured"
# Of every response of an engine.
ENGINE_HEADERS: JsonObject = {
    name: {"$ref": f"#/components/headers/{name}"} for name in (MODEL, DROPPED_FIELDS, CAPTURED)
}


def error_responses(
    *kinds: ErrorClass,
    dialect: Dialect = Dialect.OPENAI,
    relayed: bool = False,
) -> Responses:
    """Return the error responses of a route that raises `kinds`, common ones included.

    `relayed`: the route relays to an engine, whose own errors pass unchanged. Where RateLimited is
    one of `kinds`, every response has the rate headers.
    """
    every: set[ErrorClass] = {*EVERY_ROUTE, *kinds}
    ordered = sorted(every, key=lambda kind: (kind.status, kind.code))
    found: Responses = {
        status: _response(tuple(group), dialect, relayed)
        for status, group in groupby(ordered, key=lambda kind: kind.status)
    }
    if relayed:
        found |= {status: _response((), dialect, relayed) for status in ENGINE_STATUSES}
        for status in ENGINE_STATUSES:
            found[status]["headers"] = found[status].get("headers", {}) | ENGINE_HEADERS
        # A proxy in front of an engine may not answer with JSON; a 5xx of that kind becomes a 502.
        found["4XX"]["content"]["*/*"] = {}
    if RateLimited in every:
        for response in found.values():
            response["headers"] = response.get("headers", {}) | rate_headers()
    return found


def rate_headers() -> JsonObject:
    """Return the x-ratelimit-* headers of a response."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in RATE_HEADERS}


def error_schema(kind: ErrorClass, dialect: Dialect) -> JsonObject:
    """Return the schema of an error's body."""
    message = {"type": "string", "description": "For people."}
    if dialect is Dialect.ANTHROPIC:
        error = _strict(type={"const": kind.anthropic_type}, message=message)
        return _strict(type={"const": "error"}, error=error)
    param: JsonObject = {"type": "null"} if kind.param is None else {"const": kind.param}
    if issubclass(kind, FieldNotAllowed | OutputTooLong):
        param = {"type": ["string", "null"], "description": "The field."}
    error = _strict(
        message=message, type={"const": kind.openai_type}, param=param, code={"const": kind.code}
    )
    return _strict(error=error)


def error_schemas() -> Mapping[str, JsonObject]:
    """Return the schema components of errors, by name."""
    schemas = {
        _name(kind.code, dialect): error_schema(kind, dialect)
        for kind in _family(GatewayError)
        for dialect in Dialect
    }
    message, text = {"type": "string"}, {"type": ["string", "null"]}
    schemas[_name(ENGINE_ERROR, Dialect.OPENAI)] = _open(
        error=_open(message=message, type=text, param=text, code=text)
    )
    schemas[_name(ENGINE_ERROR, Dialect.ANTHROPIC)] = _open(
        type={"const": "error"}, error=_open(type={"type": "string"}, message=message)
    )
    return schemas


def header_components() -> Mapping[str, JsonObject]:
    """Return the header components, by name."""
    count, span = {"type": "integer", "minimum": 0}, {"type": "string", "examples": ["1.239s"]}
    found: dict[str, JsonObject] = {
        REQUEST_ID: {
            "description": "The request's x-request-id if it has this pattern, else a new one.",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
        },
        MODEL: {
            "description": "The model that answered, by its own name: the one asked for, or a "
            "fallback. Absent where a keep-alive comment was sent before.",
            "schema": {"type": "string"},
        },
        DROPPED_FIELDS: {
            "description": "Fields of the request that were left out, where there are any.",
            "schema": {"type": "string"},
        },
        CAPTURED: {
            "description": "true: request and answer are stored. Absent where they are not.",
            "schema": {"const": "true"},
        },
    }
    for kind, (limit, remaining, reset) in HEADER_NAMES.items():
        for name, text, schema in (
            (limit, f"{kind.capitalize()} per minute.", count),
            (remaining, f"{kind.capitalize()} left now.", count),
            (reset, f"Time until the limit of {kind} is full again.", span),
        ):
            found[name.decode()] = {"description": text, "schema": schema}
    return found


def reference(kind: ErrorClass, dialect: Dialect = Dialect.OPENAI) -> JsonObject:
    """Return a reference to the schema of an error."""
    return _reference(kind.code, dialect)


def _response(kinds: Sequence[ErrorClass], dialect: Dialect, relayed: bool) -> JsonObject:
    """Return the response of one status; without `kinds` it is an engine's own."""
    schemas = [reference(kind, dialect) for kind in kinds]
    codes = [f"`{kind.code}`" for kind in kinds]
    if dialect is Dialect.ANTHROPIC:
        schemas += [reference(kind) for kind in kinds if kind in CONNECTION]
    if relayed:
        both = {Dialect.OPENAI, dialect}
        schemas += [_reference(ENGINE_ERROR, one) for one in Dialect if one in both]
        codes.append("an engine's own error")
    response: JsonObject = {
        "description": ", or ".join(codes),
        "content": {
            "application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
        },
    }
    if headers := dict(_headers(kinds, relayed)):
        response["headers"] = headers
    return response


def _headers(kinds: Sequence[ErrorClass], relayed: bool) -> Iterator[tuple[str, JsonObject]]:
    """Yield the headers of `GatewayError.headers`; an engine's own error may lack them."""

    def header(text: str, required: bool, **schema: Any) -> JsonObject:
        found: JsonObject = {"description": text, "schema": schema or {"type": "string"}}
        if required and not relayed:
            found["required"] = True
        return found

    if InvalidApiKey in kinds:
        yield "WWW-Authenticate", header("RFC 9110, section 11.6.1.", True)
    if MethodNotAllowed in kinds:
        yield "Allow", header("RFC 9110, section 15.5.6.", True)
    if UpgradeNotOffered in kinds:
        yield "Upgrade", header("RFC 9110, section 15.5.22.", True)
        yield "Connection", header("`upgrade`, because of that header.", True)
    if UnsupportedCoding in kinds:
        yield "Accept-Encoding", header("RFC 9110, section 15.5.16.", True)
    waits = [kind for kind in kinds if kind.retry_after_s is not None]
    if waits or any(issubclass(kind, RateLimited) for kind in kinds):
        text = "In seconds; absent if waiting does not help."
        yield "Retry-After", header(text, len(waits) == len(kinds), type="integer", minimum=0)
        text = "Trying again within a minute is in vain. The SDKs of OpenAI and Anthropic obey it."
        yield "x-should-retry", header(text, False, type="string", const="false")


def _family(root: ErrorClass) -> Iterator[ErrorClass]:
    yield root
    for child in root.__subclasses__():
        yield from _family(child)


def _name(code: str, dialect: Dialect) -> str:
    return f"{_NAMES[dialect]}.{code}"


def _reference(code: str, dialect: Dialect) -> JsonObject:
    return {"$ref": f"#/components/schemas/{_name(code, dialect)}"}


def _strict(**properties: JsonObject) -> JsonObject:
    return {**_open(**properties), "additionalProperties": False}


def _open(**properties: JsonObject) -> JsonObject:
    return {"type": "object", "required": [*properties], "properties": properties}
