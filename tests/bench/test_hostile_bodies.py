import json
from collections.abc import Callable
from typing import Any

import pytest
from python_multipart.multipart import MultipartParser

from bench import hostile_bodies as hostile
from bench.hostile_bodies import BODIES, CHAT, COMPLETIONS, FORM, MIB

LIMIT = 32 * MIB  # the gateway's default for max_body_bytes
SIZE = 4096


def parsed(raw: bytes) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(raw)
    assert request["model"] == "stub"
    return request


def parts(form: bytes) -> int:
    """Return how many parts a form has. Raises MultipartParseError when it is broken."""
    found = 0

    def on_part_end() -> None:
        nonlocal found
        found += 1

    parser = MultipartParser(b"b", {"on_part_end": on_part_end})
    parser.write(form)
    parser.finalize()
    return found


@pytest.mark.parametrize(
    "build",
    [
        hostile.form_of_tiny_parts,
        hostile.form_of_bare_parts,
        hostile.form_of_near_misses,
        hostile.token_ids,
        hostile.lists_of_token_ids,
        hostile.one_character_prompts,
        hostile.escapes,
        hostile.non_ascii,
        hostile.image,
        hostile.text_to_tokenize,
    ],
)
def test_body_has_the_requested_size(build: Callable[[int], bytes]) -> None:
    raw = build(SIZE)

    assert SIZE - 64 < len(raw) <= SIZE


def test_forms_have_many_parts_and_name_the_model_last() -> None:
    tiny, bare = hostile.form_of_tiny_parts(SIZE), hostile.form_of_bare_parts(SIZE)

    assert parts(tiny) > SIZE // 64
    assert parts(bare) > SIZE // 16
    for form in (tiny, bare, hostile.form_of_near_misses(SIZE)):
        assert form.endswith(b'name="model"\r\n\r\nstub\r\n--b--\r\n')


def test_a_near_miss_does_not_end_the_part() -> None:
    form = hostile.form_of_near_misses(SIZE)

    assert parts(form) == 2  # the file and the model
    assert form.count(b"\r\n--") > SIZE // 5


def test_the_key_without_requests_sends_every_completion() -> None:
    limited = {body.build for body in BODIES.values() if body.limited}

    assert limited == {body.build for body in BODIES.values() if body.path == COMPLETIONS}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_every_body_is_within_the_limit_of_the_gateway(name: str) -> None:
    body = BODIES[name]
    raw = body.build()

    assert len(raw) <= LIMIT
    assert body.content_type == FORM or raw.startswith(b'{"model":"stub"')
    assert body.path != CHAT or b'"stream":true' in raw[:256]
