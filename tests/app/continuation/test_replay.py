"""A replayed stream is one answer: its request, and the seam of its two halves."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.continuation.answer import Answer, Tail, without_token_ids
from app.continuation.replay import (
    MAX_HIDDEN,
    NotReplayed,
    Splice,
    end_candidates,
    is_end,
    replay_members,
)
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
from tests.app.continuation.streams import assemble, data_of, split
from tests.fakes.tokens import THINK, THINK_END, decode

PLENTY = 10_000
OLD: dict[str, Any] = {"id": "chatcmpl-old", "created": 1}
NEW: dict[str, Any] = {"id": "chatcmpl-new", "created": 2}
USAGE: dict[str, Any] = {"usage": True, "continuous_usage": True}


def record(events: list[bytes], max_tokens: int = PLENTY) -> Answer:
    answer = Answer(max_tokens)
    answer.add(b"".join(events))
    answer.flush()
    return answer


def after(ids: int, prompt: bytes | None = b"5,6") -> Answer:
    """Return the record of a stream that has so many IDs."""
    answer = Answer(PLENTY)
    answer.prompt = prompt
    answer.ids.extend(range(100, 100 + ids))
    return answer


class TestMembers:
    @staticmethod
    def of(
        endpoint: str, answer: Answer, default_limit: int | None = None, **fields: Any
    ) -> dict[str, Any] | None:
        """Return the members that change, decoded."""

        def value(name: str) -> bytes:
            return json.dumps(fields[name]).encode() if name in fields else b""

        members = replay_members(endpoint, answer, value, default_limit)
        return members and {name: json.loads(encoded) for name, encoded in members.items()}

    def test_chat_gets_the_ids_in_addition_to_its_messages(self) -> None:
        assert self.of(CHAT, after(2)) == {
            "kv_transfer_params": {"prompt_token_ids": [5, 6, 100, 101]},
            "return_token_ids": True,
        }

    def test_completion_gets_the_ids_as_its_prompt(self) -> None:
        assert self.of(COMPLETIONS, after(2), max_tokens=10) == {
            "prompt": [5, 6, 100, 101],
            "max_tokens": 8,
            "return_token_ids": True,
        }

    @pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
    def test_answer_without_ids_repeats_the_prompt(self, endpoint: str) -> None:
        members = self.of(endpoint, after(0), max_tokens=3)
        assert members is not None
        assert members["max_tokens"] == 3
        assert [5, 6] in (members.get("prompt"), *members.get("kv_transfer_params", {}).values())

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    @pytest.mark.parametrize(("limit", "left"), [(10, 7), (4, 1), (3, None), (2, None)])
    def test_output_limit_is_reduced(self, name: str, limit: int, left: int | None) -> None:
        members = self.of(CHAT, after(3), **{name: limit})
        assert (members and members[name]) == left

    def test_both_limits_are_reduced(self) -> None:
        members = self.of(CHAT, after(3), max_tokens=10, max_completion_tokens=8)
        assert members is not None
        assert (members["max_tokens"], members["max_completion_tokens"]) == (7, 5)

    @pytest.mark.parametrize(("least", "left"), [(10, 7), (3, 0), (2, 0), (0, 0)])
    def test_minimum_is_reduced_to_nothing(self, least: int, left: int) -> None:
        members = self.of(CHAT, after(3), min_tokens=least)
        assert members is not None
        assert members["min_tokens"] == left

    def test_limit_of_another_type_is_reduced_as_the_engine_reads_it(self) -> None:
        """vLLM's pydantic model takes a number in a string, and a whole float."""
        for limit in ("10", 10.0):
            members = self.of(CHAT, after(3), max_tokens=limit)
            assert members is not None
            assert members["max_tokens"] == 7

    @pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
    def test_completion_without_a_limit_ends_where_the_default_says(
        self, fields: dict[str, None]
    ) -> None:
        members = self.of(COMPLETIONS, after(6), **fields)
        assert members is not None
        assert members["max_tokens"] == 10
        assert self.of(COMPLETIONS, after(15), **fields) is not None
        assert self.of(COMPLETIONS, after(16), **fields) is None

    @pytest.mark.parametrize("fields", [{}, {"max_tokens": None, "max_completion_tokens": None}])
    def test_chat_without_a_limit_has_none(self, fields: dict[str, None]) -> None:
        members = self.of(CHAT, after(100), **fields)
        assert members is not None
        assert not {"max_tokens", "max_completion_tokens"} & members.keys()

    @pytest.mark.parametrize(
        ("fields", "left"),
        [({}, 17), ({"max_tokens": None}, 17), ({"max_tokens": 50}, 47), ({"max_tokens": 3}, None)],
    )
    def test_models_default_is_reduced_where_the_request_has_no_limit(
        self, fields: dict[str, Any], left: int | None
    ) -> None:
        """The generation config of a model may have one."""
        members = self.of(CHAT, after(3), default_limit=20, **fields)
        assert (members and members["max_tokens"]) == left

    def test_default_of_completions_is_not_the_models(self) -> None:
        members = self.of(COMPLETIONS, after(3), default_limit=20)
        assert members is not None
        assert members["max_tokens"] == 13


