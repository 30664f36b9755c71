"""The log of a system clock that was set."""

import pytest

from app.usage import ClockSteps


def test_each_step_of_the_clock_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    wall, monotonic = 1_795_800_000.0, 100.0
    steps = ClockSteps(lambda: wall, lambda: monotonic)
    for passed_s, step_s in ((10, 0.0), (10, 0.4), (10, 3600), (10, 0), (10, -3600), (900, 0)):
        monotonic += passed_s
        wall += passed_s + step_s
        steps.check()
    forward, back = caplog.messages
    assert forward.startswith("the system clock was set forward by 3600 s: budgets")
    assert back.startswith("the system clock was set back by 3600 s")
