"""Costs of images and speech, by the units of their model."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadRequest
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


def form_cost(*fields: tuple[str, bytes]) -> Cost:
    parts = [
        b'--x\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in (("model", b"m"), *fields)
    ]
    body = parse(b"multipart/form-data; boundary=x", b"".join(parts) + b"--x--\r\n")
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
    assert form_cost(("n", b"7"), ("n", b"2")).answers == 7
    assert form_cost(("n", b"2"), ("layers", b"3")).answers == 6
    assert form_cost(("n", b"")).answers == form_cost().answers == 1


@pytest.mark.parametrize("value", [b" " * 100 + b"10", b"0" * 100 + b"10", b"10\xa0", b"ten"])
@pytest.mark.parametrize("name", ["n", "layers"])
def test_a_number_of_images_that_engines_may_read_otherwise_is_refused(
    name: str, value: bytes
) -> None:
    with pytest.raises(BadRequest, match=f"{name} must be a whole number"):
        form_cost((name, value))


@given(st.text(max_size=200))
def test_each_character_of_a_speech_is_counted(text: str) -> None:
    cost = json_cost(SPEECH, input=text)
    assert cost.prompt == cost.most_prompt == 2 * len(text)
    assert cost.output <= cost.most_output == 3 * (len(text) + LONGEST_PAUSE_S)


@pytest.mark.parametrize(
    ("fields", "seconds", "most"),
    [
        ({}, 2, 60),
        ({"speed": 0.25}, 8, 60),
        ({"speed": "0.25"}, 8, 60),
        ({"speed": 4}, 2, 60),  # where its length is measured, it is shorter
        ({"speed": 0.001}, 8, 60),
        ({"speed": "fast"}, 2, 60),
        ({"speed": "nan"}, 2, 60),
        ({"speed": "inf"}, 2, 60),
        ({"duration_seconds": 3600}, 3600, 3660),
        ({"duration_seconds": 0.5}, 2, 61),
        ({"duration_seconds": -5}, 2, 60),
        ({"duration_seconds": "nan"}, 2, 60),
        ({"duration_seconds": 1e300}, MAX_COUNT, MAX_COUNT + 60),
    ],
)
def test_seconds_that_are_asked_for_are_reserved(
    fields: dict[str, object], seconds: int, most: int
) -> None:
    cost = json_cost(SPEECH, input="x" * 30, **fields)
    assert (cost.output, cost.most_output, cost.plausible_output) == (
        3 * seconds, 3 * most, 3 * most,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["n", "layers", "speed", "duration_seconds", "sample_rate"])
def test_a_long_number_is_refused_and_not_parsed(name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} has over"):
        json_cost(SPEECH, **{name: "9" * 9000})


def test_a_speech_that_is_no_text_counts_its_bytes() -> None:
    assert json_cost(SPEECH, input=["a", "b"]).prompt == 2 * len('["a","b"]')
    assert json_cost(SPEECH).prompt == 0
