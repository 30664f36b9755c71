"""The rule by which failed answers take a replica out, and good ones bring it back."""

from hypothesis import given
from hypothesis import strategies as st

from app.routing.answer_health import FIRST_OUT_S, MOST_OUT_S, SLOW_START, AnswerHealth

MOST = 5


def taken_out(now: float = 0.0) -> AnswerHealth:
    health = AnswerHealth(None)
    for _ in range(MOST):
        health.note_failure(now, MOST, spare=True)
    assert health.is_out
    return health


def test_failures_in_a_row_take_it_out() -> None:
    health = AnswerHealth(None)
    taken = [health.note_failure(0.0, MOST, spare=True) for _ in range(MOST)]
    assert taken == [False] * (MOST - 1) + [True]
    assert not health.takes_request(0, FIRST_OUT_S - 0.1)


def test_one_good_answer_clears_what_was_counted() -> None:
    health = AnswerHealth(None)
    health.note_failure(0.0, MOST, spare=True)
    assert health.note_success(1)


def test_the_last_of_the_replicas_stays_in() -> None:
    health = AnswerHealth(None)
    assert not any(health.note_failure(0.0, MOST, spare=False) for _ in range(50))
    assert health.takes_request(50, 0.0)
    assert health.note_failure(0.0, MOST, spare=True)  # once another can take its part


def test_one_trial_at_a_time() -> None:
    health = taken_out()
    assert health.takes_request(3, FIRST_OUT_S)
    health.note_sent(FIRST_OUT_S)
    assert not health.takes_request(4, 2 * FIRST_OUT_S - 0.1)
    assert health.takes_request(4, 2 * FIRST_OUT_S)  # the trial has not ended


def test_an_answer_to_what_was_sent_before_is_no_trial() -> None:
    health = taken_out()
    health.note_success(2)
    assert health.is_out
    assert not health.note_failure(1.0, MOST, spare=True)
    assert health.takes_request(0, FIRST_OUT_S)


def test_a_failed_trial_takes_it_out_for_twice_as_long() -> None:
    health, now, seconds = taken_out(), 0.0, []
    for _ in range(8):
        seconds.append(health.out_s)
        now += health.out_s
        health.note_sent(now)
        assert health.note_failure(now, MOST, spare=True)
        assert not health.takes_request(0, now + health.out_s - 0.1)
    assert seconds == [10, 20, 40, 80, 160, MOST_OUT_S, MOST_OUT_S, MOST_OUT_S]


def test_it_comes_back_by_one_request_more_with_each_good_answer() -> None:
    health = taken_out()
    health.note_sent(FIRST_OUT_S)
    assert not health.note_success(1)
    for limit in range(2, SLOW_START + 1):
        assert health.takes_request(limit - 1, FIRST_OUT_S)
        assert not health.takes_request(limit, FIRST_OUT_S)
        assert not health.note_success(1)
    assert health.note_success(1)


def test_a_failure_on_its_way_back_takes_it_out_at_once() -> None:
    health = taken_out()
    health.note_sent(FIRST_OUT_S)
    health.note_success(1)
    assert health.note_failure(FIRST_OUT_S, MOST, spare=True)
    assert health.out_s == 2 * FIRST_OUT_S


@given(st.lists(st.tuples(st.sampled_from(["sent", "good", "bad", "wait"]), st.booleans())))
def test_it_always_gets_a_trial_in_the_end(steps: list[tuple[str, bool]]) -> None:
    health, now = AnswerHealth(None), 0.0
    for what, spare in steps:
        if what == "sent":
            health.note_sent(now)
        elif what == "good":
            health.note_success(1)
        elif what == "bad":
            health.note_failure(now, MOST, spare=spare)
        else:
            now += 7
        assert health.out_until is None or health.limit is None
        assert health.takes_request(0, now + MOST_OUT_S)
