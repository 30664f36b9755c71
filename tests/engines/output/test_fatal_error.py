"""An engine's death, reported by its API server."""

import json

import pytest

from engines.output import find_engine_death, reports_engine_death
from tests.fakes.faults import DEAD

EVENT = b"data: " + json.dumps(DEAD).encode() + b"\n\n"
CHUNK = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
ERROR = b'data: {"error": {"message": "bad grammar", "code": 400}}\n\n'


@pytest.mark.parametrize("before", [b"", CHUNK, CHUNK * 3, ERROR, CHUNK + ERROR + CHUNK])
def test_position_of_the_event_is_found(before: bytes) -> None:
    assert find_engine_death(before + EVENT + b"data: [DONE]\n\n") == len(before)


def test_generated_text_is_no_report() -> None:
    said = {"choices": [{"delta": {"content": EVENT.decode()}}]}
    assert find_engine_death(b"data: " + json.dumps(said).encode() + b"\n\n") is None


def test_error_of_one_request_is_no_report() -> None:
    assert find_engine_death(ERROR) is None
    assert not reports_engine_death(b'{"error": {"message": "bad grammar"}}')


def test_plain_response_is_a_report() -> None:
    assert reports_engine_death(json.dumps(DEAD).encode())
