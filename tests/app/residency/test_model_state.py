"""The backoff of a model that fails to load or dies, on a fake clock."""

from hypothesis import given
from hypothesis import strategies as st

from app.residency.model_state import ModelState, OnDemandModel
from app.residency.policy import Residency
from app.settings import ModelSettings
from engines.base import EngineCapabilities
from tests.app.residency.engines import FakeEngine

DAY_S = 86400.0


def unloaded(**restart: float) -> ModelState:
    """Return an on-demand model that is not loaded."""
    spec = {"kind": "process", "model": "m", "restart": restart}
    settings = ModelSettings.model_validate({"name": "a", "load": "on_demand", "engines": [spec]})
    return ModelState(model=OnDemandModel(settings, (FakeEngine("a"),)))


def dies(model: ModelState, loaded_at: float, now: float) -> float:
    """Load a model and let it die; return the backoff."""
    model.residency, model.loaded_at = Residency.LOADED, loaded_at
    return model.record_fault(now)


def test_backoff_grows_with_failed_loads() -> None:
    model = unloaded(backoff_s=1, max_backoff_s=60)
    assert [model.record_fault(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert model.retry_at == 60


def test_backoff_grows_with_deaths_soon_after_the_load() -> None:
    model = unloaded(backoff_s=1, max_backoff_s=60)
    # A load takes three minutes, and its first request ends it.
    moments = [180.0 * number for number in range(1, 8)]
    assert [dies(model, now, now + 1) for now in moments] == [0, 2, 4, 8, 16, 32, 60]


def test_model_that_has_worked_is_loaded_again_at_once() -> None:
    model = unloaded(backoff_s=1, window_s=600)
    assert [model.record_fault(0.0) for _ in range(4)] == [1, 2, 4, 8]
    assert dies(model, 10.0, 609.0) == 16
    assert dies(model, 700.0, 1300.0) == 0
    assert dies(model, 1400.0, 1401.0) == 2


def test_failed_load_does_not_count_as_time_loaded() -> None:
    model = unloaded(backoff_s=1, window_s=600)
    assert dies(model, 0.0, 1.0) == 0
    model.residency = Residency.LOADING  # loaded_at is still that of the previous load
    assert model.record_fault(DAY_S) == 2


@given(
    backoff=st.floats(0.01, 1000),
    cap=st.floats(0.01, 1000),
    stays=st.lists(st.one_of(st.none(), st.floats(0, 10_000)), max_size=200),
)
def test_backoff_is_bounded_and_grows_until_a_load_works(
    backoff: float, cap: float, stays: list[float | None]
) -> None:
    """Each fault is a failed load (None), or a death so many seconds after the load."""
    model = unloaded(backoff_s=backoff, max_backoff_s=cap, window_s=600)
    now = before = 0.0
    for stay in stays:
        began, now = now, now + (stay or 0.0)
        if stay is None:
            model.residency = Residency.LOADING
            pause = model.record_fault(now)
            assert pause > 0
        else:
            pause = dies(model, began, now)
        assert 0 <= pause <= cap
        assert model.retry_at == now + pause
        assert pause >= before or (stay is not None and stay >= 600)
        before = pause


def test_a_thousand_faults_do_not_overflow() -> None:
    model = unloaded(max_backoff_s=60)
    assert {model.record_fault(0.0) for _ in range(1100)} == {1, 2, 4, 8, 16, 32, 60}


def test_engines_of_a_cluster_need_no_memory_here() -> None:
    placed = FakeEngine("b", gib=80.0)
    placed.capabilities = EngineCapabilities(managed=True, unloadable=True, elsewhere=True)
    model = unloaded()
    model.model = OnDemandModel(model.model.settings, (FakeEngine("a", gib=2.0), placed))
    assert model.need_gib == 2.0