class TestEnd:
    def test_last_id_is_tried_first_and_one_always_remains(self) -> None:
        assert list(end_candidates(Tail(4, 7, "x"))) == [7, 6, 5]
        assert list(end_candidates(Tail(4, 5, "x"))) == [5]

    def test_long_chunk_is_not_searched_to_its_beginning(self) -> None:
        found = end_candidates(Tail(0, 1000, "x"))
        assert (len(found), found[0]) == (MAX_HIDDEN, 1000)

    @pytest.mark.parametrize(
        ("text", "ends"),
        [("a lamp", True), ("p", False), ("lamp\ufffd", False), ("lamp</think>", False)],
    )
    def test_end_is_recognized_by_its_last_characters(self, text: str, ends: bool) -> None:
        assert is_end(Tail(0, 3, "a lamp"), text) is ends

    def test_short_text_is_compared_whole(self) -> None:
        assert is_end(Tail(0, 1, "灯"), "灯")
        assert not is_end(Tail(0, 1, "灯"), "塔")


def text_end(answer: Answer) -> int:
    """Return after how many IDs the text of the client ends, as asking the tokenizer finds it."""
    if answer.tail is None:
        return 0
    return next(
        end
        for end in end_candidates(answer.tail)
        if is_end(answer.tail, decode(answer.ids[max(end - 16, 0) : end]))
    )


def thought_of(answer: Answer) -> int:
    """Return the tokens of an answer's thought, without its marks."""
    ids = list(answer.ids)
    if THINK not in ids:
        return 0
    end = ids.index(THINK_END) if THINK_END in ids else len(ids)
    return end - ids.index(THINK) - 1


@settings(max_examples=25)
@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    said=answers(),
    widths=WIDTHS,
    sizes=WIDTHS,
    until=st.integers(1, 60),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
)
@example(CHAT, "one two", [1], [100], 2, b"\r\n")
def test_two_halves_are_one_answer(
    endpoint: str, said: str, widths: list[int], sizes: list[int], until: int, line_end: bytes
) -> None:
    """Cut anywhere, with any number of tokens in a chunk, in the thought and in a character."""
    body = body_of(said, max_tokens=1000)
    made = made_by(endpoint, body)
    whole = b"".join(events_of(endpoint, made, ids=False, **USAGE, **OLD))
    first = events_of(endpoint, made, ids=True, widths=widths, **USAGE, **OLD)[:until]
    answer = record(first)
    if answer.finished:
        return
    answer.cut(text_end(answer))
    again = continue_generation(endpoint, body, answer)
    splice = Splice(answer, thought_tokens=thought_of(answer), with_ids=False)
    chunks = grouped(events_of(endpoint, again, ids=True, widths=widths, **USAGE, **NEW), sizes)
    rest = b"".join(splice.pass_on(chunk.replace(b"\n", line_end)) for chunk in chunks)
    both = without_ids(endpoint, made, widths, until) + rest.replace(line_end, b"\n")
    joined, expected = assemble(endpoint, both), assemble(endpoint, whole)
    assert joined[0] == expected[0]
    assert (joined[1][-1], joined[2]) == (expected[1][-1], expected[2])
    assert b'token_ids":[' not in both


def continue_generation(endpoint: str, body: dict[str, Any], answer: Answer) -> Any:
    """Return what another engine writes after an answer's IDs."""
    members = replay_members(endpoint, answer, lambda name: json.dumps(body.get(name)).encode())
    assert members is not None
    changes = {name: json.loads(value) for name, value in members.items()}
    return made_by(endpoint, {**body, **changes})


def without_ids(endpoint: str, made: Any, widths: list[int], until: int) -> bytes:
    """Return what a client has of the first engine's events."""
    events = events_of(endpoint, made, ids=True, widths=widths, **USAGE, **OLD)[:until]
    return without_token_ids(b"".join(events))


