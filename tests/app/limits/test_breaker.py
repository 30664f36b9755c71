"""The table of the circuit breaker."""

from itertools import product

from app.limits.breaker import TRANSITIONS, Event, State, after


def test_every_event_has_an_answer_in_every_state() -> None:
    assert set(TRANSITIONS) == set(product(State, Event))


def test_one_failed_call_opens_it() -> None:
    assert after(State.CLOSED, Event.CALL_FAILED) is State.OPEN


def test_only_a_probe_that_succeeded_closes_it() -> None:
    closing = [event for event in Event if after(State.OPEN, event) is State.CLOSED]
    assert closing == [Event.PROBE_SUCCEEDED]
