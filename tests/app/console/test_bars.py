"""Bar charts: every bar is within its box and its day."""

from datetime import date, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.console.bars import bar_chart
from app.console.charts import HEIGHT, WIDTH

FIRST = date(2026, 1, 1)


@given(
    st.integers(1, 366),
    st.dictionaries(
        st.integers(0, 365), st.tuples(st.integers(0, 10**15), st.integers(0, 10**15)), max_size=20
    ),
)
def test_bars_are_within_the_box_and_do_not_overlap(
    days: int, found: dict[int, tuple[int, int]]
) -> None:
    by_day = {(FIRST + timedelta(days=n)).isoformat(): v for n, v in found.items() if n < days}
    drawn = bar_chart(by_day, 2, FIRST, FIRST + timedelta(days=days - 1))
    end = 0.0
    for bar in drawn.bars:
        assert end <= bar.x <= bar.x + drawn.bar_width <= WIDTH + 1e-6
        end = bar.x + drawn.bar_width
        assert all(-1e-6 <= part.y <= part.y + part.height <= HEIGHT + 1e-6 for part in bar.parts)
    assert drawn.totals == tuple(sum(one) for one in zip(*by_day.values(), strict=True)) or not any(
        drawn.totals
    )


def test_parts_are_on_top_of_each_other() -> None:
    (bar,) = bar_chart({"2026-01-02": (30, 20)}, 2, FIRST, date(2026, 1, 3)).bars
    lower, upper = bar.parts
    assert (lower.y + lower.height, upper.y + upper.height) == (HEIGHT, lower.y)
    assert upper.height / lower.height == 2 / 3


def test_days_without_usage_have_no_bar() -> None:
    drawn = bar_chart({"2026-01-02": (0, 0)}, 2, FIRST, date(2026, 1, 3))
    assert (drawn.bars, drawn.totals, drawn.top) == ((), (0, 0), 1.0)


def test_days_are_labeled_at_equal_distances() -> None:
    month = bar_chart({}, 1, FIRST, date(2026, 1, 30)).labels
    assert [day for day, _ in month] == [f"2026-01-{day:02}" for day in (1, 6, 11, 16, 21, 26)]
    assert month[0][1] == 100 * 0.5 / 30
    assert bar_chart({}, 1, FIRST, FIRST).labels == [("2026-01-01", 50.0)]
    assert len(bar_chart({}, 1, FIRST, date(2026, 12, 31)).labels) == 6
