"""Metering a stream on its way: a client gets the bytes of a direct call, and usage is exact."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sse import whole_events
from app.usage.stream_meter import MAX_HELD, StreamMeter
from app.usage.token_usage import Usage
from tests.fakes.chat_stream import FINGERPRINT, chat_stream, chunk

DONE = b"data: [DONE]\n\n"
# What a model may write that looks like what the meter looks for.
LOOKALIKES = [
    '"usage":{"prompt_tokens":99,"completion_tokens":99}',
    '{"choices":[],"usage":{"prompt_tokens":99},"system_fingerprint":"x"}',
    '"finish_reason":"stop"',
    '"finish_reason":"',
    '\\"finish_reason\\":\\"stop\\"',
    "usage",
    "finish_reason",
    "system_fingerprint",
    '"system_fingerprint":"x"}',
    "}",
    "\n\ndata: [DONE]\n\n",
    "\r\n\r\n",
    "[DONE]",
]
TEXT = st.text(max_size=8) | st.sampled_from(LOOKALIKES)
CUTS = st.lists(st.floats(0, 1), max_size=12)


def event(data: object) -> bytes:
    """One event, as vLLM writes it."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def named(name: str, **data: object) -> bytes:
    """One event of the Responses or the Messages API."""
    return f"event: {name}\n".encode() + event({"type": name, **data})


def usage_chunk(usage: dict[str, int], fingerprint: str | None = FINGERPRINT) -> bytes:
    """The usage chunk that vLLM sends before the end if requested."""
    data = json.loads(chunk("demo", {})[6:])
    data |= {"choices": [], "usage": usage}
    if fingerprint is not None:
        data["system_fingerprint"] = fingerprint
    return event(data)


