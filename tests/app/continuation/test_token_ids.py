"""The client of a recorded stream gets the bytes of a direct call."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.continuation.token_ids import without_token_ids
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
from tests.app.continuation.streams import NAMES, recorded


def cut(chunks: Sequence[bytes]) -> bytes:
    return b"".join(map(without_token_ids, chunks))


@settings(max_examples=25)
@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    said=answers(),
    widths=WIDTHS,
    sizes=WIDTHS,
    options=st.fixed_dictionaries({"usage": st.booleans(), "continuous_usage": st.booleans()}),
)
def test_any_grouping_gives_the_bytes_of_a_direct_call(
    endpoint: str, said: str, widths: list[int], sizes: list[int], options: dict[str, bool]
) -> None:
    options["continuous_usage"] &= options["usage"]
    made = made_by(endpoint, body_of(said))
    direct = events_of(endpoint, made, ids=False, widths=widths, **options)
    with_ids = events_of(endpoint, made, ids=True, widths=widths, **options)
    assert cut(grouped(with_ids, sizes)) == b"".join(direct)


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
    found = cut(grouped(events, [size]))
    assert b'token_ids":[' not in found
    assert found.count(b'"token_ids":null') == found.count(b'"delta"') - 1
    for event in expected:
        start = event.find(b'"token_ids":[')
        assert (event[:start] if start >= 0 else event) in found
    assert found.count(b"\n\n") == len(expected)


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


def test_comment_passes() -> None:
    assert without_token_ids(b": keep-alive\n\n") == b": keep-alive\n\n"
