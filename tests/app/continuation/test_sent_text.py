"""What a client has is recorded exactly, whichever way an engine writes it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.continuation.sent_text import SentText
from tests.app.continuation.streams import NAMES, endpoint_of, recorded

CHAT = "/v1/chat/completions"
# Text that looks like what surrounds it.
LOOKALIKES = [
    '"',
    "\\",
    '"},"logprobs":null,"finish_reason":null}]}\n\n',
    '{"content":"',
    "data: [DONE]\n\n",
    '"sequence_number":7',
    "\r\n",
    "😀",
    "\u2028",
]
TEXTS = st.lists(st.text(min_size=1, max_size=4) | st.sampled_from(LOOKALIKES), max_size=80)


def chunk(text: str, *, index: int = 0, ascii_only: bool = False, **members: Any) -> bytes:
    """Return a chunk of chat as vLLM writes it, or with every other character escaped."""
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    data = {"id": "chatcmpl-1", "created": 7, "choices": [{**choice, **members}]}
    line = json.dumps(data, separators=(",", ":"), ensure_ascii=ascii_only)
    return f"data: {line}\n\n".encode()


def response_delta(text: str, number: int) -> bytes:
    data = {
        "content_index": 0,
        "delta": text,
        "item_id": "msg_1",
        "logprobs": [],
        "output_index": 0,
        "sequence_number": number,
        "type": "response.output_text.delta",
    }
    line = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"event: {data['type']}\ndata: {line}\n\n".encode()


def texts_of(sent: SentText) -> Iterator[tuple[Any, str]]:
    sent.flush()
    for channel, segments in sent.channels.items():
        assert len(segments) == 1
        assert segments[0].text is not None
        yield channel, segments[0].text.decode()


@settings(max_examples=30)
@given(texts=TEXTS, ascii_only=st.booleans())
def test_text_is_what_the_chunks_contain(texts: list[str], ascii_only: bool) -> None:
    sent = SentText(CHAT)
    for text in texts:
        sent.add(chunk(text, ascii_only=ascii_only))
    assert "".join(text for _, text in texts_of(sent)) == "".join(texts)


@settings(max_examples=30)
@given(texts=TEXTS)
def test_text_of_responses_is_what_the_events_contain(texts: list[str]) -> None:
    sent = SentText("/v1/responses")
    for number, text in enumerate(texts):
        sent.add(response_delta(text, number + 5))
    assert "".join(text for _, text in texts_of(sent)) == "".join(texts)
    sent.flush()
    assert sent.read_last_number() == (len(texts) + 4 if texts else -1)


@settings(max_examples=30)
@given(texts=st.lists(st.tuples(st.integers(0, 2), st.text(min_size=1, max_size=3)), max_size=80))
def test_choices_are_recorded_apart(texts: list[tuple[int, str]]) -> None:
    sent = SentText(CHAT)
    for index, text in texts:
        sent.add(chunk(text, index=index))
    expected = {i: "".join(t for j, t in texts if i == j) for i in {j for j, _ in texts}}
    assert dict(texts_of(sent)) == expected


def test_comments_and_other_line_ends_are_no_text() -> None:
    sent = SentText(CHAT)
    sent.add(b": keep-alive\n\n" + chunk("a") + b": keep-alive\n\n")
    sent.add(chunk("b").replace(b"\n", b"\r\n") + b":\r\n\r\n")
    assert list(texts_of(sent)) == [(0, "ab")]


@pytest.mark.parametrize("name", NAMES)
def test_grouping_of_events_makes_no_difference(name: str) -> None:
    apart, together = SentText(endpoint_of(name)), SentText(endpoint_of(name))
    for event in recorded(name):
        apart.add(event)
    together.add(b"".join(recorded(name)))
    apart.flush()
    together.flush()
    assert apart.channels == together.channels
    assert apart.size == together.size > 0
    assert apart.read_last_number() == together.read_last_number()
    assert apart.unreadable is None


def test_size_counts_text_in_utf8() -> None:
    one, two = SentText(CHAT), SentText(CHAT)
    for _ in range(64):
        one.add(chunk("你"))
        two.add(chunk("你好"))
    assert two.size - one.size == 64 * 3


def test_an_unreadable_stream_is_recorded_as_such_and_keeps_no_memory() -> None:
    sent = SentText(CHAT)
    sent.add(chunk("a"))
    sent.add(b"data: {broken\n\n")
    sent.flush()
    assert sent.channels == {}
    assert sent.unreadable == "an event of the stream could not be read: DecodeError"
    assert sent.size == 0


def test_other_endpoints_cannot_be_compared() -> None:
    with pytest.raises(KeyError):
        SentText("/v1/embeddings")


def test_chunk_with_several_texts_is_read_after_one_with_one() -> None:
    """Its beginning and end are those of the other, and so is its form."""

    def arguments(*pieces: tuple[int, str]) -> bytes:
        calls = [{"index": index, "function": {"arguments": text}} for index, text in pieces]
        return chunk("", delta={"tool_calls": calls})

    sent = SentText(CHAT)
    for event in (
        arguments((0, "one")),
        arguments((0, " two"), (0, ' "three"')),
        arguments((0, ' "')),
        arguments((0, "."), (1, "four")),
    ):
        sent.add(event)
    sent.flush()
    segments = sent.channels[0]
    assert sent.unreadable is None
    assert [bytes(one.text or b"") for one in segments] == [b'one two "three" ".', b"four"]
