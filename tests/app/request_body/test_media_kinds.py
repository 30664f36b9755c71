"""Kinds of media in a request."""

from typing import Any

import msgspec
import pytest

from app.errors import MediaNotTaken
from app.request_body import ParsedBody, check_taken, media_kinds, parse
from app.request_body.media_kinds import MAX_READ

CHAT = "/v1/chat/completions"


def body_of(**fields: Any) -> ParsedBody:
    return parse(b"", msgspec.json.encode({"model": "demo", **fields}))


def chat(*parts: Any) -> ParsedBody:
    return body_of(messages=[{"role": "user", "content": list(parts)}])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA"}}
SOURCE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (chat(IMAGE), {"image"}),
        (chat("a text", {"type": "text", "text": "hello"}, SOURCE), {"image"}),
        (chat({"type": "tool_result", "content": [SOURCE]}), {"image"}),
        (chat(AUDIO), {"audio"}),
        (chat({"type": "video_url", "video_url": {"url": "data:,"}}, IMAGE), {"image", "video"}),
        (
            body_of(
                messages=[[{"content": "hello"}], [{"content": [SOURCE]}, {"content": [AUDIO]}]]
            ),
            {"image", "audio"},
        ),
        (body_of(input=[{"content": [{"type": "input_image", "image_url": "data:,"}]}]), {"image"}),
    ],
)
def test_media_are_found_in_each_form_of_message(body: ParsedBody, kinds: set[str]) -> None:
    assert media_kinds(CHAT, body) == kinds


@pytest.mark.parametrize(
    "body",
    [
        body_of(messages=[{"role": "user", "content": 'say "type": "image_url"'}]),
        chat({"type": "text", "text": '{"type": "image_url"}'}),
        chat({"type": "tool_use", "input": {"type": "image", "content": [1]}}),
        body_of(messages=[{"content": "hi"}], tools=[{"parameters": {"type": "image"}}]),
        body_of(input="image"),
        body_of(input=["image_url", "input_audio"]),
        body_of(input=[[1, 2], [3]]),
        body_of(messages={"type": "image"}),
        body_of(messages=[{"content": {"type": "image"}}]),
        body_of(messages=[{"role": "assistant", "content": None}]),
        body_of(prompt="image_url"),
        chat({**IMAGE, "padding": "x" * MAX_READ}),
    ],
)
def test_nothing_is_assumed_of_text_and_of_other_forms(body: ParsedBody) -> None:
    assert media_kinds(CHAT, body) == set()


@pytest.mark.parametrize("depth", [100, 900, 1800])
def test_results_of_tools_in_each_other_are_left_to_the_engine(depth: int) -> None:
    """Python's own limit, in decoding or in reading what was decoded, is no fault of ours."""
    messages = b"[%b%b]" % (b'{"content":[' * depth, b"]}" * depth)
    body = ParsedBody("demo", b"", {"messages": msgspec.Raw(messages)})
    assert media_kinds(CHAT, body) == set()


def test_a_transcription_is_audio() -> None:
    assert media_kinds("/v1/audio/transcriptions", body_of()) == {"audio"}


@pytest.mark.parametrize(
    ("kinds", "taken", "message"),
    [
        ({"image"}, (), "demo takes text only, and the request holds images"),
        ({"audio", "video"}, ("image",), "demo takes text and images, and the request holds audio "
         "and video"),
        ({"video"}, ("image", "audio"), "takes text and audio and images, and the request holds "
         "video"),
    ],
)  # fmt: skip
def test_the_refusal_names_what_the_model_takes(
    kinds: set[str], taken: tuple[str, ...], message: str
) -> None:
    with pytest.raises(MediaNotTaken, match=message):
        check_taken(kinds, taken, "demo")


def test_media_that_the_model_takes_pass() -> None:
    check_taken({"image"}, {"image", "video"}, "demo")
