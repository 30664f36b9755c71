"""Client errors for engines that fail during a response."""

import pytest

from app.errors import EngineFailed, EngineTooSlow
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
