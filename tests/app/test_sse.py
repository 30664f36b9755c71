"""Splitting a stream into events, and errors as events."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app import sse
from app.errors import Dialect, EngineFailed, GatewayError
from app.sse import (
    COMMENT,
    EVENT_BYTES,
    as_event,
    read_data,
    split_events,
    whole_events,
    with_data,
)

EVENT = b'data: {"x": "\xc3\xa9"}\n\n'


def feed(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    """Send pieces through `whole_events` as the relay does; return what went and what waits."""
    sent: list[bytes] = []
    held = b""
    for piece in pieces:
        data, held = whole_events(held + piece)
        sent.append(data)
    return sent, held


class TestWholeEvents:
    @pytest.mark.parametrize(
        ("data", "sent", "held"),
        [
            (b"", b"", b""),
            (EVENT, EVENT, b""),
            (EVENT * 3, EVENT * 3, b""),
            (EVENT[:-1], b"", EVENT[:-1]),
            (EVENT[:-2], b"", EVENT[:-2]),
            (EVENT + b"data: x", EVENT, b"data: x"),
            (EVENT + b"data: x\n", EVENT, b"data: x\n"),
            (EVENT + b"data: x\ndata: y\n\n: ping", EVENT + b"data: x\ndata: y\n\n", b": ping"),
            (b": ping\n\n", b": ping\n\n", b""),
            (b"\n", b"", b"\n"),
            (b"\n\n", b"\n\n", b""),
            (b"\n\nx", b"\n\n", b"x"),
        ],
    )
    def test_bytes_go_up_to_the_last_whole_event(
        self, data: bytes, sent: bytes, held: bytes
    ) -> None:
        assert whole_events(data) == (sent, held)

    def test_event_over_the_limit_is_forwarded_incomplete(self) -> None:
        data = b"data: " + b"x" * EVENT_BYTES
        assert whole_events(data) == (data, b"")

    def test_event_up_to_the_limit_is_held_back(self) -> None:
        data = b"x" * EVENT_BYTES
        assert whole_events(data) == (b"", data)

    def test_held_back_bytes_are_bounded(self) -> None:
        sent, held = feed([b"x" * 60_000] * 40)
        assert len(held) <= EVENT_BYTES
        assert len(b"".join(sent) + held) == 60_000 * 40

    def test_stream_with_crlf_lines_is_forwarded(self) -> None:
        """The standard allows CRLF; such a server's events must come one by one as well."""
        event = b"data: x\r\n\r\n"
        sent, _ = feed([event, event, event])
        assert sent == [event, event, event]

    @given(
        events=st.lists(
            st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"") + b"\n\n")
            | st.sampled_from([EVENT, b": ping\n\n", b"\n\n", b"data: [DONE]\n\n"]),
            max_size=6,
        ),
        tail=st.sampled_from([b"", b"data: cut", b"data: cut\n"]),
        cuts=st.lists(st.integers(0, 120), max_size=8),
    )
    @example(events=[EVENT] * 3, tail=b"", cuts=[len(EVENT) - 1, len(EVENT) + 1])
    @settings(max_examples=200, deadline=None)
    def test_any_split_gives_the_same_bytes_in_whole_events(
        self, events: list[bytes], tail: bytes, cuts: list[int]
    ) -> None:
        stream = b"".join(events) + tail
        places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        sent, held = feed([stream[start:end] for start, end in pairwise(places)])
        assert b"".join(sent) + held == stream
        assert all(piece.endswith(b"\n\n") for piece in sent if piece)
        assert b"\n\n" not in held

    @given(
        sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
        cuts=st.lists(st.integers(0, 400), max_size=8),
    )
    @settings(max_examples=100, deadline=None)
    def test_only_an_event_over_the_limit_is_split(self, sizes: list[int], cuts: list[int]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sse, "EVENT_BYTES", 16)
            stream = b"".join(b"x" * size + b"\n\n" for size in sizes)
            places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
            sent, held = feed([stream[start:end] for start, end in pairwise(places)])
        assert b"".join(sent) + held == stream
        assert all(p.endswith(b"\n\n") or len(p) > 16 for p in sent if p)
        assert len(held) <= 16


class TestSplitEvents:
    @given(st.lists(st.sampled_from([b"data: x", b"\n", b"\r\n", b"\n\n", b": c"]), max_size=12))
    @settings(max_examples=200, deadline=None)
    def test_no_byte_is_lost(self, pieces: list[bytes]) -> None:
        events = b"".join(pieces)
        found = split_events(events)
        assert b"".join(found) == events
        assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in found[:-1])

    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    def test_data_is_read_and_replaced(self, end: bytes) -> None:
        event = end.join([b"event: x", b"data: {", b"data:}", b"", b""])
        assert read_data(event) == b"{\n}"
        assert with_data(event, b"[]") == end.join([b"event: x", b"data: []", b"", b""])

    def test_a_carriage_return_alone_ends_a_line(self) -> None:
        assert read_data(b"data: {}\rid: 7\n\n") == b"{}"


def error_event(error: GatewayError, dialect: Dialect) -> bytes:
    return as_event(error.body(dialect), dialect)


class TestErrorEvent:
    def test_openai_clients_get_one_data_event(self) -> None:
        error = EngineFailed("the engine failed")
        event = error_event(error, Dialect.OPENAI)
        assert event.startswith(b"data: {")
        assert event.endswith(b"}\n\n")
        assert json.loads(event.removeprefix(b"data: ")) == {
            "error": {
                "message": "the engine failed",
                "type": "server_error",
                "param": None,
                "code": "engine_failed",
            }
        }

    def test_anthropic_clients_get_an_event_of_type_error(self) -> None:
        event = error_event(EngineFailed("the engine failed"), Dialect.ANTHROPIC)
        first, second, *rest = event.split(b"\n")
        assert first == b"event: error"
        assert rest == [b"", b""]
        assert json.loads(second.removeprefix(b"data: ")) == {
            "type": "error",
            "error": {"type": "api_error", "message": "the engine failed"},
        }

    @pytest.mark.parametrize("dialect", Dialect)
    @given(message=st.text(st.characters(exclude_categories=["Cs"])))
    @settings(max_examples=100, deadline=None)
    def test_any_message_makes_exactly_one_event(self, dialect: Dialect, message: str) -> None:
        event = error_event(EngineFailed(message), dialect)
        assert event.count(b"\n\n") == 1
        assert whole_events(EVENT + event) == (EVENT + event, b"")
        assert b"[DONE]" not in event or "[DONE]" in message


class TestAsEvent:
    """A refusal by the engine after a keep-alive comment has started the stream."""

    @pytest.mark.parametrize(
        "body",
        [
            b'{"error": {"message": "no"}}',
            b'{\n  "error": {\n    "message": "no"\n  }\n}\n',
            b'{\r\n"error":\r\n\r\n{"message":"no"}}',
            b'{"error":\r{"message":\r\r"no"}}',
        ],
    )
    @pytest.mark.parametrize("dialect", Dialect)
    def test_json_of_several_lines_becomes_one_line_of_data(
        self, body: bytes, dialect: Dialect
    ) -> None:
        *name, data = as_event(body, dialect).removesuffix(b"\n\n").split(b"\n")
        assert name == ([b"event: error"] if dialect is Dialect.ANTHROPIC else [])
        assert b"\r" not in data
        assert json.loads(data.removeprefix(b"data: ")) == {"error": {"message": "no"}}


def test_a_keep_alive_is_a_whole_event_without_data() -> None:
    assert whole_events(COMMENT) == (COMMENT, b"")
    assert all(line.startswith(b":") or not line for line in COMMENT.split(b"\n"))
