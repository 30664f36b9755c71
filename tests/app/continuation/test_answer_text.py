"""Where the text of a client ends among the token IDs of its answer."""

import json
from collections.abc import Sequence

import pytest

from app.continuation import Answer
from app.continuation.answer_text import IdDecoder, cut_at_text

TOKENS = {1: "a", 2: "<", 3: " "}


class Decoder(IdDecoder):
    """Decodes three tokens, without an engine."""

    def __init__(self) -> None:
        pass

    async def decode(self, ids: Sequence[int]) -> str | None:
        return "".join(TOKENS[token] for token in ids)


def chunk(ids: Sequence[int], text: str) -> bytes:
    delta = {"content": text} if text else {}
    choice = {"delta": delta, "logprobs": None, "finish_reason": None, "token_ids": list(ids)}
    value = {"id": "x", "created": 1, "choices": [choice]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def recorded(*events: bytes) -> Answer:
    answer = Answer(1000)
    answer.add(b'data: {"id":"x","created":1,"choices":[],"prompt_token_ids":[9]}\n\n')
    for event in events:
        answer.add(event)
    answer.flush()
    return answer


async def test_ids_without_text_are_cut() -> None:
    answer = recorded(chunk([1], "a"), chunk([2], ""))
    assert await cut_at_text(answer, Decoder(), always=True, all_shown=False)
    assert list(answer.ids) == [1]


async def test_ids_without_text_stay_where_the_client_has_seen_them() -> None:
    answer = recorded(chunk([1], "a"), chunk([2], ""))
    assert not await cut_at_text(answer, Decoder(), always=True, all_shown=True)
    assert list(answer.ids) == [1, 2]


async def test_token_that_a_tool_parser_may_hold_back_is_not_taken_for_an_equal_one() -> None:
    """Of two tokens "<" it sends the first and holds back the second: both texts end alike."""
    answer = recorded(chunk([1], "a"), chunk([2], ""), chunk([2], "<"))
    assert not await cut_at_text(answer, Decoder(), always=True, all_shown=False)


@pytest.mark.parametrize("text", ["a", " "])
async def test_text_that_ends_once_or_in_blanks_is_aligned(text: str) -> None:
    token = next(token for token, found in TOKENS.items() if found == text)
    answer = recorded(chunk([2], "<"), chunk([3], " "), chunk([token], text))
    assert await cut_at_text(answer, Decoder(), always=True, all_shown=False)
    assert list(answer.ids) == [2, 3, token]
