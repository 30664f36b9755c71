import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.continuation_answers import Answer, Outcome, Verdict, assemble, judge

DONE = b"data: [DONE]"
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
ERROR = b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"engine_failed"}}'


def chunk(**members: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "demo"}
    return b"data: " + json.dumps(head | members).encode()


def delta(index: int = 0, finish: str | None = None, **members: Any) -> bytes:
    choice = {"index": index, "delta": members, "finish_reason": finish, "token_ids": None}
    return chunk(choices=[choice])


def text(content: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": content, "finish_reason": finish}
    return chunk(choices=[choice])


def usage(**members: int) -> bytes:
    return chunk(choices=[], usage=USAGE | members)


def typed(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **members}).encode()


WHOLE = [
    delta(role="assistant", content=""),
    delta(reasoning="Think"),
    delta(content="Hello "),
    delta(content="you", finish="stop"),
    usage(),
    DONE,
]
EXPECTED = assemble(WHOLE)


def of(*events: bytes) -> Verdict:
    return judge(assemble(list(events)), EXPECTED)


def test_text_is_joined_however_the_engine_cut_it() -> None:
    letters = [delta(content=letter) for letter in "Hello yo"]
    assert of(*WHOLE[:2], *letters, *WHOLE[3:]).outcome is Outcome.WRONG  # "youyou"
    assert of(*WHOLE[:2], *letters, delta(content="u", finish="stop"), *WHOLE[4:]) == Verdict(
        Outcome.EQUAL
    )


def test_thought_and_answer_in_one_chunk_are_thought_first() -> None:
    both = delta(role="assistant", content="Hello you", reasoning="Think", finish="stop")
    assert of(both, *WHOLE[4:]) == Verdict(Outcome.EQUAL)


def test_comments_are_no_events() -> None:
    assert of(b": keep-alive", *WHOLE[:3], b": keep-alive", *WHOLE[3:]) == Verdict(Outcome.EQUAL)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*WHOLE[:3], *WHOLE[2:]], "choice 0 content, character 6: 'Hello you', not 'you'"),
        ([*WHOLE[:2], *WHOLE[3:]], "choice 0 content, character 0: 'you', not 'Hello you'"),
        (WHOLE[:-1], "(0, 1, (3, 5)), not (1, 1, (3, 5))"),
        ([*WHOLE, DONE], "(2, 1, (3, 5)), not (1, 1, (3, 5))"),
        ([*WHOLE, delta(content="more")], "after the end"),
        ([*WHOLE[:-1], usage(), DONE], "(1, 2, (3, 5)), not (1, 1, (3, 5))"),
        ([*WHOLE[:4], usage(completion_tokens=6), DONE], "(1, 1, (3, 6)), not (1, 1, (3, 5))"),
        ([*WHOLE[:3], WHOLE[3].replace(b"-1", b"-2"), *WHOLE[4:]], "id changed within the answer"),
        ([*WHOLE[:4], b"data: {", *WHOLE[4:]], "unknown event: {"),
        (
            [*WHOLE[:3], WHOLE[3].replace(b'"token_ids": null', b'"token_ids": [4]'), *WHOLE[4:]],
            "token_ids that were not asked for",
        ),
        ([delta(role="assistant"), *WHOLE], "choice 0 role, character 9"),
    ],
)
def test_any_other_answer_is_wrong(events: list[bytes], words: str) -> None:
    verdict = of(*events)
    assert verdict.outcome is Outcome.WRONG
    assert words in verdict.words


def test_error_event_after_the_right_beginning_is_an_error() -> None:
    assert of(*WHOLE[:3], ERROR) == Verdict(Outcome.ERROR, "engine_failed")


def test_done_may_follow_an_error_event_once() -> None:
    assert of(*WHOLE[:3], ERROR, DONE) == Verdict(Outcome.ERROR, "engine_failed")
    assert of(*WHOLE[:3], ERROR, DONE, DONE).outcome is Outcome.WRONG


def test_error_event_after_a_wrong_beginning_is_wrong() -> None:
    verdict = of(*WHOLE[:3], *WHOLE[2:3], ERROR)
    assert verdict.outcome is Outcome.WRONG
    assert "before the error engine_failed" in verdict.words


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=30))
def test_error_event_must_be_the_last_event(at: int, more: bytes) -> None:
    after = b"data: " + more.replace(b"\n", b"").replace(b"\r", b"") + b"."
    assert of(*WHOLE[:at], ERROR, after).outcome is Outcome.WRONG


