"""When a model that fails may be loaded again, on a clock of the test's own."""

from hypothesis import given
from hypothesis import strategies as st

from app.residency.entry import Entry, OnDemand
from app.residency.policy import Residency
from app.settings import ModelSettings
from tests.app.residency.engines import FakeEngine

DAY_S = 86400.0


def entry(**restart: float) -> Entry:
    """A model on demand, not loaded."""
    spec = {"kind": "process", "model": "m", "restart": restart}
    settings = ModelSettings.model_validate({"name": "a", "load": "on_demand", "engines": [spec]})
    return Entry(OnDemand(settings, (FakeEngine("a"),)))


def dies(one: Entry, loaded_at: float, now: float) -> float:
    """Let it be loaded and die; return the pause."""
    one.residency, one.loaded_at = Residency.LOADED, loaded_at
    return one.note_fault(now)


def test_loads_in_vain_are_further_and_further_apart() -> None:
    one = entry(backoff_s=1, max_backoff_s=60)
    assert [one.note_fault(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert one.retry_at == 60


def test_model_that_loads_and_dies_each_time_is_loaded_further_and_further_apart() -> None:
    one = entry(backoff_s=1, max_backoff_s=60)
    # A load takes three minutes, and its first request ends it.
    moments = [180.0 * number for number in range(1, 8)]
    assert [dies(one, now, now + 1) for now in moments] == [0, 2, 4, 8, 16, 32, 60]


def test_model_that_has_worked_is_loaded_again_at_once() -> None:
    one = entry(backoff_s=1, window_s=600)
    assert [one.note_fault(0.0) for _ in range(4)] == [1, 2, 4, 8]
    assert dies(one, 10.0, 609.0) == 16
    assert dies(one, 700.0, 1300.0) == 0
    assert dies(one, 1400.0, 1401.0) == 2


def test_load_that_failed_says_nothing_of_the_one_before() -> None:
    one = entry(backoff_s=1, window_s=600)
    assert dies(one, 0.0, 1.0) == 0
    one.residency = Residency.LOADING  # loaded_at is still that of the stay before
    assert one.note_fault(DAY_S) == 2


@given(
    backoff=st.floats(0.01, 1000),
    cap=st.floats(0.01, 1000),
    stays=st.lists(st.one_of(st.none(), st.floats(0, 10_000)), max_size=200),
)
def test_pauses_are_bounded_and_grow_until_it_works(
    backoff: float, cap: float, stays: list[float | None]
) -> None:
    """Each fault is a load in vain (None), or a death so many seconds after the load."""
    one = entry(backoff_s=backoff, max_backoff_s=cap, window_s=600)
    now = before = 0.0
    for stay in stays:
        began, now = now, now + (stay or 0.0)
        if stay is None:
            one.residency = Residency.LOADING
            pause = one.note_fault(now)
            assert pause > 0
        else:
            pause = dies(one, began, now)
        assert 0 <= pause <= cap
        assert one.retry_at == now + pause
        assert pause >= before or (stay is not None and stay >= 600)
        before = pause


def test_a_thousand_faults_in_a_row_are_counted_too() -> None:
    one = entry(max_backoff_s=60)
    assert {one.note_fault(0.0) for _ in range(1100)} == {1, 2, 4, 8, 16, 32, 60}
