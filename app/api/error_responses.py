"""Errors in the OpenAPI document: a schema for each class of `app.errors`, and responses of them.

A route declares the classes that it answers with beside those of every route:
`responses=error_responses(*ADMIN, Conflict)`. Status, code and type come from the classes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from app.errors import (
    BadRequest,
    Dialect,
    GatewayError,
    HeadTooLarge,
    InvalidApiKey,
    InvalidJson,
    MethodNotAllowed,
    PermissionDenied,
    RateLimited,
    RequestTimeout,
    RequestTooLarge,
    ServiceUnavailable,
    TooManyConnections,
)
from app.limits.judgement import HEADER_NAMES

ErrorClass = type[GatewayError]
JsonObject = dict[str, Any]
# What FastAPI takes as `responses`.
Responses = dict[int | str, JsonObject]

# The server answers these before it knows the path, so they are OpenAI's on every path.
CONNECTION: tuple[ErrorClass, ...] = (
    BadRequest, RequestTimeout, HeadTooLarge, TooManyConnections,
)  # fmt: skip
EVERY_ROUTE = (*CONNECTION, MethodNotAllowed, GatewayError)
# Of routes that ask for a key: a client's, or one that is for /admin.
KEYED: tuple[ErrorClass, ...] = (InvalidApiKey, ServiceUnavailable)
CLIENT = (*KEYED, RateLimited)
ADMIN = (*KEYED, PermissionDenied)
BODY: tuple[ErrorClass, ...] = (InvalidJson, RequestTooLarge)

ENGINE_ERROR = "engine_error"
# Statuses of the engine's own that have no row of ours.
ENGINE_STATUSES = ("4XX", "5XX")
_NAMES = {Dialect.OPENAI: "openai", Dialect.ANTHROPIC: "anthropic"}

RATE_HEADERS = tuple(name.decode() for names in HEADER_NAMES.values() for name in names)
REQUEST_ID = "x-request-id"


def error_responses(
    *kinds: ErrorClass,
    dialect: Dialect = Dialect.OPENAI,
    relayed: bool = False,
) -> Responses:
    """Return what a route answers with that can raise `kinds`, and the errors of every route.

    `relayed`: an engine answers there, whose own errors pass unchanged. With RateLimited among
    `kinds`, each of its answers tells of the caller's limits, once they are known.
    """
    every: set[ErrorClass] = {*EVERY_ROUTE, *kinds}
    ordered = sorted(every, key=lambda kind: (kind.status, kind.code))
    found: Responses = {
        status: _response(tuple(group), dialect, relayed)
        for status, group in groupby(ordered, key=lambda kind: kind.status)
    }
    if relayed:
        found |= {status: _response((), dialect, relayed) for status in ENGINE_STATUSES}
        # A proxy in front of the engine may answer in a form of its own; with 5xx that is a 502.
        found["4XX"]["content"]["*/*"] = {}
    if RateLimited in every:
        for response in found.values():
            response["headers"] = response.get("headers", {}) | rate_headers()
    return found


def rate_headers() -> JsonObject:
    """Return the headers that tell of the caller's limits, as a response declares them."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in RATE_HEADERS}


def error_schema(kind: ErrorClass, dialect: Dialect) -> JsonObject:
    """Return the schema of one error's body."""
    message = {"type": "string", "description": "For people."}
    if dialect is Dialect.ANTHROPIC:
        told = _strict(type={"const": kind.anthropic_type}, message=message)
        return _strict(type={"const": "error"}, error=told)
    param = {"type": "null"} if kind.param is None else {"const": kind.param}
    error = _strict(
        message=message, type={"const": kind.openai_type}, param=param, code={"const": kind.code}
    )
    return _strict(error=error)


def error_schemas() -> Mapping[str, JsonObject]:
    """Return the schemas that responses refer to, by name."""
    schemas = {
        _name(kind.code, dialect): error_schema(kind, dialect)
        for kind in _family(GatewayError)
        for dialect in Dialect
    }
    message, code = {"type": "string"}, {"type": "integer", "description": "The status."}
    # vLLM answers /v1/messages in OpenAI's form where it cannot read the body.
    schemas[_name(ENGINE_ERROR, Dialect.OPENAI)] = _open(error=_open(message=message, code=code))
    schemas[_name(ENGINE_ERROR, Dialect.ANTHROPIC)] = _open(
        type={"const": "error"}, error=_open(type={"type": "string"}, message=message)
    )
    return schemas


def header_components() -> Mapping[str, JsonObject]:
    """Return the headers that responses refer to, by name."""
    count, span = {"type": "integer", "minimum": 0}, {"type": "string", "examples": ["1.239s"]}
    found: dict[str, JsonObject] = {
        REQUEST_ID: {
            "description": "The client's own where that is harmless, else made here.",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
        }
    }
    for kind, (limit, remaining, reset) in HEADER_NAMES.items():
        for name, text, schema in (
            (limit, f"{kind.capitalize()} per minute that are allowed.", count),
            (remaining, f"{kind.capitalize()} that are left now.", count),
            (reset, "Time until all of them are left again.", span),
        ):
            found[name.decode()] = {"description": text, "schema": schema}
    return found


def reference(kind: ErrorClass, dialect: Dialect = Dialect.OPENAI) -> JsonObject:
    """Return what stands for the schema of an error."""
    return _reference(kind.code, dialect)


def _response(kinds: Sequence[ErrorClass], dialect: Dialect, relayed: bool) -> JsonObject:
    """Return the response of one status; of no class of ours, it is the engine's own."""
    schemas = [reference(kind, dialect) for kind in kinds]
    codes = [f"`{kind.code}`" for kind in kinds]
    if dialect is Dialect.ANTHROPIC:
        schemas += [reference(kind) for kind in kinds if kind in CONNECTION]
    if relayed:
        both = {Dialect.OPENAI, dialect}
        schemas += [_reference(ENGINE_ERROR, one) for one in Dialect if one in both]
        codes.append("the engine's own error")
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
    """Yield the headers of `GatewayError.headers`; each is there unless an engine answers."""

    def header(text: str, required: bool, **schema: Any) -> JsonObject:
        found: JsonObject = {"description": text, "schema": schema or {"type": "string"}}
        if required and not relayed:
            found["required"] = True
        return found

    if InvalidApiKey in kinds:
        yield "WWW-Authenticate", header("RFC 9110, section 11.6.1.", True)
    if MethodNotAllowed in kinds:
        yield "Allow", header("RFC 9110, section 15.5.6.", True)
    waits = [kind for kind in kinds if kind.retry_after_s is not None]
    if waits or any(issubclass(kind, RateLimited) for kind in kinds):
        text = "Whole seconds; not there where no wait would help."
        yield "Retry-After", header(text, len(waits) == len(kinds), type="integer", minimum=0)


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
