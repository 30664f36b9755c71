"""A regenerated answer goes on where the client's answer stopped, or ends honestly."""

from random import Random

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
@settings(max_examples=8)
@given(random=RANDOM)
def test_any_cut_gives_the_undisturbed_answer(name: str, random: Random) -> None:
    check_any_cut(name, random)


@settings(max_examples=25)
@given(name=st.sampled_from(NAMES), random=RANDOM)
def test_a_second_death_gives_the_undisturbed_answer(name: str, random: Random) -> None:
    check_two_deaths(name, random)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(random=RANDOM)
def test_a_changed_character_diverges_and_passes_nothing(name: str, random: Random) -> None:
    check_changed_character(name, random)


@pytest.mark.slow
@settings(max_examples=2000)
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