def cut(stream: bytes, places: Sequence[float]) -> list[bytes]:
    """Cut a stream at these fractions of its length."""
    ends = [0, *sorted(int(place * len(stream)) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(ends) if start != end]


def carry(meter: StreamMeter, pieces: Sequence[bytes]) -> list[bytes]:
    """Carry a stream as the relay does; return what the client gets for each piece and the end."""
    out: list[bytes] = []
    held = b""
    for piece in pieces:
        data, held = whole_events(held + piece)
        out.append(meter.pass_on(data) if data else b"")
    rest = meter.pass_on(held) if held else b""
    return [*out, rest + meter.flush()]


def meter_for(
    choices: int = 1, *, withhold: bool = True, fingerprint: str | None = None
) -> StreamMeter:
    meter = StreamMeter(withhold=withhold, one_choice=choices == 1)
    meter.fingerprint = fingerprint
    return meter


class TestWithholding:
    """Only the gateway requested the usage chunk."""

    @given(
        model=TEXT,
        choices=st.integers(1, 4),
        cuts=CUTS,
        known=st.booleans(),
        crlf=st.booleans(),
    )
    @settings(max_examples=200, deadline=None)
    def test_the_client_gets_the_bytes_of_a_direct_call_and_usage_is_exact(
        self, model: str, choices: int, cuts: list[float], known: bool, crlf: bool
    ) -> None:
        direct = b"".join(chat_stream(model, choices=choices, usage=False))
        engine = b"".join(chat_stream(model, choices=choices, usage=True))
        if crlf:
            direct, engine = (each.replace(b"\n", b"\r\n") for each in (direct, engine))
        meter = meter_for(choices, fingerprint=FINGERPRINT if known else None)
        assert b"".join(carry(meter, cut(engine, cuts))) == direct
        assert meter.usage == Usage(3, 2 * choices)
        assert meter.fingerprint == FINGERPRINT

    def test_usage_before_a_line_that_a_carriage_return_ends_is_found(self) -> None:
        meter = meter_for()
        engine = usage_chunk({"prompt_tokens": 3, "completion_tokens": 2})
        assert carry(meter, [engine[:-2] + b"\rid: 7\n\n"]) == [b"", b""]
        assert meter.usage == Usage(3, 2)

    @given(
        texts=st.lists(st.tuples(st.integers(0, 2), TEXT), max_size=6),
        last=st.lists(TEXT, min_size=1, max_size=3),
        reason=st.sampled_from(["stop", "length", "tool_calls", "abort"]),
        fingerprint=st.text(min_size=1, max_size=6) | st.sampled_from(LOOKALIKES),
        cuts=CUTS,
        known=st.booleans(),
    )
    @settings(max_examples=200, deadline=None)
    def test_generated_text_is_not_mistaken_for_usage_or_an_end(
        self,
        texts: list[tuple[int, str]],
        last: list[str],
        reason: str,
        fingerprint: str,
        cuts: list[float],
        known: bool,
    ) -> None:
        """A finishing chunk may hold text as well, and of several choices any may end first."""
        begun = [chunk("demo", {"content": text}, index=index) for index, text in texts]
        ended = list(enumerate(last))
        fingerprint = fingerprint.encode(errors="replace").decode()
        mark = json.dumps(fingerprint, ensure_ascii=False)
        engine = [chunk("demo", {"content": text}, reason, index=n) for n, text in ended]
        direct = [
            each[:-3] + f',"system_fingerprint":{mark}'.encode() + each[-3:] for each in engine
        ]
        reported = usage_chunk({"prompt_tokens": 7, "completion_tokens": 5}, fingerprint)
        meter = meter_for(len(last), fingerprint=fingerprint if known else None)
        pieces = cut(b"".join([*begun, *engine, reported, DONE]), cuts)
        assert b"".join(carry(meter, pieces)) == b"".join([*begun, *direct, DONE])
        assert meter.usage == Usage(7, 5)

    def test_unrequested_usage_chunk_is_withheld(self) -> None:
        reported = usage_chunk({"prompt_tokens": 3, "completion_tokens": 2})
        assert carry(meter_for(), [reported, DONE]) == [b"", DONE, b""]

    def test_single_choice_delays_only_the_finishing_chunk_by_one(self) -> None:
        events = chat_stream("demo", usage=True)
        out = carry(meter_for(fingerprint="of-another-engine"), events)
        *begun, finish, _ = chat_stream("demo", usage=False)
        assert out == [*begun, b"", finish, DONE, b""]

    def test_several_choices_delay_nothing_with_a_known_fingerprint(self) -> None:
        events = chat_stream("demo", choices=3, usage=True)
        out = carry(meter_for(3, fingerprint=FINGERPRINT), events)
        *direct, done = chat_stream("demo", choices=3, usage=False)
        assert out == [*direct, b"", done, b""]

    def test_several_choices_keep_their_order_without_a_fingerprint(self) -> None:
        events = chat_stream("demo", choices=2, usage=True)
        direct = chat_stream("demo", choices=2, usage=False)
        out = carry(meter_for(2), events)
        first_end = next(n for n, e in enumerate(direct) if b'"finish_reason":"stop"' in e)
        assert out[:first_end] == direct[:first_end]
        assert out[first_end:-3] == [b""] * (len(direct) - 1 - first_end)
        assert out[-3:] == [b"".join(direct[first_end:-1]), DONE, b""]

    def test_an_engine_of_another_fingerprint_is_learned(self) -> None:
        meter = meter_for(2, fingerprint="before")
        carry(meter, chat_stream("demo", choices=2, usage=True))
        assert meter.fingerprint == FINGERPRINT

    def test_an_engine_without_a_fingerprint_gets_none(self) -> None:
        begun, finish = chunk("demo", {"content": "x"}), chunk("demo", {}, "stop")
        reported = usage_chunk({"prompt_tokens": 3, "completion_tokens": 2}, None)
        meter = meter_for()
        assert b"".join(carry(meter, [begun, finish, reported, DONE])) == begun + finish + DONE
        assert meter.usage == Usage(3, 2)

    def test_absence_of_a_fingerprint_is_learned(self) -> None:
        """Else a restarted engine without a fingerprint would keep the previous one for ever."""
        finishes = [chunk("demo", {}, "stop", index=index) for index in (0, 1)]
        events = [*finishes, usage_chunk({"prompt_tokens": 3}, None), DONE]
        first = meter_for(2, fingerprint="before")
        carry(first, events)
        second = meter_for(2, fingerprint=first.fingerprint)
        assert carry(second, events) == [*finishes, b"", DONE, b""]

    def test_existing_fingerprint_is_not_inserted_again(self) -> None:
        finish = chunk("demo", {}, "stop", system_fingerprint="there")
        reported = usage_chunk({"prompt_tokens": 3, "completion_tokens": 2})
        for choices in (1, 2):
            meter = meter_for(choices, fingerprint=FINGERPRINT)
            assert b"".join(carry(meter, [finish, reported, DONE])) == finish + DONE

    def test_text_containing_the_field_name_is_not_a_fingerprint(self) -> None:
        finish = chunk("demo", {"content": "system_fingerprint"}, "length")
        reported = usage_chunk({"prompt_tokens": 3, "completion_tokens": 2})
        direct = chunk(
            "demo", {"content": "system_fingerprint"}, "length", system_fingerprint=FINGERPRINT
        )
        assert b"".join(carry(meter_for(), [finish, reported, DONE])) == direct + DONE

    @pytest.mark.parametrize("choices", [1, 2])
    def test_fingerprint_is_not_inserted_into_a_partial_event(self, choices: int) -> None:
        """An event over the limit of `whole_events` arrives in parts; so does a truncated one."""
        event = chunk("demo", {"content": "x"}, "stop", index=1, more={"a": 1, "b": "c"})
        beginning = event[: event.index(b',"b"')]
        meter = meter_for(choices, fingerprint=FINGERPRINT)
        assert b"".join(carry(meter, [beginning])) == beginning

    @pytest.mark.parametrize(
        "fingerprint", ['say "hi"', "a\\b", "模型", "a\nb", "}", '"finish_reason":"']
    )
    def test_fingerprint_is_inserted_as_json(self, fingerprint: str) -> None:
        reported = usage_chunk({"prompt_tokens": 3}, fingerprint)
        finish, done, _ = carry(meter_for(), [chunk("demo", {}, "stop") + reported, DONE])
        assert json.loads(finish[6:])["system_fingerprint"] == fingerprint
        assert list(json.loads(finish[6:]))[-1] == "system_fingerprint"
        assert done == DONE

    def test_usage_next_to_choices_is_forwarded_and_read(self) -> None:
        """Some servers tell the usage in the chunk that finishes; that is more than usage."""
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        events = [chunk("demo", {"content": "x"}), chunk("demo", {}, "stop", usage=usage), DONE]
        meter = meter_for()
        assert b"".join(carry(meter, events)) == b"".join(events)
        assert meter.usage == Usage(3, 2)

    @pytest.mark.parametrize(
        "odd",
        [
            {"choices": [], "usage": None},
            {"choices": [], "usage": []},
            {"choices": [], "usage": 5},
            {"choices": None, "usage": {"prompt_tokens": 1}},
            {"choices": {}, "usage": {"prompt_tokens": 1}},
            {"usage": {"prompt_tokens": 1}},
            {"choices": [], "x": {"usage": {"prompt_tokens": 1}}},
            {"choices": [], "usage": {"prompt_tokens": 1}, "system_fingerprint": 5},
            [{"choices": [], "usage": {"prompt_tokens": 1}}],
        ],
    )
    def test_other_chunks_are_forwarded(self, odd: object) -> None:
        assert b"".join(carry(meter_for(), [event(odd), DONE])) == event(odd) + DONE

    def test_a_usage_chunk_may_be_written_with_blanks(self) -> None:
        data = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        spaced = b"data: " + json.dumps(data).encode() + b"\n\n"
        meter = meter_for()
        assert carry(meter, [spaced]) == [b"", b""]
        assert meter.usage == Usage(3, 2)


class TestWithoutAUsageChunk:
    """Held events come out in any case, in order and as the engine sent them."""

    @given(choices=st.integers(1, 3), cuts=CUTS, crlf=st.booleans())
    @settings(max_examples=100, deadline=None)
    def test_a_stream_without_usage_passes_unchanged(
        self, choices: int, cuts: list[float], crlf: bool
    ) -> None:
        stream = b"".join(chat_stream("demo", choices=choices, usage=False))
        if crlf:
            stream = stream.replace(b"\n", b"\r\n")
        meter = meter_for(choices)
        assert b"".join(carry(meter, cut(stream, cuts))) == stream
        assert meter.usage is None

    @pytest.mark.parametrize("choices", [1, 2])
    def test_a_stream_that_breaks_off_passes_unchanged(self, choices: int) -> None:
        events = chat_stream("demo", choices=choices, usage=True)[:-2]
        for count in range(len(events) + 1):
            stream = b"".join(events[:count])
            for tail in (b"", b"data: {", events[-1][:-1]):
                meter = meter_for(choices)
                assert b"".join(carry(meter, [stream + tail])) == stream + tail
                assert meter.usage is None

    def test_an_error_of_the_engine_follows_what_was_held(self) -> None:
        error = event({"error": {"message": "out of memory", "code": 500}})
        events = [chunk("demo", {}, "stop"), error, DONE]
        assert b"".join(carry(meter_for(), events)) == b"".join(events)

    def test_flushed_bytes_are_not_returned_again(self) -> None:
        meter = meter_for()
        finish = chunk("demo", {}, "stop")
        assert meter.pass_on(finish) == b""
        assert meter.flush() == finish
        assert meter.flush() == b""
        assert meter.pass_on(DONE) == DONE

    @pytest.mark.parametrize("choices", [1, 2])
    def test_withheld_bytes_are_bounded_and_forwarded_in_order(self, choices: int) -> None:
        begun = chunk("demo", {"content": "x" * 5000}, index=1)
        events = [chunk("demo", {}, "stop"), *[begun] * 200]
        meter = meter_for(choices)
        fed, out = 0, b""
        for each in events:
            fed += len(each)
            out += meter.pass_on(each)
            assert fed - len(out) <= MAX_HELD
        assert fed > 3 * MAX_HELD
        assert b"".join(events).startswith(out)
        assert len(out) > MAX_HELD
        assert out + meter.flush() == b"".join(events)

    def test_events_are_withheld_up_to_the_bound(self) -> None:
        meter = meter_for(2)
        finish = chunk("demo", {}, "stop")
        filler = b": " + b"x" * (MAX_HELD - len(finish) - 4) + b"\n\n"
        assert meter.pass_on(finish) + meter.pass_on(filler) == b""
        assert meter.pass_on(b":\n\n") == finish + filler + b":\n\n"

    def test_finishing_chunk_after_the_bound_is_withheld_again(self) -> None:
        meter = meter_for(2)
        finish = chunk("demo", {}, "stop")
        big = b": " + b"x" * MAX_HELD + b"\n\n"
        assert meter.pass_on(finish + big) == finish + big
        assert meter.pass_on(finish) == b""
        marked = meter.pass_on(usage_chunk({"prompt_tokens": 1}))
        assert json.loads(marked[6:])["system_fingerprint"] == FINGERPRINT


class TestPassing:
    """The client requested usage, or the dialect always reports it."""

    @given(
        texts=st.lists(TEXT, max_size=4),
        choices=st.integers(1, 3),
        usage=st.booleans(),
        cuts=CUTS,
        crlf=st.booleans(),
    )
    @settings(max_examples=100, deadline=None)
    def test_every_byte_passes_and_usage_is_read(
        self, texts: list[str], choices: int, usage: bool, cuts: list[float], crlf: bool
    ) -> None:
        events = [chunk("demo", {"content": text}) for text in texts]
        events += chat_stream("demo", choices=choices, usage=usage)
        stream = b"".join(events)
        if crlf:
            stream = stream.replace(b"\n", b"\r\n")
        meter = meter_for(choices, withhold=False)
        out = carry(meter, cut(stream, cuts))
        assert b"".join(out) == stream
        assert meter.usage == (Usage(3, 2 * choices) if usage else None)

    def test_nothing_is_withheld(self) -> None:
        events = chat_stream("demo", choices=2, usage=True)
        assert carry(meter_for(2, withhold=False), events) == [*events, b""]

    def test_continuous_usage_ends_with_the_total(self) -> None:
        """Each choice reports its own tokens along the way; the usage chunk reports the sum."""
        events = []
        for index in (0, 1):
            for count in (1, 2, 3):
                usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}
                events.append(chunk("demo", {"content": "x"}, index=index, usage=usage))
        meter = meter_for(2, withhold=False)
        assert carry(meter, events) == [*events, b""]
        assert meter.usage == Usage(9, 3)
        carry(meter, [usage_chunk({"prompt_tokens": 9, "completion_tokens": 6})])
        assert meter.usage == Usage(9, 6)

    def test_null_usage_is_ignored(self) -> None:
        events = [chunk("demo", {"content": "x"}, usage=None)] * 3
        meter = meter_for(withhold=False)
        assert carry(meter, events) == [*events, b""]
        assert meter.usage is None

    @given(cuts=CUTS, withhold=st.booleans())
    @settings(max_examples=50, deadline=None)
    def test_messages_stream_reports_prompt_first_and_output_last(
        self, cuts: list[float], withhold: bool
    ) -> None:
        begun = {"input_tokens": 4, "cache_read_input_tokens": 8, "output_tokens": 0}
        ended = {**begun, "output_tokens": 7}
        delta = {"type": "text_delta", "text": '"usage":{"output_tokens":99}'}
        stop = {"stop_reason": "end_turn", "stop_sequence": None}
        events = [
            named("message_start", message={"id": "m", "content": [], "usage": begun}),
            named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            named("content_block_delta", index=0, delta=delta),
            named("content_block_stop", index=0),
            named("message_delta", delta=stop, usage=ended),
            named("message_stop"),
        ]
        meter = meter_for(withhold=withhold)
        assert b"".join(carry(meter, cut(b"".join(events), cuts))) == b"".join(events)
        assert meter.usage == Usage(12, 7, 8)

    def test_messages_delta_without_a_prompt_count_keeps_the_first(self) -> None:
        meter = meter_for(withhold=False)
        usage = {"input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 1}
        meter.pass_on(named("message_start", message={"usage": usage}))
        meter.pass_on(named("message_delta", delta={}, usage={"output_tokens": 7}))
        assert meter.usage == Usage(6, 7)

    @pytest.mark.parametrize("last", ["response.completed", "response.incomplete"])
    @given(cuts=CUTS)
    @settings(max_examples=25, deadline=None)
    def test_responses_stream_reports_usage_at_its_end(self, last: str, cuts: list[float]) -> None:
        usage = {
            "input_tokens": 11,
            "input_tokens_details": {"cached_tokens": 8},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 18,
        }
        begun: dict[str, Any] = {"id": "r", "metadata": {"usage": "x"}, "usage": None}
        events = [
            named("response.created", response=begun, sequence_number=0),
            named("response.output_text.delta", delta='"usage":{"input_tokens":99}'),
            named(last, response={**begun, "usage": usage}),
        ]
        meter = meter_for(withhold=False)
        assert b"".join(carry(meter, cut(b"".join(events), cuts))) == b"".join(events)
        assert meter.usage == Usage(11, 7, 8, 5)

    def test_data_of_several_lines_is_one_text(self) -> None:
        lines = b'data: {"x":[],\ndata:"usage":{"prompt_tokens":3,\ndata:  "completion_tokens":2}}'
        for end in (b"\n\n", b"\r\n\r\n"):
            meter = meter_for(withhold=False)
            stream = b"id: 7\nevent: x\n" + lines + end
            assert meter.pass_on(stream) == stream
            assert meter.usage == Usage(3, 2)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[],"usage":{"prompt_tokens":3},"system_fingerprint":"\xff"}',
        b'{"choices":[],"usage":{"\xff":3}}',
        b'{"choices":[],"usage":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"choices":' + b"[" * 100_000 + b',"usage":{}}',
    ],
    ids=["fingerprint of no text", "name of no text", "deep", "deep and cut"],
)
def test_unparsable_event_is_forwarded(data: bytes) -> None:
    for withhold in (True, False):
        stream = b"data: " + data + b"\n\n"
        assert b"".join(carry(meter_for(withhold=withhold), [stream, DONE])) == stream + DONE


