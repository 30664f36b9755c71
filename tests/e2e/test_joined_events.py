"""Joined events: two divisions of one answer are equal, two answers are not."""

from tests.e2e.deployment import ROOT
from tests.e2e.joined_events import drop_marks, join_events, sort_choices
from tests.e2e.test_wire import VOLATILE

RECORDED = ROOT / "tests" / "app" / "continuation" / "recorded"

HEAD = b'data: {"object":"chat.completion.chunk","model":"demo","choices":[{"index":0,'
ROLE = HEAD + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'


def event(text: bytes, *tokens: bytes, end: bytes = b"null") -> bytes:
    entries = b",".join(b'{"token":"%b","logprob":-0.5,"bytes":[1]}' % one for one in tokens)
    logprobs = b'{"content":[%b]}' % entries if tokens else b"null"
    return HEAD + b'"delta":{%b},"logprobs":%b,"finish_reason":%b}]}' % (text, logprobs, end)


def stream(*events: bytes) -> bytes:
    return b"".join(one + b"\n\n" for one in (ROLE, *events, b"data: [DONE]"))


def test_divisions_of_one_answer_are_equal() -> None:
    apart = stream(
        event(b'"reasoning":"1"', b"1"),
        event(b"", b"</think>"),
        event(b'"content":"a\\""', b"a"),
        event(b'"content":"b"', b"b"),
        event(b"", b"end", end=b'"stop"'),
    )
    together = stream(
        event(b'"content":"a\\"","reasoning":"1"', b"1", b"</think>", b"a"),
        event(b'"content":"b"', b"b", b"end", end=b'"stop"'),
    )
    assert join_events(apart) == join_events(together)
    assert join_events(apart).count(b"data: ") == 3, "role, answer and end"


def test_what_vllm_sent_a_quick_and_a_late_reader_is_equal() -> None:
    streams = [RECORDED / f"chat_reasoning{late}.sse" for late in ("", ".coalesced")]
    quick, late = (VOLATILE.sub(b"", stream.read_bytes()) for stream in streams)
    assert quick.count(b"data: ") > late.count(b"data: ")
    assert join_events(quick) == join_events(late)


def test_divisions_of_one_completion_are_equal_and_two_are_not() -> None:
    quick = VOLATILE.sub(b"", (RECORDED / "completions_plain.sse").read_bytes())
    first, second, rest = quick.split(b"\n\n", 2)
    late = first.replace(b'"text":" there"', b'"text":" there was"') + b"\n\n" + rest
    assert b'"text":" was"' in second
    assert join_events(late) == join_events(quick)
    assert join_events(quick).count(b"data: ") < late.count(b"data: ")
    assert join_events(quick.replace(b" was", b" is", 1)) != join_events(quick)


def test_choices_that_overtake_each_other_are_equal_in_their_own_order_alone() -> None:
    one, two = event(b'"content":"1"'), event(b'"content":"2"', end=b'"stop"')
    other = two.replace(b'"index":0', b'"index":1')
    late = event(b'"content":"12"', end=b'"stop"')
    streams = [stream(other, one, two), stream(one, other, two), stream(late, other)]
    assert len({join_events(sort_choices(each)) for each in streams}) == 1
    assert sort_choices(streams[0]) == stream(one, two, other)
    turned = stream(two, one, other)
    assert join_events(sort_choices(turned)) != join_events(sort_choices(streams[0]))


def test_text_and_logprobs_are_compared_whole() -> None:
    one = stream(event(b'"content":"12"', b"1", b"2"))
    for other in (
        stream(event(b'"content":"1"', b"1")),
        stream(event(b'"content":"12"', b"1", b"3")),
        stream(event(b'"content":"1"', b"1"), event(b'"content":"3"', b"2")),
        stream(event(b'"reasoning":"12"', b"1", b"2")),
        stream(event(b'"content":"12"')),
    ):
        assert join_events(other) != join_events(one)


def test_events_after_the_end_and_thoughts_after_text_stay_apart() -> None:
    ended = stream(event(b'"content":"1"', end=b'"stop"'), event(b'"content":"2"'))
    turned = stream(event(b'"content":"1"'), event(b'"reasoning":"2"'))
    assert join_events(ended) == ended
    assert join_events(turned) == turned


def test_marks_are_dropped_wherever_they_are() -> None:
    marked = stream(event(b'"content":"a"', b"<think>", b"1", b"</think>", b"a", b"</think>"))
    assert drop_marks(marked) == stream(event(b'"content":"a"', b"1", b"a"))
