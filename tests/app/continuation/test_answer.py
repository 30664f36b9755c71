"""The IDs of a stream, where its text ends among them, and how they are cut out of it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.continuation.answer import BATCH, Answer, Tail, without_token_ids
from tests.app.continuation.generated import (
    CHAT,
    COMPLETIONS,
    WIDTHS,
    answers,
    body_of,
    events_of,
    grouped,
    made_by,
)
from tests.app.continuation.streams import NAMES, as_by_vllm_0_33, data_of, recorded

PLENTY = 10_000


def record(chunks: Sequence[bytes], max_tokens: int = PLENTY) -> Answer:
    answer = Answer(max_tokens)
    for chunk in chunks:
        answer.add(chunk)
    answer.flush()
    return answer


def texts_of(events: Sequence[bytes]) -> list[tuple[list[int], str, str]]:
    """Return the IDs, the text and the reasoning of each chunk, read as JSON."""
    found = []
    for event in events:
        data = data_of(event)
        for choice in data["choices"] if isinstance(data, dict) else ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            found.append((choice.get("token_ids") or [], text, delta.get("reasoning") or ""))
    return found


def facts_of(answer: Answer) -> dict[str, Any]:
    names = ("prompt", "prompt_tokens", "tail", "thought_tokens", "first_thought", "last_thought",
             "thought_ended", "id", "created", "finished", "in_tool_call", "obstacle")  # fmt: skip
    return {name: getattr(answer, name) for name in names} | {"ids": list(answer.ids)}


def expected_of(events: Sequence[bytes]) -> dict[str, Any]:
    """Return the facts of a stream, found chunk by chunk."""
    ids: list[int] = []
    found: dict[str, Any] = {
        "tail": None, "first_thought": None, "last_thought": None, "thought_ended": False
    }  # fmt: skip
    for tokens, text, reasoning in texts_of(events):
        end = len(ids) + len(tokens)
        if reasoning:
            found["last_thought"] = Tail(len(ids), end, reasoning)
            found["first_thought"] = found["first_thought"] or found["last_thought"]
        if text or reasoning:
            found["tail"] = Tail(len(ids), end, text or reasoning)
            found["thought_ended"] |= bool(text)
        ids += tokens
    return found | {"ids": ids}


@settings(max_examples=25)
@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    said=answers(),
    widths=WIDTHS,
    sizes=WIDTHS,
    until=st.integers(1, 200),
)
def test_any_grouping_gives_the_same_facts(
    endpoint: str, said: str, widths: list[int], sizes: list[int], until: int
) -> None:
    made = made_by(endpoint, body_of(said))
    events = events_of(endpoint, made, ids=True, widths=widths)[:until]
    answer = record(grouped(events, sizes))
    facts = facts_of(answer)
    assert facts == facts | expected_of(events)
    assert facts == facts_of(record([b"".join(events)]))
    assert (answer.prompt, answer.prompt_tokens) == (b",".join(b"%d" % i for i in made.prompt), 3)
    assert (answer.id, answer.created) == (b"chatcmpl-fake", b"1795227950")
    assert answer.obstacle == ""
    assert answer.finished is any(b'"finish_reason":"' in event for event in events)


@pytest.mark.parametrize("size", [1, 3, BATCH, 1000])
def test_facts_of_a_real_stream(size: int) -> None:
    """An empty thought, and then the answer: vLLM's own bytes."""
    answer = record(grouped(recorded("chat_token_ids"), [size]))
    assert list(answer.ids) == [1179, 1180, 329, 445, 316, 436, 281, 358, 13, 1176]
    assert answer.prompt == b"1178,276,198,350,281,262,445,316,436,30,1176,198,1178,272,277,198"
    assert answer.prompt_tokens == 16
    assert answer.id == b"chatcmpl-recorded-chat_token_ids"
    assert answer.created == b"1795412435"
    assert answer.tail == Tail(8, 9, ".")
    assert answer.finished
    assert not answer.in_tool_call
    assert answer.thought_tokens == 0


