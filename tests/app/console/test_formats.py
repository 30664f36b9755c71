"""Numbers, times, sizes and names as pages show them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console.formats import (
    ago,
    breakable,
    count,
    duration,
    iso_moment,
    moment,
    percent,
    phase_note,
    rfc3339,
    size,
)
from app.console.language import Language, in_language

NUMBERS = st.none() | st.floats() | st.integers(-(2**63), 2**64)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (math.inf, "–"),
        (math.nan, "–"),
        (0.0, "0.0 ms"),
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (0.9996, "1.0 s"),
        (3.44, "3.4 s"),
        (59.96, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3599.7, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (50 * 3600, "2 d 2 h"),
    ],
)
def test_a_duration_has_the_unit_that_reads_well(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (-math.inf, "–"),
        (0, "0"),
        (1234, "1,234"),
        (1234.0, "1,234"),
        (0.256, "0.26"),
        (12.56, "12.6"),
        (9_999_999, "9,999,999"),
        (12_345_678, "12.3 M"),
    ],
)
def test_a_number_has_its_thousands_apart(number: float | None, shown: str) -> None:
    assert count(number) == shown


def test_a_size_is_in_gib_or_mib() -> None:
    assert (size(None), size(512 * 2**20), size(2**30), size(math.nan)) == (
        "–", "512 MiB", "1.0 GiB", "–",
    )  # fmt: skip


def test_a_share_is_in_percent() -> None:
    assert (percent(None), percent(math.nan), percent(0.256)) == ("–", "–", "26 %")


@pytest.mark.parametrize(
    ("past_s", "text"),
    [(-5, "0 s ago"), (59.9, "59 s ago"), (60, "1 min ago"), (7300, "2 h ago"), (1e6, "11 d ago")],
)
def test_a_moment_that_is_past_is_a_distance(past_s: float, text: str) -> None:
    assert ago(1000.0, now=1000.0 + past_s) == text


def test_moments_are_utc() -> None:
    assert moment(None) == iso_moment(None) == "–"
    assert rfc3339(1_700_000_000) == "2023-11-14T22:13:20+00:00"
    assert moment(1_700_000_000) == "2023-11-14 22:13:20 UTC"
    assert iso_moment("2023-11-15T00:13:20+02:00") == "2023-11-14 22:13:20 UTC"


@pytest.mark.parametrize("show", [count, duration, size, percent])
@given(number=NUMBERS)
def test_any_number_is_shown(show: object, number: float | None) -> None:
    assert callable(show)
    assert show(number)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_longer_duration_never_reads_as_a_shorter_one(one: float, other: float) -> None:
    units = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

    def read(text: str) -> float:
        words = text.split()
        return sum(float(n) * units[u] for n, u in zip(words[::2], words[1::2], strict=True))

    low, high = sorted((one, other))
    assert read(duration(low)) <= read(duration(high)) + 1e-9


def test_positions_in_the_queue_are_translated() -> None:
    assert phase_note("position 3") == "position 3"
    assert phase_note("demo-0, failed: position 3") == "demo-0, failed: position 3"
    with in_language(Language.CHINESE):
        assert phase_note("position 3") == "第 3 位"
        assert phase_note("demo-0") == "demo-0"


def test_a_name_breaks_between_its_words_and_is_escaped() -> None:
    assert breakable("engines[0].env.A_B") == "engines[0].<wbr>env.<wbr>A_<wbr>B"
    assert breakable("args.<b>") == "args.<wbr>&lt;b&gt;"