@given(
    pieces=st.lists(
        st.sampled_from(
            [b'"usage":{', b'"finish_reason":"', b"data: ", b'{"choices":', b"}", b"\n", b"\r\n"]
        )
        | st.binary(max_size=4)
    ),
    withhold=st.booleans(),
    choices=st.integers(1, 2),
)
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_are_forwarded(pieces: list[bytes], withhold: bool, choices: int) -> None:
    stream = b"".join(pieces)
    meter = meter_for(choices, withhold=withhold)
    assert b"".join(carry(meter, pieces)) == stream


class TestEstimates:
    """Estimates for a stream that ended early."""

    def test_prompt_of_an_empty_stream_is_estimated(self) -> None:
        assert meter_for().so_far(100, 0) == Usage(100, 0, estimated=True)
        assert meter_for().so_far(64, 0) == Usage(64, 0, estimated=True)

    @pytest.mark.parametrize("withhold", [True, False])
    @pytest.mark.parametrize("count", [1, 2, 5])
    @pytest.mark.parametrize("together", [True, False])
    def test_every_event_but_the_first_is_a_token(
        self, withhold: bool, count: int, together: bool
    ) -> None:
        events = [chunk("demo", {"content": "x"})] * count
        meter = meter_for(withhold=withhold)
        carry(meter, [b"".join(events)] if together else events)
        assert meter.so_far(100, 0) == Usage(100, count - 1, estimated=True)

    def test_first_event_of_a_completion_counts_as_a_token(self) -> None:
        meter = StreamMeter(opens_without_token=False)
        carry(meter, [chunk("demo", {"content": "x"})] * 3)
        assert meter.so_far(100, 0) == Usage(100, 3, estimated=True)

    @pytest.mark.parametrize("choices", [1, 2])
    def test_tokens_in_logprobs_are_counted_however_many_an_event_has(self, choices: int) -> None:
        listed = [{"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": []}] * 400
        listed[0] = {**listed[0], "top_logprobs": [{"token": "b", "logprob": -2.5, "bytes": [98]}]}
        chat = event(
            {"choices": [{"delta": {"content": "a" * 400}, "logprobs": {"content": listed}}]}
        )
        lists = {
            "tokens": [","] * 400,
            "token_logprobs": [None, *[-1.5] * 399],
            "top_logprobs": [{}],
        }
        completion = event({"choices": [{"text": "," * 400, "logprobs": lists}]})
        response = named("response.output_text.delta", delta="a" * 400, logprobs=listed)
        for data in (chat, completion, response):
            meter = StreamMeter(one_choice=choices == 1, has_logprobs=True)
            carry(meter, [data] * choices)
            assert meter.so_far(10, len(data) * choices).completion == 400 * choices

    def test_tokens_that_were_counted_by_their_ids_are_not_estimated(self) -> None:
        meter = meter_for()
        data = chunk("demo", {"content": "x" * 4000})
        carry(meter, [data])
        assert meter.so_far(10, len(data), 7) == Usage(10, 7, estimated=True)

    @pytest.mark.parametrize("together", [True, False])
    def test_events_with_crlf_lines_are_counted_alike(self, together: bool) -> None:
        events = [chunk("demo", {"content": "x"}).replace(b"\n", b"\r\n")] * 5
        meter = meter_for()
        carry(meter, [b"".join(events)] if together else events)
        assert meter.so_far(100, 0) == Usage(100, 4, estimated=True)

    def test_reported_usage_counts_if_higher_than_the_estimate(self) -> None:
        usage = {
            "prompt_tokens": 30,
            "completion_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"reasoning_tokens": 5},
        }
        meter = meter_for(withhold=False)
        carry(meter, [chunk("demo", {"content": "x"}, usage=usage)])
        assert meter.so_far(100, 0) == Usage(30, 20, 16, 5, estimated=True)

    def test_tokens_after_the_last_reported_usage_are_counted(self) -> None:
        usage = {"input_tokens": 30, "output_tokens": 0}
        meter = meter_for(withhold=False)
        carry(meter, [named("message_start", message={"usage": usage})])
        carry(meter, [named("content_block_delta", delta={"text": "x"})] * 4)
        assert meter.so_far(10, 0) == Usage(30, 4, estimated=True)

    def test_estimate_does_not_change_reported_usage(self) -> None:
        meter = meter_for(withhold=False)
        carry(meter, [usage_chunk({"prompt_tokens": 3, "completion_tokens": 2})])
        meter.so_far(100, 0)
        assert meter.usage == Usage(3, 2)
