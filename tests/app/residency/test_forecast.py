"""The choice between waiting and a fallback, on a fake clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.forecast import (
    UP,
    Ask,
    Forecast,
    GiveUp,
    NextStep,
    Use,
    Wait,
    next_step,
    own_step,
    remaining_s,
)

SECONDS = st.floats(0.01, 3600)
LOADING = Forecast(20.0)
UNKNOWN = Forecast(None)


def cold(in_s: float | None) -> Forecast:
    return Forecast(in_s, cold=True)


FORECASTS = st.one_of(
    st.none(),
    st.just(UP),
    st.builds(Forecast, SECONDS | st.none()),
    st.builds(cold, SECONDS | st.none()),
)


def step(
    asked: Forecast | None,
    *fallbacks: Forecast | None,
    left_s: float = 300.0,
    queued: bool = False,
) -> NextStep:
    return next_step(asked, fallbacks, left_s=left_s, queued=queued)


class TestStep:
    @pytest.mark.parametrize("asked", [LOADING, UNKNOWN, cold(5.0), cold(None)])
    def test_fallback_that_is_up_serves_while_the_model_comes_up(self, asked: Forecast) -> None:
        assert step(asked, cold(1.0), LOADING, UP, UP) == Use(2)

    def test_model_that_is_up_again_comes_before_its_fallbacks(self) -> None:
        assert step(UP, UP) == Ask()
        assert step(UP, UP, left_s=-1.0) == Ask()

    def test_request_waits_when_the_fallback_would_load_longer(
        self,
    ) -> None:
        assert step(Forecast(22.0), cold(26.0)) == Wait()

    def test_fallback_that_loads_faster_is_loaded(self) -> None:
        assert step(Forecast(60.0), cold(30.0), cold(10.0), cold(None)) == Use(1)

    def test_fallback_that_would_load_after_the_model_is_not_sooner(self) -> None:
        assert step(Forecast(60.0), cold(1.0), queued=True) == Wait()

    def test_start_of_unknown_duration_wins(self) -> None:
        assert step(UNKNOWN, cold(1.0)) == Wait()
        assert step(LOADING, cold(None)) == Wait()

    def test_request_waits_for_a_fallback_that_starts_by_itself(self) -> None:
        assert step(Forecast(60.0), Forecast(1.0)) == Wait()

    @pytest.mark.parametrize("fallback", [UP, LOADING, cold(1.0), None])
    def test_order_decides_when_the_model_is_not_coming_up(self, fallback: Forecast) -> None:
        assert step(None, cold(1.0), fallback) == GiveUp()

    def test_fallbacks_come_before_a_start_that_follows_a_failed_one(self) -> None:
        assert step(Forecast(None, doubtful=True), cold(10.0)) == GiveUp()

    def test_no_wait_beyond_the_timeout(self) -> None:
        assert step(LOADING, cold(26.0), left_s=0.0) == GiveUp()
        assert step(LOADING, cold(26.0), UP, left_s=0.0) == Use(1)

    @given(FORECASTS, st.lists(FORECASTS, max_size=4), st.floats(-10, 600), st.booleans())
    def test_decision_is_never_worse_than_the_forecasts(
        self,
        asked: Forecast | None,
        fallbacks: list[Forecast | None],
        left_s: float,
        queued: bool,
    ) -> None:
        decided = next_step(asked, fallbacks, left_s=left_s, queued=queued)
        ups = [one for one in fallbacks if one is not None and one.up]
        match decided:
            case Ask():
                assert asked == UP
            case Wait():
                assert asked is not None
                assert left_s > 0
                assert not ups
            case GiveUp():
                assert asked is None or (left_s <= 0 and not ups)
            case Use(index):
                chosen = fallbacks[index]
                assert chosen is not None
                assert asked is not None
                if not chosen.up:
                    assert chosen.cold
                    assert not queued
                    assert chosen.in_s is not None
                    assert asked.in_s is not None
                    assert chosen.in_s < asked.in_s


class TestRemaining:
    def test_start_is_expected_to_take_as_long_as_the_previous_one(self) -> None:
        assert remaining_s(5.0, 22.0) == 17.0

    def test_late_start_is_expected_to_be_late_by_as_much_again(self) -> None:
        assert remaining_s(30.0, 22.0) == 8.0

    def test_unknown_without_a_previous_start(self) -> None:
        assert remaining_s(5.0, None) is None

    @given(SECONDS, SECONDS)
    def test_unfinished_start_is_not_up(self, elapsed_s: float, expected_s: float) -> None:
        assert not Forecast(remaining_s(elapsed_s, expected_s)).up

    @given(SECONDS, SECONDS, st.floats(0.01, 0.99))
    def test_vain_wait_costs_at_most_the_load_of_the_fallback(
        self, expected_s: float, load_s: float, tick: float
    ) -> None:
        """A start that hangs: the fallback is loaded once it is late by the fallback's load."""
        late_s = load_s * (1 + tick)
        now = expected_s + late_s
        assert step(Forecast(remaining_s(now, expected_s)), cold(load_s)) == Use(0)
        early = expected_s + load_s * tick
        assert step(Forecast(remaining_s(early, expected_s)), cold(load_s)) == Wait()


class TestOwnStep:
    def test_model_that_is_not_coming_up_is_not_waited_for(self) -> None:
        assert own_step(None, most_s=300.0, left_s=300.0) == GiveUp()

    def test_start_that_follows_a_failed_one_is_waited_for(self) -> None:
        assert own_step(Forecast(None, doubtful=True), most_s=9.0, left_s=9.0) == Wait()

    def test_model_that_is_up_is_asked_even_late(self) -> None:
        assert own_step(UP, most_s=300.0, left_s=-1.0) == Ask()

    @pytest.mark.parametrize("asked", [LOADING, UNKNOWN])
    def test_start_is_waited_for_until_the_time_is_over(self, asked: Forecast) -> None:
        assert own_step(asked, most_s=20.0, left_s=0.1) == Wait()
        assert own_step(asked, most_s=20.0, left_s=0.0) == GiveUp()

    def test_start_that_takes_longer_than_a_request_may_wait_is_not_waited_for(self) -> None:
        assert own_step(LOADING, most_s=19.0, left_s=19.0) == GiveUp()
