"""The state table of an engine: no transition outside of it is possible."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineState
from engines.lifecycle import TRANSITIONS, Event, IllegalTransition, after

S = EngineState
PAIRS = list(itertools.product(EngineState, Event))
LEGAL = sorted(TRANSITIONS, key=str)
ILLEGAL = sorted(set(PAIRS) - set(TRANSITIONS), key=str)


def reachable(start: EngineState) -> set[EngineState]:
    """Return every state that some sequence of events leads to."""
    seen: set[EngineState] = set()
    ahead = [start]
    while ahead:
        state = ahead.pop()
        if state not in seen:
            seen.add(state)
            ahead += [to for (origin, _), to in TRANSITIONS.items() if origin is state]
    return seen


@pytest.mark.parametrize(
    ("state", "event", "to"),
    [
        (S.STOPPED, Event.START, S.STARTING),
        (S.STARTING, Event.LOADED, S.READY),
        (S.READY, Event.DRAIN, S.DRAINING),
        (S.DRAINING, Event.STOP, S.STOPPING),
        (S.STOPPING, Event.EXIT, S.STOPPED),
        (S.FAILED, Event.START, S.STARTING),
        (S.FAILED, Event.STOP, S.STOPPED),
        (S.STOPPED, Event.STOP, S.STOPPED),
        (S.STARTING, Event.STOP, S.STOPPING),
        (S.READY, Event.STOP, S.STOPPING),
        (S.DRAINING, Event.RESUME, S.READY),
        (S.DRAINING, Event.SLEPT, S.ASLEEP),
        (S.ASLEEP, Event.START, S.STARTING),
        (S.ASLEEP, Event.STOP, S.STOPPING),
    ],
)
def test_transitions_match_the_drawing(state: EngineState, event: Event, to: EngineState) -> None:
    assert after(state, event) is to


@pytest.mark.parametrize(("state", "event"), LEGAL)
def test_legal_pair_leads_to_its_state(state: EngineState, event: Event) -> None:
    assert after(state, event) is TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_illegal_pair_raises_and_names_both(state: EngineState, event: Event) -> None:
    with pytest.raises(IllegalTransition) as caught:
        after(state, event)
    assert event.name in str(caught.value)
    assert str(state) in str(caught.value)


def test_there_are_pairs_of_both_kinds() -> None:
    assert LEGAL
    assert ILLEGAL
    assert len(LEGAL) + len(ILLEGAL) == len(EngineState) * len(Event)


@pytest.mark.parametrize("state", [S.STARTING, S.READY, S.DRAINING, S.ASLEEP])
def test_running_states_can_fail(state: EngineState) -> None:
    assert after(state, Event.FAIL) is S.FAILED


def test_only_a_stopping_engine_exits() -> None:
    ends = {pair: to for pair, to in TRANSITIONS.items() if pair[1] is Event.EXIT}
    assert ends == {(S.STOPPING, Event.EXIT): S.STOPPED}


@pytest.mark.parametrize("state", [S.STOPPED, S.STOPPING, S.FAILED])
def test_other_states_cannot_fail(state: EngineState) -> None:
    with pytest.raises(IllegalTransition):
        after(state, Event.FAIL)


@pytest.mark.parametrize("state", EngineState)
def test_every_state_is_reached_from_a_stopped_engine(state: EngineState) -> None:
    assert state in reachable(S.STOPPED)


@pytest.mark.parametrize("state", sorted(reachable(S.STOPPED)))
def test_stop_and_exit_end_in_stopped_from_anywhere(state: EngineState) -> None:
    if state is not S.STOPPING:
        state = after(state, Event.STOP)
    if state is S.STOPPING:
        state = after(state, Event.EXIT)
    assert state is S.STOPPED


@pytest.mark.parametrize("state", sorted(reachable(S.STOPPED)))
def test_ready_is_reachable_from_every_state(state: EngineState) -> None:
    assert S.READY in reachable(state)


@pytest.mark.parametrize("origin", [S.STOPPED, S.FAILED, S.ASLEEP, S.STOPPING])
def test_only_a_started_engine_becomes_ready(origin: EngineState) -> None:
    assert S.READY not in {to for (state, _), to in TRANSITIONS.items() if state is origin}


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_sequence_of_events_leaves_the_table(events: list[Event]) -> None:
    state = S.STOPPED
    for event in events:
        try:
            new = after(state, event)
        except IllegalTransition:
            assert (state, event) not in TRANSITIONS
            continue
        assert (state, event) in TRANSITIONS
        assert (new is S.FAILED) == (event is Event.FAIL)
        state = new
    assert any(origin is state for origin, _ in TRANSITIONS)
