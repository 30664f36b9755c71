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


def test_completions_have_a_list_of_ids_of_lists_or_of_strings() -> None:
    ids = parsed(hostile.token_ids(SIZE))["prompt"]
    lists = parsed(hostile.lists_of_token_ids(SIZE))["prompt"]
    strings = parsed(hostile.one_character_prompts(SIZE))["prompt"]

    assert set(ids) == {7}
    assert all(prompt == [7] for prompt in lists)
    assert set(strings) == {"a"}
    assert min(len(ids), len(lists), len(strings)) > SIZE // 5


def test_members_are_distinct_in_the_body_or_in_a_nested_object() -> None:
    assert len(parsed(hostile.members(500))) == 500 + len(parsed(hostile.nesting(1))) - 1
    assert len(parsed(hostile.nested_members(500))["metadata"]) == 500


def test_nesting_has_the_requested_depth() -> None:
    value, depth = parsed(hostile.nesting(50))["metadata"], 1
    while value:
        value, depth = value[0], depth + 1

    assert depth == 50


def test_messages_contain_escapes_non_ascii_text_and_an_image() -> None:
    def content(raw: bytes) -> Any:
        return parsed(raw)["messages"][0]["content"]

    assert set(content(hostile.escapes(SIZE))) == {"\n"}
    assert set(content(hostile.non_ascii(SIZE))) == {"語"}
    url = content(hostile.image(SIZE))[0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,iVBORw0K")


def test_chat_and_completions_request_a_stream_so_that_the_body_is_rewritten() -> None:
    for raw in (hostile.escapes(SIZE), hostile.token_ids(SIZE), hostile.members(5)):
        assert parsed(raw)["stream"] is True


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