class TestSplice:
    BODY = body_of("<think>one two</think>three four", max_tokens=100)

    def halves(
        self, endpoint: str, events: int, **options: Any
    ) -> tuple[Answer, list[bytes], list[bytes]]:
        """Return the record of a stream that was cut after some events, and both halves."""
        made = made_by(endpoint, self.BODY)
        first = events_of(endpoint, made, ids=True, **OLD, **options)[:events]
        answer = record(first)
        answer.cut(text_end(answer))
        again = continue_generation(endpoint, self.BODY, answer)
        return answer, first, events_of(endpoint, again, ids=True, **NEW, **options)

    @pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
    def test_id_and_creation_stay(self, endpoint: str) -> None:
        answer, _, second = self.halves(endpoint, 4)
        splice = Splice(answer, thought_tokens=2, with_ids=False)
        for event in split(b"".join(splice.pass_on(event) for event in second))[:-1]:
            data = data_of(event)
            assert (data["id"], data["created"]) == ("chatcmpl-old", 1)

    def test_role_is_not_sent_again(self) -> None:
        answer, _, second = self.halves(CHAT, 4)
        splice = Splice(answer, thought_tokens=2, with_ids=False)
        assert splice.pass_on(second[0]) == b""
        assert b'"role"' not in b"".join(splice.pass_on(event) for event in second[1:])

    def test_prompt_of_the_replay_is_not_shown(self) -> None:
        for with_ids in (False, True):
            answer, _, second = self.halves(COMPLETIONS, 4)
            splice = Splice(answer, thought_tokens=0, with_ids=with_ids)
            first = data_of(splice.pass_on(second[0]))["choices"][0]
            assert first["prompt_token_ids"] is None
            assert bool(first["token_ids"]) is with_ids

    def test_ids_go_on_for_a_client_that_asked_for_them(self) -> None:
        answer, first, second = self.halves(CHAT, 4)
        splice = Splice(answer, thought_tokens=2, with_ids=True)
        both = [*first, *(splice.pass_on(event) for event in second)]
        ids = [
            token
            for event in split(b"".join(both))[:-1]
            for choice in data_of(event)["choices"]
            for token in choice.get("token_ids") or ()
        ]
        assert ids == made_by(CHAT, self.BODY).choices[0][0]

    # One event for the role and one for each of <think>, one, two, </think>, three, four.
    @pytest.mark.parametrize("events", [1, 2, 3, 4, 5, 6, 7])
    def test_usage_is_that_of_one_answer(self, events: int) -> None:
        whole = events_of(CHAT, made_by(CHAT, self.BODY), ids=False, usage=True)
        answer, _, second = self.halves(CHAT, events, usage=True)
        splice = Splice(answer, thought_tokens=thought_of(answer), with_ids=False)
        rest = split(b"".join(splice.pass_on(event) for event in second))
        assert data_of(rest[-2])["usage"] == data_of(whole[-2])["usage"]
        assert rest[-1] == b"data: [DONE]\n\n"

    def test_cached_tokens_are_those_of_the_prompt(self) -> None:
        answer, _, second = self.halves(CHAT, 4)
        splice = Splice(answer, thought_tokens=0, with_ids=False)
        splice.pass_on(second[0])
        event = (
            b'data: {"id":"x","created":2,"choices":[],"usage":{"prompt_tokens":6,"total_tokens":8,'
            b'"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":%d}}}\n\n'
        )
        for cached, shown in ((6, 3), (2, 2), (0, 0)):
            usage = data_of(splice.pass_on(event % cached))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == shown
            assert usage["prompt_tokens"] == 3
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    def test_text_that_looks_like_usage_is_unchanged(self) -> None:
        answer, _, second = self.halves(CHAT, 4)
        splice = Splice(answer, thought_tokens=0, with_ids=False)
        splice.pass_on(second[0])
        text = '"usage":{"prompt_tokens":6} "created":2 "id":"x"'
        chunk = {"id": "x", "created": 2, "choices": [{"index": 0, "delta": {"content": text}}]}
        event = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
        assert data_of(splice.pass_on(event))["choices"] == chunk["choices"]

    @pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
    def test_engine_that_renders_the_messages_anew_is_refused(self, endpoint: str) -> None:
        answer, _, _ = self.halves(endpoint, 4)
        anew = events_of(endpoint, made_by(endpoint, self.BODY), ids=True, **NEW)
        with pytest.raises(NotReplayed):
            Splice(answer, thought_tokens=0, with_ids=False).pass_on(anew[0])

    @pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
    def test_engine_that_does_not_say_its_prompt_is_refused(self, endpoint: str) -> None:
        answer, _, _ = self.halves(endpoint, 4)
        again = continue_generation(endpoint, self.BODY, answer)
        silent = events_of(endpoint, again, ids=False, **NEW)
        with pytest.raises(NotReplayed):
            Splice(answer, thought_tokens=0, with_ids=False).pass_on(b"".join(silent))

    def test_answer_is_recorded_across_the_seam(self) -> None:
        """It may have to go on once more."""
        answer, _, second = self.halves(CHAT, 4)
        splice = Splice(answer, thought_tokens=2, with_ids=False)
        for event in second:
            splice.pass_on(event)
        answer.flush()
        assert list(answer.ids) == made_by(CHAT, self.BODY).choices[0][0]
        assert answer.finished
