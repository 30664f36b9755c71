"""Reading usage from responses of every dialect, and from nothing that resembles it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.usage.token_usage import (
    HOLDS_USAGE,
    WINDOW_BYTES,
    Usage,
    estimate_prompt,
    read_usage,
    read_usage_in,
)

COUNTS = st.integers(0, 2**40)
# Texts that resemble usage; JSON's escapes distinguish them.
LOOKALIKES = st.sampled_from(
    ['"usage":{"prompt_tokens":99}', "usage", '{"usage": {"total_tokens": 99}}', '\\"usage\\":{']
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | LOOKALIKES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OTHERS = st.dictionaries(
    st.sampled_from(["id", "choices", "data", "model", "metadata", "usages", "a"]), VALUES
)


def usage_of(usage: object, **others: object) -> Usage | None:
    return read_usage(json.dumps({**others, "usage": usage}).encode())


class TestDialects:
    @pytest.mark.parametrize(
        ("usage", "read"),
        [
            pytest.param(
                {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
                Usage(3, 5),
                id="chat and completions",
            ),
            pytest.param(
                {
                    "prompt_tokens": 9,
                    "total_tokens": 16,
                    "completion_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 1},
                    "completion_tokens_details": {"reasoning_tokens": 6},
                },
                Usage(9, 7, 4, 6),
                id="chat with details",
            ),
            pytest.param(
                {
                    "prompt_tokens": 3,
                    "total_tokens": 8,
                    "completion_tokens": 5,
                    "prompt_tokens_details": None,
                    "completion_tokens_details": {"reasoning_tokens": None},
                },
                Usage(3, 5),
                id="details of null",
            ),
            pytest.param({"prompt_tokens": 6, "total_tokens": 6}, Usage(6, 0), id="embeddings"),
            pytest.param(
                {"prompt_tokens": 6, "total_tokens": 6, "completion_tokens": None},
                Usage(6, 0),
                id="completion of null",
            ),
            pytest.param({"total_tokens": 56}, Usage(56, 0), id="rerank"),
            pytest.param(
                {"type": "duration", "seconds": 3600}, Usage(36_000, 0), id="transcriptions"
            ),
            pytest.param(
                {"total_tokens": 56, "completion_tokens": 6}, Usage(50, 6), id="the rest of a total"
            ),
            pytest.param(
                {
                    "input_tokens": 11,
                    "input_tokens_details": {"cached_tokens": 8, "input_tokens_per_turn": []},
                    "output_tokens": 7,
                    "output_tokens_details": {"reasoning_tokens": 5, "tool_output_tokens": 0},
                    "total_tokens": 18,
                },
                Usage(11, 7, 8, 5),
                id="responses",
            ),
            pytest.param({"input_tokens": 11, "output_tokens": 7}, Usage(11, 7), id="messages"),
            pytest.param(
                {"input_tokens": 3, "cache_read_input_tokens": 8, "output_tokens": 7},
                Usage(11, 7, 8),
                id="messages, read from the cache",
            ),
            pytest.param(
                {
                    "input_tokens": 3,
                    "cache_creation_input_tokens": 5,
                    "cache_read_input_tokens": 8,
                    "output_tokens": 7,
                },
                Usage(16, 7, 8),
                id="messages, written to the cache as well",
            ),
            pytest.param(
                {
                    "input_tokens": 3,
                    "cache_creation_input_tokens": None,
                    "cache_read_input_tokens": None,
                    "output_tokens": 7,
                },
                Usage(3, 7),
                id="messages, caches of null",
            ),
            pytest.param({"output_tokens": 7}, Usage(0, 7), id="output alone"),
            pytest.param({"input_tokens": 7}, Usage(7, 0), id="input alone"),
        ],
    )
    def test_every_dialect_is_read(self, usage: dict[str, Any], read: Usage) -> None:
        assert usage_of(usage) == read
        assert not read.estimated

    @pytest.mark.parametrize("wrapper", ["response", "message"])
    def test_usage_of_a_stream_event_is_nested_one_level(self, wrapper: str) -> None:
        event = {"type": "x", wrapper: {"id": "r", "usage": {"input_tokens": 4}}}
        assert read_usage(json.dumps(event).encode()) == Usage(4, 0)

    @pytest.mark.parametrize("duration", [59.2, 60, "59.2"])
    def test_verbose_transcript_states_a_duration_instead(self, duration: object) -> None:
        transcript = {"duration": duration, "language": "en", "text": "…", "segments": []}
        assert read_usage(json.dumps(transcript).encode()) == Usage(600, 0)

    @pytest.mark.parametrize("duration", [None, -1, 1e300, 10**400, "long", "nan", {}, [60], True])
    def test_odd_duration_is_no_usage(self, duration: object) -> None:
        assert read_usage(json.dumps({"duration": duration}).encode()) is None

    def test_top_level_usage_takes_precedence(self) -> None:
        inner = {"usage": {"input_tokens": 99}}
        assert usage_of({"input_tokens": 4}, response=inner, message=inner) == Usage(4, 0)

    @given(prompt=COUNTS, completion=COUNTS, cached=COUNTS, reasoning=COUNTS, others=OTHERS)
    @settings(max_examples=100, deadline=None)
    def test_other_members_do_not_affect_usage(
        self, prompt: int, completion: int, cached: int, reasoning: int, others: dict[str, Any]
    ) -> None:
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
        read = usage_of(usage, **others)
        assert read == Usage(prompt, completion, min(cached, prompt), min(reasoning, completion))


class TestOddNumbers:
    @pytest.mark.parametrize(
        ("usage", "read"),
        [
            ({"prompt_tokens": -1, "completion_tokens": -1}, Usage(0, 0)),
            ({"total_tokens": 3, "completion_tokens": 5}, Usage(0, 5)),
            (
                {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}},
                Usage(3, 0, 3),
            ),
            ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": -5}}, Usage(3, 0)),
            (
                {
                    "input_tokens": 0,
                    "output_tokens": 2,
                    "output_tokens_details": {"reasoning_tokens": 5},
                },
                Usage(0, 2, 0, 2),
            ),
            ({"input_tokens": 3, "cache_read_input_tokens": -1, "output_tokens": 0}, Usage(2, 0)),
        ],
    )
    def test_parts_stay_within_their_whole_and_nothing_is_negative(
        self, usage: dict[str, Any], read: Usage
    ) -> None:
        assert usage_of(usage) == read

    @pytest.mark.parametrize(
        "usage",
        [
            None,
            {},
            {"completion_tokens": 5},
            {"prompt_tokens": "5"},
            {"prompt_tokens": True},
            {"prompt_tokens": 5.5},
            {"prompt_tokens": [5]},
            {"prompt_tokens": 5, "prompt_tokens_details": []},
            [],
            5,
            "5",
            False,
        ],
    )
    def test_invalid_counts_are_no_usage(self, usage: object) -> None:
        assert usage_of(usage) is None

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"null",
            b"[]",
            b'"usage"',
            b"{}",
            b'{"object":"list","data":[]}',
            b'{"error":{"message":"no","usage":{"prompt_tokens":5}}}',
            b'{"choices":[{"usage":{"prompt_tokens":5}}]}',
            b'{"usage":{"prompt_tokens":5}',
            b'{"usage":{"prompt_tokens":5}}}',
            b'{"response":null}',
            b'{"response":{"usage":null},"message":{}}',
            b'{"message":"in words"}',
            b"[DONE]",
            b"RIFF\x00\x01\xff",
        ],
    )
    def test_an_answer_without_usage_has_none(self, body: bytes) -> None:
        assert read_usage(body) is None


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage":{"prompt_tokens":3},"x":' + DEEP + b"}",
        b'{"usage":{"prompt_tokens":3,"x":' + DEEP + b"}}",
        DEEP,
    ],
)
def test_too_deeply_nested_response_has_no_usage(body: bytes) -> None:
    """An answer repeats what a client sent, a schema for instance, a few levels further down."""
    assert read_usage(body) is None


@pytest.mark.parametrize(
    "tokens", [2**53, 10**4000, -(10**4000)], ids=["inexact", "endless", "below"]
)
@pytest.mark.parametrize("name", ["prompt_tokens", "total_tokens", "output_tokens"])
def test_a_number_that_no_counter_can_hold_is_no_count(name: str, tokens: int) -> None:
    body = f'{{"usage":{{"{name}":{tokens}}}}}'.encode()
    assert read_usage(body) is None
    assert read_usage_in(body) is None


@given(
    body=st.binary(max_size=40)
    | st.tuples(
        st.sampled_from([b"", b'{"usage":{', b'{"usage":{"prompt_tokens":', b'{"message":{']),
        st.lists(
            st.sampled_from([b"{", b"}", b"[", b'"', b":", b",", b"1", b"a", b"\xff", b"null"])
        ),
    ).map(lambda pair: pair[0] + b"".join(pair[1]))
)
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_are_parsed_or_have_no_usage(body: bytes) -> None:
    for read in (read_usage(body), read_usage_in(body)):
        assert read is None or read.prompt >= 0


class TestMerging:
    def test_later_numbers_count_where_they_are_higher(self) -> None:
        assert Usage(10, 1, 4, 0).merged(Usage(0, 7, 0, 3)) == Usage(10, 7, 4, 3)

    def test_reported_usage_is_not_an_estimate(self) -> None:
        assert not Usage(1, 1, estimated=True).merged(Usage(1, 1)).estimated


@pytest.mark.parametrize(
    ("size", "longest", "tokens"),
    [(0, None, 0), (3, None, 0), (4, None, 1), (4000, None, 1000), (4000, 100, 100), (40, 100, 10)],
)
def test_prompt_estimate_is_four_bytes_per_token_up_to_the_model_length(
    size: int, longest: int | None, tokens: int
) -> None:
    assert estimate_prompt(size, longest) == tokens


class TestTail:
    """A batch of embeddings, of which only the end is looked at."""

    @given(
        prompt=COUNTS,
        cached=st.none() | COUNTS,
        after=st.dictionaries(st.sampled_from(["id", "x"]), st.text() | LOOKALIKES),
        cut=st.integers(0, 3000),
        blank=st.sampled_from([None, (", ", ": "), (",", ":")]),
    )
    @settings(max_examples=100, deadline=None)
    def test_tail_yields_the_same_usage_as_the_whole_body(
        self,
        prompt: int,
        cached: int | None,
        after: dict[str, str],
        cut: int,
        blank: tuple[str, str] | None,
    ) -> None:
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }
        data = [{"embedding": [0.125] * 600}]
        answer = {"object": "list", "data": data, "usage": usage, **after}
        whole = json.dumps(answer, separators=blank).encode()
        read = read_usage(whole)
        assert read is not None
        assert read_usage_in(whole[cut:]) == read

    def test_the_last_usage_counts(self) -> None:
        tail = b'"usage":{"total_tokens":1}},{"usage":{"total_tokens":2}}'
        assert read_usage_in(tail) == Usage(2, 0)

    @pytest.mark.parametrize(
        "tail",
        [
            b"",
            b"0.1,0.2]}]}",
            b'"usage":null}',
            b'"usage":{}}',
            b'"usage":{"prompt_tokens":5',
            b'"usage":{"prompt_tokens":5,"x":{}',
            b'"usage":{"prompt_tokens":"5"}}',
            b'"usage":{prompt_tokens}}',
            b'age":{"prompt_tokens":5}}',
            rb'"text":"\"usage\":{\"prompt_tokens\":5}"}',
        ],
    )
    def test_a_tail_without_a_whole_usage_has_none(self, tail: bytes) -> None:
        assert read_usage_in(tail) is None

    @given(tail=st.text(st.sampled_from('{}[]",: 1a'), max_size=80))
    @settings(max_examples=100, deadline=None)
    def test_arbitrary_tail_is_parsed_or_has_no_usage(self, tail: str) -> None:
        read = read_usage_in(b'"usage":{' + tail.encode())
        assert read is None or read.prompt >= 0

    def test_the_worst_tail_is_read_in_one_pass(self) -> None:
        """Every brace could begin the object: the time must not be its square, or worse."""
        assert read_usage_in(b'"usage":{' + b'{"a":1},' * (WINDOW_BYTES // 8)) is None


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        (b'"usage":{"prompt_tokens":1}', True),
        (b'"usage" : \n {', True),
        (b'"usage":null', False),
        (b'"usage":"{"', False),
        (b'"usages":{', False),
        (rb'"content":"\"usage\":{"', False),
        (b'"content":"usage","delta":{', False),
    ],
)
def test_only_an_object_of_that_name_holds_usage(text: bytes, holds: bool) -> None:
    assert bool(HOLDS_USAGE.search(text)) is holds


@given(text=st.text() | LOOKALIKES)
@settings(max_examples=100, deadline=None)
def test_generated_text_is_not_mistaken_for_usage(text: str) -> None:
    for ascii_only in (True, False):
        event = json.dumps({"content": text}, ensure_ascii=ascii_only)
        assert HOLDS_USAGE.search(event.encode(errors="replace")) is None
