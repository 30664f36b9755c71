"""An engine's death, told by its API server."""

import json

import pytest

from engines.output.fatal_error import death_in, tells_death
from tests.fakes.vllm import DEAD

EVENT = b"data: " + json.dumps(DEAD).encode() + b"\n\n"
CHUNK = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


@pytest.mark.parametrize("before", [b"", CHUNK, CHUNK * 3])
def test_death_is_found_where_its_event_begins(before: bytes) -> None:
    assert death_in(before + EVENT + b"data: [DONE]\n\n") == len(before)


def test_a_model_that_speaks_of_it_is_not_dead() -> None:
    said = {"choices": [{"delta": {"content": EVENT.decode()}}]}
    assert death_in(b"data: " + json.dumps(said).encode() + b"\n\n") is None


def test_an_error_of_one_request_is_not_the_engines_death() -> None:
    assert death_in(b'data: {"error": {"message": "bad grammar", "code": 400}}\n\n') is None
    assert not tells_death(b'{"error": {"message": "bad grammar"}}')


def test_a_plain_answer_tells_it_too() -> None:
    assert tells_death(json.dumps(DEAD).encode())
