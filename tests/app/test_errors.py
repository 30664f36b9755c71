"""Every answer of ours that is not an engine's: status, code, and both dialects."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import errors
from app.errors import (
    Dialect,
    GatewayError,
    InvalidApiKey,
    MethodNotAllowed,
    RateLimited,
    dialect_of,
)


def family(root: type[GatewayError]) -> list[type[GatewayError]]:
    """A class and all that come from it."""
    return [root, *(one for child in root.__subclasses__() for one in family(child))]


EVERY = family(GatewayError)
# The table of the contract: class, status, code, whether Retry-After is promised.
CONTRACT = [
    ("InvalidApiKey", 401, "invalid_api_key", False),
    ("RateLimited", 429, "rate_limit_exceeded", True),
    ("QuotaUsedUp", 429, "insufficient_quota", True),
    ("EngineOverloaded", 503, "engine_overloaded", True),
    ("ServiceUnavailable", 503, "service_unavailable", True),
    ("ModelNotFound", 404, "model_not_found", False),
    ("EngineUnavailable", 503, "engine_unavailable", True),
    ("EngineFailed", 502, "engine_failed", False),
    ("EngineTooSlow", 504, "engine_timeout", False),
    ("RequestTooLarge", 413, "request_too_large", False),
    ("InvalidJson", 400, "invalid_json", False),
    ("MissingModel", 400, "missing_model", False),
    ("RouteNotFound", 404, "not_found", False),
    ("MethodNotAllowed", 405, "method_not_allowed", False),
    ("GatewayError", 500, "internal_error", False),
]
# The rows of the contract whose code comes with a wait, whichever class says it.
WAITS = {
    "rate_limit_exceeded", "insufficient_quota", "engine_overloaded", "engine_unavailable",
    "service_unavailable", "too_many_connections",
}  # fmt: skip
# https://docs.claude.com/en/api/errors
ANTHROPIC_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "timeout_error",
    "overloaded_error",
}


def make(kind: type[GatewayError], message: str = "something is wrong") -> GatewayError:
    if issubclass(kind, MethodNotAllowed):
        return kind(message, allowed="POST")
    if issubclass(kind, RateLimited):
        return kind(message, limit="requests", retry_after_s=7)
    return kind(message)


def body_of(error: GatewayError, dialect: Dialect) -> Any:
    return json.loads(error.body(dialect))


@pytest.mark.parametrize(("name", "status", "code", "waits"), CONTRACT)
def test_the_contracts_rows_have_their_status_and_code(
    name: str, status: int, code: str, waits: bool
) -> None:
    kind: type[GatewayError] = getattr(errors, name)
    error = make(kind)
    assert (error.status, error.code) == (status, code)
    assert (b"retry-after" in dict(error.headers())) is waits


@pytest.mark.parametrize("kind", EVERY)
def test_openai_clients_get_their_error_object(kind: type[GatewayError]) -> None:
    error = make(kind)
    body = body_of(error, Dialect.OPENAI)
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"] == "something is wrong"
    assert body["error"]["code"] == error.code
    assert body["error"]["param"] in (None, "model")


@pytest.mark.parametrize("kind", EVERY)
def test_anthropic_clients_get_their_error_object(kind: type[GatewayError]) -> None:
    body = body_of(make(kind), Dialect.ANTHROPIC)
    assert list(body) == ["type", "error"]
    assert body["type"] == "error"
    assert list(body["error"]) == ["type", "message"]
    assert body["error"]["message"] == "something is wrong"
    assert body["error"]["type"] in ANTHROPIC_TYPES


@pytest.mark.parametrize("kind", EVERY)
def test_status_and_types_agree_on_client_or_server_error(kind: type[GatewayError]) -> None:
    error = make(kind)
    assert 400 <= error.status <= 599
    openai_type = body_of(error, Dialect.OPENAI)["error"]["type"]
    anthropic_type = body_of(error, Dialect.ANTHROPIC)["error"]["type"]
    assert (openai_type == "server_error") is (error.status >= 500)
    assert (anthropic_type in {"api_error", "overloaded_error", "timeout_error"}) is (
        error.status >= 500
    )


@pytest.mark.parametrize("kind", EVERY)
def test_retry_after_is_set_exactly_where_the_contract_requires_it(
    kind: type[GatewayError],
) -> None:
    error = make(kind)
    wait = dict(error.headers()).get(b"retry-after")
    assert (wait is not None) is (error.code in WAITS)
    assert wait is None or int(wait) >= 1


@pytest.mark.parametrize("kind", EVERY)
def test_headers_are_lowercase_and_carry_no_line_break(kind: type[GatewayError]) -> None:
    for name, value in make(kind, "x\r\nset-cookie: y").headers():
        assert name == name.lower()
        assert b"\n" not in name + value
        assert b"\r" not in name + value


def test_error_may_set_retry_after() -> None:
    error = errors.EngineUnavailable("starting")
    error.retry_after_s = 120
    assert dict(error.headers())[b"retry-after"] == b"120"


def retried(error: GatewayError) -> bool:
    return (b"x-should-retry", b"false") not in error.headers()


def test_clients_are_told_not_to_retry_in_vain() -> None:
    assert retried(errors.RateLimited("full", "tokens", 59))
    assert retried(errors.RateLimited("full", "tokens", 300)), "agents wait for minutes"
    assert not retried(errors.RateLimited("larger than the limit", "tokens", None))
    assert retried(errors.QuotaUsedUp("used up, midnight is near", "budget", 60))
    assert not retried(errors.QuotaUsedUp("used up", "budget", 61))
    assert retried(errors.EngineUnavailable("starting"))
    assert not retried(errors.out_of_service("demo", "missing files"))


def test_missing_key_has_a_www_authenticate_header() -> None:
    assert (b"www-authenticate", b"Bearer") in InvalidApiKey("x").headers()


def test_wrong_method_has_an_allow_header() -> None:
    assert (b"allow", b"GET, POST") in MethodNotAllowed("x", allowed="GET, POST").headers()


def test_the_drawing_in_the_docstring_names_every_error_with_its_code() -> None:
    drawing = errors.__doc__ or ""
    for kind in EVERY:
        (line,) = (row for row in drawing.splitlines() if f" {kind.__name__} " in f"{row} ")
        if not kind.__subclasses__():
            assert kind.code in line
        if kind.__base__ is GatewayError:
            assert f" {kind.status}" in line
        assert ("Retry-After" in line) is (kind.code in WAITS)


@pytest.mark.parametrize("dialect", Dialect)
@given(message=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_message_stays_one_json_string_on_one_line(dialect: Dialect, message: str) -> None:
    error = GatewayError(message)
    raw = error.body(dialect)
    assert b"\n" not in raw
    assert json.loads(raw)["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/messages/count_tokens", Dialect.ANTHROPIC),
        ("/v1/messages/", Dialect.ANTHROPIC),
        ("/v1/chat/completions", Dialect.OPENAI),
        ("/v1/models", Dialect.OPENAI),
        ("/", Dialect.OPENAI),
        ("", Dialect.OPENAI),
        ("/messages", Dialect.OPENAI),
        ("/V1/MESSAGES", Dialect.OPENAI),
        ("/v1/chat/completions/v1/messages", Dialect.OPENAI),
    ],
)
def test_path_decides_the_error_dialect(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect
