"""Costs of images and speech, by the units of their model."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.request_body.body import parse
from app.request_body.endpoint import IMAGE_EDITS, IMAGES, SPEECH
from app.request_body.rewrite import Rewrite
from app.request_body.token_cost import MAX_COUNT, Cost
from app.request_body.unit_cost import LONGEST_PAUSE_S, estimate_units
from app.settings import UnitSettings

UNITS = UnitSettings(image=10, character=2, second=3)


def json_cost(path: str, **fields: object) -> Cost:
    body = parse(b"application/json", msgspec.json.encode({"model": "m", **fields}))
    return estimate_units(path, body, Rewrite(), UNITS)


def form_cost(*fields: tuple[str, str]) -> Cost:
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in (("model", "m"), *fields)
    ]
    body = parse(b"multipart/form-data; boundary=x", f"{''.join(parts)}--x--\r\n".encode())
    return estimate_units(IMAGE_EDITS, body, Rewrite(), UNITS)


@pytest.mark.parametrize(
    ("fields", "images"),
    [
        ({}, 1),
        ({"n": 4}, 4),
        ({"n": "4"}, 4),
        ({"n": 4, "layers": 3}, 12),
        ({"n": None}, 1),
        ({"n": -3}, 1),
        ({"n": "many"}, 1),
        ({"n": 1e300}, MAX_COUNT),
    ],
)
def test_images_that_are_asked_for_are_counted(fields: dict[str, object], images: int) -> None:
    cost = json_cost(IMAGES, **fields)
    assert (cost.prompt, cost.output, cost.answers) == (0, 10 * images, images)
    assert cost.most_tokens == cost.tokens


def test_of_a_field_that_is_given_twice_the_larger_counts() -> None:
    assert form_cost(("n", "7"), ("n", "2")).answers == 7
    assert form_cost(("n", "2"), ("layers", "3")).answers == 6
    assert form_cost().answers == 1


@given(st.text(max_size=200))
def test_each_character_of_a_speech_is_counted(text: str) -> None:
    cost = json_cost(SPEECH, input=text)
    assert cost.prompt == cost.most_prompt == 2 * len(text)
    assert cost.output <= cost.most_output == 3 * (len(text) + LONGEST_PAUSE_S)


def test_a_speech_that_is_no_text_counts_its_bytes() -> None:
    assert json_cost(SPEECH, input=["a", "b"]).prompt == 2 * len('["a","b"]')
    assert json_cost(SPEECH).prompt == 0
