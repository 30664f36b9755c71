"""Jain's index of what waiting keys were served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.fairness import MAX_KEYS, WINDOW_S, FairnessIndex


def index_of(*served: float) -> FairnessIndex:
    index = FairnessIndex()
    for number, tokens in enumerate(served):
        index.record(f"key-{number}", tokens, 1.0)
    return index


@pytest.mark.parametrize(
    ("served", "value"),
    [
        ((), None),
        ((100.0,), None),
        ((100.0, 100.0, 100.0), 1.0),
        ((100.0, 0.001, 0.001, 0.001), 0.25),
        ((300.0, 100.0), 0.8),
    ],
)
def test_index_is_1_for_equal_shares_and_1_of_n_for_one_that_has_everything(
    served: tuple[float, ...], value: float | None
) -> None:
    assert index_of(*served).value(1.0) == (value and pytest.approx(value, abs=1e-4))


@given(st.lists(st.floats(1e-3, 1e12), min_size=2, max_size=20), st.floats(0.5, 1000))
def test_index_is_within_its_bounds_and_has_no_unit(served: list[float], unit: float) -> None:
    value = index_of(*served).value(1.0)
    assert value is not None
    assert 1 / len(served) - 1e-9 <= value <= 1 + 1e-9
    assert index_of(*(unit * each for each in served)).value(1.0) == pytest.approx(value)


def test_old_service_counts_no_longer() -> None:
    index = index_of(900.0, 100.0)
    for key in ("key-0", "key-1"):
        index.record(key, 100.0, 1.0 + WINDOW_S)
    assert index.value(1.0 + WINDOW_S) == pytest.approx(1200**2 / (2 * (1000**2 + 200**2)))
    assert index.value(1.0 + 2 * WINDOW_S) == 1.0
    assert index.value(1.0 + 4 * WINDOW_S) is None


def test_number_of_keys_is_bounded() -> None:
    index = index_of(*([1.0] * MAX_KEYS), *([1000.0] * 10_000))
    assert index.value(1.0) == 1.0
