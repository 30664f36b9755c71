"""A regenerated answer goes on where the client's answer stopped, or ends honestly."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.continuation import Diverged
from app.continuation.sent_text import SentText
from app.continuation.verification import Verification
from tests.app.continuation.streams import (
    NAMES,
    assemble,
    data_of,
    endpoint_of,
    event_of,
    recorded,
    second_run,
    set_text,
    split,
    text_at,
    text_path,
)

CHAT = "/v1/chat/completions"
RANDOM = st.randoms(use_true_random=False)


def groups(events: list[bytes], random: Random) -> list[bytes]:
    """Return events as reads of a socket give them: one or several whole events at a time."""
    out, start = [], 0
    while start < len(events):
        end = start + random.randrange(1, 5)
        out.append(b"".join(events[start:end]))
        start = end
    return out


def received(endpoint: str, events: list[bytes], random: Random) -> SentText:
    sent = SentText(endpoint)
    for chunk in groups(events, random):
        sent.add(chunk)
    return sent


def continued(sent: SentText, stream: bytes, random: Random) -> bytes:
    """Return what the client gets of a second run."""
    verification = Verification(sent)
    out = b"".join(verification.pass_on(each) for each in groups(split(stream), random))
    assert verification.caught_up
    return out


def check_any_cut(name: str, random: Random) -> None:
    endpoint, events = endpoint_of(name), recorded(name)
    sent = events[: random.randrange(len(events) + 1)]
    second = second_run(endpoint, events, random)
    out = continued(received(endpoint, sent, random), second, random)
    assert assemble(endpoint, b"".join(sent) + out) == assemble(endpoint, b"".join(events))


def check_two_deaths(name: str, random: Random) -> None:
    endpoint, events = endpoint_of(name), recorded(name)
    first = events[: random.randrange(len(events) + 1)]
    sent = received(endpoint, first, random)
    out = split(continued(sent, second_run(endpoint, events, random), random))
    out = out[: random.randrange(len(out) + 1)]
    for each in groups(out, random):
        sent.add(each)
    out.append(continued(sent, second_run(endpoint, events, random), random))
    assert assemble(endpoint, b"".join(first + out)) == assemble(endpoint, b"".join(events))


def check_changed_character(name: str, random: Random) -> None:
    endpoint, events = endpoint_of(name), recorded(name)
    texts = [i for i, event in enumerate(events) if has_text(event)]
    changed = random.choice(texts)
    sent = events[: random.randrange(changed + 1, len(events) + 1)]
    sent[changed] = with_changed_character(sent[changed], random)
    verification = Verification(received(endpoint, sent, random))
    passed = b""
    for each in split(second_run(endpoint, events, random)):
        try:
            passed += verification.pass_on(each)
        except Diverged:
            break
    else:
        pytest.fail("the difference was not seen")
    assert passed == b""


def has_text(event: bytes) -> bool:
    data = data_of(event)
    return isinstance(data, dict) and text_path(data) is not None


def with_changed_character(event: bytes, random: Random) -> bytes:
    data = data_of(event)
    path = text_path(data)
    assert path is not None
    text = text_at(data, path)
    at = random.randrange(len(text))
    set_text(data, path, text[:at] + chr(ord(text[at]) + 1) + text[at + 1 :])
    return event_of(data)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(random=RANDOM)
def test_any_cut_gives_the_undisturbed_answer(name: str, random: Random) -> None:
    check_any_cut(name, random)


@settings(max_examples=10)
@given(name=st.sampled_from(NAMES), random=RANDOM)
def test_a_second_death_gives_the_undisturbed_answer(name: str, random: Random) -> None:
    check_two_deaths(name, random)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(random=RANDOM)
def test_a_changed_character_diverges_and_passes_nothing(name: str, random: Random) -> None:
    check_changed_character(name, random)


@pytest.mark.slow
@settings(max_examples=400)
@given(name=st.sampled_from(NAMES), random=RANDOM)
def test_many_cuts_deaths_and_changes(name: str, random: Random) -> None:
    check_any_cut(name, random)
    check_two_deaths(name, random)
    check_changed_character(name, random)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_has_nothing_gets_every_byte(name: str) -> None:
    verification = Verification(SentText(endpoint_of(name)))
    assert verification.caught_up
    assert [verification.pass_on(event) for event in recorded(name)] == recorded(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_stream_goes_on_with_the_bytes_of_the_first(name: str) -> None:
    events = recorded(name)
    for at in range(len(events) + 1):
        sent = SentText(endpoint_of(name))
        sent.add(b"".join(events[:at]))
        verification = Verification(sent)
        out = b"".join(verification.pass_on(event) for event in events)
        assert out == b"".join(events[at:])


@pytest.mark.parametrize("name", NAMES)
def test_events_after_the_seam_may_come_with_comments_and_other_line_ends(name: str) -> None:
    events = recorded(name)
    sent = SentText(endpoint_of(name))
    sent.add(b"".join(events[: len(events) // 2]))
    verification = Verification(sent)
    second = b": keep-alive\n\n".join(events).replace(b"\n", b"\r\n")
    out = verification.pass_on(second).replace(b"\r\n", b"\n").replace(b": keep-alive\n\n", b"")
    assert out == b"".join(events[len(events) // 2 :])


# Runs that vLLM itself wrote in other chunks.
PAIRS = [
    ("chat_reasoning", "chat_reasoning.coalesced"),
    ("chat_tool_auto", "chat_tool_auto.coalesced"),
    ("chat_two_choices_reasoning", "chat_two_choices_reasoning.coalesced"),
    ("completions_two_choices", "completions_two_choices.coalesced"),
    ("responses_plain", "responses_plain.again"),
]


@pytest.mark.parametrize(("one", "other"), [*PAIRS, *((b, a) for a, b in PAIRS)])
def test_another_run_of_vllm_goes_on_at_every_event(one: str, other: str) -> None:
    endpoint, events = endpoint_of(one), recorded(one)
    for at in range(len(events) + 1):
        sent = SentText(endpoint)
        sent.add(b"".join(events[:at]))
        verification = Verification(sent)
        out = b"".join(verification.pass_on(event) for event in recorded(other))
        assert assemble(endpoint, b"".join(events[:at]) + out) == assemble(
            endpoint, b"".join(events)
        )


def chunk(*choices: dict[str, Any], run: int = 1, **members: Any) -> bytes:
    named = [
        {"index": i, "logprobs": None, "finish_reason": None, **choice}
        for i, choice in enumerate(choices)
    ]
    data = {"id": f"chatcmpl-{run}", "created": run, "choices": named, **members}
    return event_of(data)


def content(text: str, *, run: int = 1, **members: Any) -> bytes:
    return chunk({"delta": {"content": text}, **members}, run=run)


def verification_of(*events: bytes) -> Verification:
    sent = SentText(CHAT)
    for event in events:
        sent.add(event)
    return Verification(sent)


def test_the_event_at_the_seam_is_cut_between_characters() -> None:
    verification = verification_of(content("床前明"))
    assert verification.pass_on(content("床前", run=2)) == b""
    assert verification.pass_on(content("明月光", run=2)) == content("月光")
    assert verification.pass_on(content("，", run=2)) == content("，")


def test_a_cut_keeps_unknown_members() -> None:
    verification = verification_of(content("ab"))
    second = chunk({"delta": {"content": "abc"}, "more": None}, run=2, usage={"x": 1.5}, seen=[])
    kept = json.loads(
        chunk({"delta": {"content": "c"}, "more": None}, usage={"x": 1.5}, seen=[])[6:]
    )
    assert json.loads(verification.pass_on(second)[6:]) == kept


def test_a_tool_call_that_was_sent_keeps_its_id() -> None:
    def call(run: int, arguments: str, *, name: str | None) -> bytes:
        function = {"arguments": arguments, **({"name": name} if name else {})}
        header = {"id": f"call-{run}", "type": "function"}
        return chunk(
            {"delta": {"tool_calls": [{"index": 0, **header, "function": function}]}}, run=run
        )

    verification = verification_of(call(1, '{"a', name="f"))
    out = verification.pass_on(call(2, '{"a": 1', name="f"))
    assert [c["delta"] for c in json.loads(out[6:])["choices"]] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1'}}]}
    ]
    assert verification.pass_on(call(2, "}", name=None)) == call(1, "}", name=None)


def test_a_choice_that_is_ahead_waits_for_the_other() -> None:
    def of(index: int, text: str, run: int) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "logprobs": None}
        return event_of({"id": f"chatcmpl-{run}", "created": run, "choices": [choice]})

    verification = verification_of(of(0, "a", 1), of(1, "xyz", 1))
    assert verification.pass_on(of(0, "ab", 2)) == b""
    assert verification.pass_on(of(1, "xy", 2)) == b""
    assert not verification.caught_up
    assert verification.pass_on(of(1, "z", 2)) == of(0, "b", 1)
    assert verification.caught_up


LOGPROBS = {"content": [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -0.5}]}


def test_logprobs_are_compared_by_their_tokens() -> None:
    near = {"content": [{"token": "a", "logprob": -0.2500001}, {"token": "b", "logprob": -0.5}]}
    verification = verification_of(content("ab", logprobs=LOGPROBS))
    assert verification.pass_on(content("ab", logprobs=near)) == b""
    assert verification.caught_up
    other = {"content": [{"token": "ab", "logprob": -0.25}]}
    with pytest.raises(Diverged, match="differs in logprobs of choice 0"):
        verification_of(content("ab", logprobs=LOGPROBS)).pass_on(content("ab", logprobs=other))


@pytest.mark.parametrize(
    ("member", "value"),
    [("logprobs", LOGPROBS), ("token_ids", [5, 6]), ("logprobs", {"tokens": ["ab"]})],
)
def test_what_is_listed_per_token_cannot_be_cut(member: str, value: Any) -> None:
    verification = verification_of(content("a"))
    with pytest.raises(Diverged, match=f"cannot align {member}"):
        verification.pass_on(content("ab", **{member: value}))


@pytest.mark.parametrize("name", ["chat_logprobs", "chat_token_ids", "completions_logprobs"])
def test_listed_tokens_go_on_where_chunks_are_equal(name: str) -> None:
    events = recorded(name)
    for at in range(len(events) + 1):
        sent = SentText(endpoint_of(name))
        sent.add(b"".join(events[:at]))
        assert Verification(sent).pass_on(b"".join(events)) == b"".join(events[at:])


@pytest.mark.parametrize(
    "second",
    [
        content("a") + b"data: [DONE]\n\n",
        content("a", finish_reason="stop"),
        content("a") + event_of({"error": {"message": "no memory", "code": 500}}),
        content("ab", more={"annotations": 1}),
        chunk({"delta": {"reasoning": "ab"}}),
        chunk({"delta": {"role": "assistant", "content": "ab"}}),
        content("ab!!"),
        b"data: {broken\n\n",
        b"data: [1, 2]\n\n",
        b'data: {"choices":[{"index":"one","delta":{"x":1}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[7]}}]}\n\n',
        b'data: {"choices":7}\n\n',
        b'data: {"x":' + b"[" * 5000 + b"}\n\n",
        b'data: {"x":9999999999999999999999999}\n\n',
        b"data: \xff\n\n",
    ],
)
def test_an_answer_that_ends_or_differs_or_cannot_be_read_diverges(second: bytes) -> None:
    verification = verification_of(content("ab"), content("cd"))
    with pytest.raises(Diverged):
        verification.pass_on(second)
    assert not verification.caught_up


def test_an_unreadable_first_run_diverges() -> None:
    verification = verification_of(content("ab"), b"data: {broken\n\n")
    assert not verification.caught_up
    with pytest.raises(Diverged, match="could not be read: DecodeError"):
        verification.pass_on(content("ab"))


def test_the_message_contains_nothing_of_the_answer() -> None:
    verification = verification_of(content("my secret"))
    with pytest.raises(Diverged) as diverged:
        verification.pass_on(content("my other secret"))
    assert (
        str(diverged.value) == "the answer differs in content of choice 0, in part 1 after 0 bytes"
    )


@pytest.mark.parametrize("endpoint", ["/v1/messages", "/v1/responses"])
def test_an_error_event_before_the_seam_diverges(endpoint: str) -> None:
    name = endpoint.removeprefix("/v1/") + "_plain"
    sent = SentText(endpoint)
    sent.add(b"".join(recorded(name)[:6]))
    verification = Verification(sent)
    assert verification.pass_on(b"".join(recorded(name)[:3])) == b""
    with pytest.raises(Diverged):
        verification.pass_on(event_of({"type": "error", "error": {"message": "no"}}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def with_changed_member(data: Any, value: Any, random: Random) -> Any:
    """Return JSON with another value somewhere."""
    if not isinstance(data, dict | list) or not data or random.random() < 0.2:
        return value
    key = random.choice(list(data) if isinstance(data, dict) else range(len(data)))
    changed = data.copy()
    changed[key] = with_changed_member(data[key], value, random)
    return changed


@settings(max_examples=60)
@given(
    name=st.sampled_from([*NAMES, "chat_logprobs", "completions_logprobs"]),
    value=JSON,
    random=RANDOM,
)
def test_events_of_any_shape_raise_nothing_else(name: str, value: Any, random: Random) -> None:
    endpoint, events = endpoint_of(name), recorded(name)
    at = random.randrange(len(events) - 1)
    line = json.dumps(with_changed_member(data_of(events[at]), value, random)).encode()
    odd = b"data: " + line + b"\n\n"
    strange = SentText(endpoint)
    strange.add(b"".join([*events[:at], odd, *events[at + 1 : -2]]))
    sent = SentText(endpoint)
    sent.add(b"".join(events[: at + 1]))
    for known, second in ((strange, events), (sent, [*events[:at], odd, *events[at + 1 :]])):
        verification = Verification(known)
        try:
            verification.pass_on(b"".join(second))
        except Diverged:
            continue
        assert verification.caught_up
