"""Usage as pages show it: where a chart begins, and what a month may have at its end."""

from datetime import UTC, date, datetime

import pytest

from app.console.usage_view import first_day, forecast
from app.usage import UsageRow


def row(day: str) -> UsageRow:
    return UsageRow(
        day=day, key_id=None, key_name=None, model=None, requests=1, estimated_requests=0,
        prompt_tokens=1, cached_tokens=0, completion_tokens=1, reasoning_tokens=0, cost_nano=0,
    )  # fmt: skip


def test_a_month_is_expected_to_go_on_as_it_began() -> None:
    assert forecast(100, datetime(2026, 11, 16, tzinfo=UTC)) == pytest.approx(200)


def test_a_chart_begins_with_the_first_usage_but_has_a_week() -> None:
    since, until = date(2026, 1, 1), date(2026, 1, 30)
    rows = [row("2026-01-10"), row("2026-01-12")]
    assert first_day(rows, since, until) == date(2026, 1, 10)
    assert first_day([row("2026-01-29")], since, until) == date(2026, 1, 24)
    assert first_day([], since, until) == since
