"""Where the text of a client ends among the token IDs of its answer."""

import json
from collections.abc import Sequence

import pytest

from app.continuation import Answer
from app.continuation.answer_text import IdDecoder, cut_at_text, thinks_again

TOKENS = {
    1: "a", 2: "<", 3: " ", 4: "<think>", 5: "</think>", 6: "<|im_end|>", 7: "[THINK]",
    8: "[/THINK]", 9: "<seed:bos>",
}  # fmt: skip


class Decoder(IdDecoder):
    """Decodes a few tokens, without an engine."""

    def __init__(self) -> None:
        pass

    async def decode(self, ids: Sequence[int]) -> str | None:
        return "".join(TOKENS[token] for token in ids)


def chunk(ids: Sequence[int], text: str, kind: str = "content") -> bytes:
    delta = {kind: text} if text else {}
    choice = {"delta": delta, "logprobs": None, "finish_reason": None, "token_ids": list(ids)}
    value = {"id": "x", "created": 1, "choices": [choice]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def recorded(*events: bytes) -> Answer:
    answer = Answer(10_000)
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


def thought(ids: Sequence[int] = (4, 1, 5), text: str = "a") -> bytes:
    return chunk(ids, text, "reasoning")


@pytest.mark.parametrize("mark", [4, 6, 7, 9])
async def test_thought_or_turn_behind_the_first_thought_is_found(mark: int) -> None:
    text = [chunk([1], "a")] * 5000
    answer = recorded(thought(), *text, chunk([mark], ""), chunk([1], "a"))
    assert await thinks_again(answer, Decoder())


@pytest.mark.parametrize(
    "events",
    [
        [thought(), chunk([1], "a")],
        [thought([4, 1]), thought([1]), chunk([5], ""), chunk([1], "a")],
        [thought([7, 1]), chunk([8, 1], "a")],
        [thought([4, 1]), thought([1, 4])],  # the first thought has not ended
        [chunk([4, 1], "<think>a"), chunk([5, 4], "</think><think>")],  # no parser: all is text
    ],
)
async def test_one_thought_is_no_second_one(events: list[bytes]) -> None:
    assert not await thinks_again(recorded(*events), Decoder())


async def test_ids_that_no_engine_decodes_may_be_a_second_thought() -> None:
    class Silent(Decoder):
        async def decode(self, ids: Sequence[int]) -> str | None:
            return None

    assert await thinks_again(recorded(thought(), chunk([1], "a")), Silent())
    assert not await thinks_again(recorded(chunk([1], "a")), Silent())


async def test_reasoning_behind_text_is_a_second_thought() -> None:
    answer = recorded(thought(), chunk([1], "a"), thought())
    assert answer.replay_obstacle == "second_thought"
