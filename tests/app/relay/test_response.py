"""Client errors for engines that fail during a response."""

import json

import pytest

from app.errors import EngineFailed, EngineTooSlow
from app.relay.engine_errors import with_own_count
from app.relay.response import as_gateway_error
from engines.base import (
    EngineDied,
    EngineError,
    EngineProtocolError,
    FirstByteTimeout,
    StallTimeout,
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FirstByteTimeout("secret detail"), EngineTooSlow),
        (StallTimeout("secret detail"), EngineTooSlow),
        (EngineDied("secret detail"), EngineFailed),
        (EngineProtocolError("secret detail"), EngineFailed),
        (EngineError("secret detail"), EngineFailed),
    ],
)
def test_client_error_has_no_operator_detail(error: EngineError, kind: type[Exception]) -> None:
    translated = as_gateway_error(error)
    assert type(translated) is kind
    assert "secret" not in translated.message


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        # As vLLM 0.32 writes them.
        (
            "'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict "
            "of 3 items>'",
            "of 1 items",
        ),
        (
            "'type': 'missing', 'loc': 'body.messages.0.role', 'msg': 'Field required', 'input': "
            "'<dict of 3 items>'",
            "of 3 items",
        ),
        (
            "'type': 'string_type', 'loc': 'body.user', 'msg': 'Input should be a valid string', "
            "'input': '<dict of 3 items>'",
            "of 3 items",
        ),
    ],
)
def test_error_for_a_missing_field_counts_what_the_client_sent(error: str, shown: str) -> None:
    message = f"1 validation error:\n  {{{error}}}"
    body = json.dumps({"error": {"message": message, "type": "Bad Request", "code": 400}}).encode()
    found = json.loads(with_own_count(body, 1))
    assert found["error"]["message"] == message.replace("of 3 items", shown)