def test_tool_call_has_one_id_which_differs_from_answer_to_answer() -> None:
    def call(call_id: str | None, arguments: str) -> bytes:
        function = {"name": "f" if call_id else None, "arguments": arguments}
        return delta(tool_calls=[{"index": 0, "id": call_id, "function": function}])

    end = [delta(finish="tool_calls"), usage(), DONE]
    expected = assemble([call("a", "{"), call(None, "}"), *end])
    assert judge(assemble([call("b", "{}"), *end]), expected) == Verdict(Outcome.EQUAL)
    for events in ([call("a", "{"), call("b", "}")], [call("a", "{"), call("a", "}")]):
        assert judge(assemble([*events, *end]), expected).outcome is Outcome.WRONG


def test_choices_are_parts_of_their_own() -> None:
    one, two = delta(0, content="a"), delta(1, content="b")
    end = [delta(0, "stop"), delta(1, "stop"), usage(), DONE]
    assert judge(assemble([two, one, *end]), assemble([one, two, *end])) == Verdict(Outcome.EQUAL)
    assert judge(assemble([two, two, *end]), assemble([one, two, *end])).outcome is Outcome.WRONG


def test_completions_are_compared_by_text() -> None:
    expected = assemble([text("ab", "length"), usage(), DONE])
    whole = assemble([text("a"), text("b", "length"), usage(), DONE])
    assert judge(whole, expected) == Verdict(Outcome.EQUAL)


def sampled(*, words: int, tokens: int, finish: str = "length", ids: int = 0) -> Answer:
    choice = {"index": 0, "delta": {"content": "w " * words}, "finish_reason": finish}
    events = [chunk(choices=[choice | {"token_ids": list(range(ids))}])]
    return assemble([*events, usage(completion_tokens=tokens), DONE])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (sampled(words=9, tokens=120), Outcome.EQUAL),
        (sampled(words=9, tokens=121), Outcome.WRONG),
        (sampled(words=9, tokens=120, finish="stop"), Outcome.WRONG),
    ],
)
def test_sampled_answer_is_compared_by_its_tokens(answer: Answer, outcome: Outcome) -> None:
    assert judge(answer, sampled(words=5, tokens=120), 120).outcome is outcome


def test_sampled_answer_with_ids_has_as_many_as_tokens() -> None:
    expected = sampled(words=5, tokens=120, ids=120)
    verdict = judge(sampled(words=9, tokens=120, ids=119), expected, 120)
    assert verdict == Verdict(Outcome.WRONG, "119 token ids, not 120")


MESSAGE = [
    typed("message_start", message={"id": "msg_1", "usage": {"input_tokens": 3}}),
    typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello "}),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "you"}),
    typed("content_block_stop", index=0),
    typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}),
    typed("message_stop"),
]


def test_messages_stream_is_compared_by_its_blocks() -> None:
    expected = assemble(MESSAGE)
    assert expected.ends == 1
    one = typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello you"})
    other_id = MESSAGE[0].replace(b"msg_1", b"msg_2")
    whole = assemble([other_id, MESSAGE[1], one, *MESSAGE[4:]])
    assert judge(whole, expected) == Verdict(Outcome.EQUAL)
    for events in (MESSAGE[:2] + MESSAGE[1:], MESSAGE[:1] + MESSAGE, MESSAGE[:-1]):
        assert judge(assemble(events), expected).outcome is Outcome.WRONG


def test_messages_stream_may_end_by_its_own_error_event() -> None:
    error = typed("error", error={"type": "api_error", "message": "m"})
    verdict = judge(assemble([*MESSAGE[:3], error]), assemble(MESSAGE))
    assert verdict == Verdict(Outcome.ERROR, "api_error")


def responses(*texts: str, item: str = "msg_a", done: bool = True) -> list[bytes]:
    tokens = {"input_tokens": 3, "output_tokens": 5}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": {"id": "resp_1", "status": "in_progress"}}),
        *(
            ("response.output_text.delta", {"item_id": item, "output_index": 0, "delta": one})
            for one in texts
        ),
        ("response.completed", {"response": {"id": "resp_1", "usage": tokens}}),
    ]
    numbered = [typed(kind, sequence_number=n, **more) for n, (kind, more) in enumerate(events)]
    return [*numbered, DONE] if done else numbered


def test_responses_stream_is_compared_by_its_items() -> None:
    expected = assemble(responses("Hello ", "you"))
    assert expected.usage == (3, 5)
    whole = assemble(responses("Hello you", item="msg_b"))
    assert judge(whole, expected) == Verdict(Outcome.EQUAL)
    assert judge(assemble(responses("Hello")), expected).outcome is Outcome.WRONG
    assert judge(assemble(responses("Hello you", done=False)), expected).outcome is Outcome.WRONG


def test_responses_stream_counts_its_events_and_keeps_an_items_id() -> None:
    expected = assemble(responses("a", "b"))
    events = responses("a", "b")
    gap = assemble([events[0], *events[2:]])
    assert "sequence_number 2, not 1" in judge(gap, expected).words
    events[2] = events[2].replace(b"msg_a", b"msg_b")
    assert "item 0 changed within the answer" in judge(assemble(events), expected).words