def test_answer_ends_before_an_incomplete_character() -> None:
    """The first half of a character has an ID and no text."""
    events = events_of(CHAT, made_by(CHAT, body_of("a灯")), ids=True)
    answer = record(events[:3])
    assert [len(tokens) for tokens, _, _ in texts_of(events[:3])] == [0, 1, 1]
    assert answer.tail == Tail(0, 1, "a")
    assert len(answer.ids) == 2
    answer.cut(1)
    assert len(answer.ids) == 1


def test_cut_within_the_last_chunk_cuts_what_is_known_of_it() -> None:
    """Another interruption may follow before any new text."""
    events = events_of(
        CHAT, made_by(CHAT, body_of("<think>one 灯</think>x")), ids=True, widths=(3,)
    )
    answer = record(events[:2])
    assert answer.tail == answer.last_thought == Tail(0, 3, "one ")
    answer.cut(2)
    assert answer.tail == answer.first_thought == answer.last_thought == Tail(0, 2, "one ")


def test_stream_without_text_has_no_tail() -> None:
    events = events_of(CHAT, made_by(CHAT, body_of("<think>a</think>b")), ids=True)
    answer = record(events[:2])
    assert (answer.tail, list(answer.ids)) == (None, [1001])


def test_thought_is_counted_and_its_end_seen() -> None:
    events = events_of(CHAT, made_by(CHAT, body_of("<think>one two</think>three")), ids=True)
    thinking = record(events[:4])
    assert (thinking.thought_tokens, thinking.thought_ended) == (2, False)
    assert (thinking.first_thought, thinking.last_thought) == (
        Tail(1, 2, "one"),
        Tail(2, 3, " two"),
    )
    answering = record(events)
    assert (answering.thought_tokens, answering.thought_ended) == (2, True)


def test_tool_call_is_seen_from_its_first_chunk_on() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    events = events_of(CHAT, made_by(CHAT, body_of(f"let me see {call}")), ids=True)
    first = next(n for n, event in enumerate(events) if b'"tool_calls":[' in event)
    assert not record(events[:first]).in_tool_call
    assert record(events[: first + 1]).in_tool_call


class TestBounds:
    EVENTS = events_of(CHAT, made_by(CHAT, body_of("one two three")), ids=True)[:-2]

    def test_stream_of_the_maximum_is_known(self) -> None:
        assert record(self.EVENTS, 3 + 3).obstacle == ""

    @pytest.mark.parametrize("max_tokens", [1, 3, 5])
    def test_longer_stream_is_forgotten(self, max_tokens: int) -> None:
        answer = record(self.EVENTS, max_tokens)
        assert answer.obstacle == "too_long"
        assert (len(answer.ids), answer.prompt) == (0, None)
        answer.add(b"".join(self.EVENTS))
        answer.flush()
        assert (answer.obstacle, len(answer.ids)) == ("too_long", 0)

    def test_stream_without_ids_is_not_known(self) -> None:
        """The engine does not know the flag."""
        made = made_by(CHAT, body_of("one two"))
        assert record(events_of(CHAT, made, ids=False)).obstacle == "version"

    @pytest.mark.parametrize(
        "event",
        [
            b'data: {"choices":[{"token_ids":[1],"delta":{"content":"x}]}\n\n',
            b'data: {"choices":[{"token_ids":[1],"delta":{"content":"\xff"}}]}\n\n',
            b'data: {"choices":[{"token_ids":[1 2],"delta":{"content":"x"}}]}\n\n',
            b'data: {"choices":{"token_ids":[1]}}\n\n',
            b'data: {"choices":[{"token_ids":[-1],"delta":{"content":"x"}}]}\n\n',
            b'data: {"choices":[{"token_ids":[1.5],"delta":{"content":"x"}}]}\n\n',
        ],
    )
    def test_stream_that_cannot_be_read_is_not_known(self, event: bytes) -> None:
        assert record([*self.EVENTS[:2], event]).obstacle == "version"

    def test_ids_that_are_no_token_are_not_recorded(self) -> None:
        data = {"choices": [{"token_ids": [2**32], "delta": {"content": "x"}}]}
        event = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
        assert record([*self.EVENTS[:2], event]).obstacle == "version"


