"""An engine's errors in the caller's dialect."""

import json
from typing import Any

import pytest

from app.errors import Dialect
from app.relay.engine_errors import describe_too_long, translate_error

INPUT = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains {}3001 "
    "input tokens, which exceeds this limit even without any output tokens. Please reduce the "
    "length of the input prompt."
)
CHARACTERS = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains 90000 "
    "characters (more than 16384 characters, which is the upper bound for 2048 input tokens). "
    "Please reduce the length of the input prompt."
)


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        (INPUT.format(""), 3001),
        (INPUT.format("at least "), 3001),
        (CHARACTERS, 2049),
        (
            "This model's maximum context length is 2048 tokens. However, you requested 3001 "
            "tokens (2901 in the messages, 100 in the completion).",
            3001,
        ),
        (
            "The decoder prompt (length 3001) is longer than the maximum model length of 2048. "
            "Make sure that `max_model_len` is no smaller than the number of text tokens.",
            3001,
        ),
        ("Input length (3001) exceeds model's maximum context length (2048).", 3001),
    ],
)
def test_prompt_that_is_too_long_is_told_in_anthropics_words(message: str, tokens: int) -> None:
    said = f"prompt is too long: {tokens} tokens > 2048 maximum"
    assert describe_too_long(message) == said
    openai = json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}})
    own = {"type": "error", "error": {"type": "BadRequestError", "message": message}}
    for body in (openai, json.dumps(own)):
        assert translated(body, 400) == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": said},
        }
    told = translate_error(openai.encode(), 400, Dialect.OPENAI)
    assert told is not None
    assert json.loads(told)["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error")],
)
def test_vllms_error_has_openais_type_and_no_number_as_code(status: int, kind: str) -> None:
    error = {"message": "no", "type": "BadRequestError", "param": "max_tokens", "code": status}
    told = translate_error(json.dumps({"error": error}).encode(), status, Dialect.OPENAI)
    assert told is not None
    assert json.loads(told) == {
        "error": {"message": "no", "type": kind, "param": "max_tokens", "code": None}
    }


def test_error_in_openais_shape_stays_as_it_is() -> None:
    error = {"message": "no", "type": "invalid_request_error", "code": "string_above_max_length"}
    assert translate_error(json.dumps({"error": error}).encode(), 400, Dialect.OPENAI) is None


def translated(body: str, status: int) -> Any:
    found = translate_error(body.encode(), status, Dialect.ANTHROPIC)
    return None if found is None else json.loads(found)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_type_of_an_anthropic_error_follows_the_status(status: int, kind: str) -> None:
    own = json.dumps({"type": "error", "error": {"type": "NotFoundError", "message": "no"}})
    assert translated(own, status)["error"] == {"type": kind, "message": "no"}


def test_anthropic_error_with_a_type_of_anthropics_stays_as_it_is() -> None:
    own = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
    assert translated(own, 500) is None


def test_other_limits_are_no_prompts_that_are_too_long() -> None:
    assert describe_too_long("max_tokens must be at least 1") is None