def test_nothing_is_searched_until_a_batch_is_full() -> None:
    """One search for many chunks is a third of the cost."""
    answer = Answer(PLENTY)
    events = events_of(CHAT, made_by(CHAT, body_of("x" * 400)), ids=True)
    for event in events[: BATCH - 1]:
        answer.add(event)
    assert not answer.ids
    answer.add(events[BATCH - 1])
    assert len(answer.ids) == BATCH - 1


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        (b"data: [DONE]\n\n", True),
        (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', True),
        (b'data: {"choices":[]}\r\n\r\ndata: [DONE]\r\n\r\n', True),
        (b'data: {"choices":[{"delta":{"content":"ends with data: [DONE]"}}]}\n\n', False),
    ],
)
def test_end_mark_is_a_line_and_not_a_part_of_a_text(events: bytes, ended: bool) -> None:
    answer = Answer(100)
    answer.add(events)
    answer.flush()
    assert answer.ended is ended


def without_ids(chunks: Sequence[bytes]) -> bytes:
    return b"".join(map(without_token_ids, chunks))


@settings(max_examples=25)
@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    said=answers(),
    widths=WIDTHS,
    sizes=WIDTHS,
    options=st.fixed_dictionaries({"usage": st.booleans(), "continuous_usage": st.booleans()}),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
)
@example(CHAT, "海a", [1], [100], {"usage": False, "continuous_usage": False}, b"\r\n")
def test_any_grouping_gives_the_bytes_of_a_direct_call(
    endpoint: str,
    said: str,
    widths: list[int],
    sizes: list[int],
    options: dict[str, bool],
    line_end: bytes,
) -> None:
    options["continuous_usage"] &= options["usage"]
    made = made_by(endpoint, body_of(said))
    direct = events_of(endpoint, made, ids=False, widths=widths, **options)
    with_ids = events_of(endpoint, made, ids=True, widths=widths, **options)
    chunks = [chunk.replace(b"\n", line_end) for chunk in grouped(with_ids, sizes)]
    assert without_ids(chunks) == b"".join(direct).replace(b"\n", line_end)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_real_stream_with_ids_loses_nothing_but_the_ids(size: int) -> None:
    """vLLM's own bytes: the two tokens of an empty thought have chunks that a direct call lacks."""
    events = recorded("chat_token_ids")
    expected = [
        event.replace(b'"prompt_token_ids":[1178,276,198,350,281,262,445,316,436,30,1176,198,'
                      b'1178,272,277,198]', b'"prompt_token_ids":null')
        for event in events
        if b'"delta":{},"logprobs":null,"finish_reason":null' not in event
    ]  # fmt: skip
    assert len(events) - len(expected) == 2
    found = without_ids(grouped(events, [size]))
    assert b'token_ids":[' not in found
    assert found.count(b'"token_ids":null') == found.count(b'"delta"') - 1
    for event in expected:
        start = event.find(b'"token_ids":[')
        assert (event[:start] if start >= 0 else event) in found
    assert found.count(b"\n\n") == len(expected)


def test_chunks_of_a_newer_vllm_are_recorded_and_lose_their_ids() -> None:
    events = recorded("chat_token_ids")
    newer = list(map(as_by_vllm_0_33, events))
    assert record(newer).ids == record(events).ids
    cut = without_ids(newer)
    assert b'token_ids":[' not in cut
    assert cut.count(b"\n\n") == without_ids(events).count(b"\n\n")


@pytest.mark.parametrize("name", NAMES)
def test_stream_without_ids_is_unchanged(name: str) -> None:
    stream = b"".join(recorded(name))
    assert without_token_ids(stream) is stream


def test_text_that_looks_like_ids_is_unchanged() -> None:
    """A quote in a JSON string is escaped."""
    made = made_by(CHAT, body_of('"token_ids":[1,2]'))
    [event] = [
        event
        for event in events_of(CHAT, made, ids=True, widths=(100,))
        if b"content" in event and b"role" not in event
    ]
    assert rb'"content":"\"token_ids\":[1,2]"' in without_token_ids(event)


def test_list_without_an_end_passes() -> None:
    event = b'data: {"choices":[{"token_ids":[1,2\n\n'
    assert without_token_ids(event) == event


def test_comment_passes() -> None:
    assert without_token_ids(b": keep-alive\n\n") == b": keep-alive\n\n"
