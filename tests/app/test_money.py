"""Amounts of money as people read them."""

import pytest

from app.money import NANO, money_text, short_money_text


@pytest.mark.parametrize(
    ("nano", "short", "exact"),
    [
        (0, "0.00", "0.00"),
        (1, "< 0.01", "0.000000001"),
        (NANO // 100 - 1, "< 0.01", "0.009999999"),
        (NANO // 100, "0.01", "0.01"),
        (554_356_300, "0.55", "0.5543563"),
        (1_234_567 * NANO + 5_000_000, "1,234,567.00", "1,234,567.005"),
    ],
)
def test_an_amount_is_short_or_exact(nano: int, short: str, exact: str) -> None:
    assert (short_money_text(nano), money_text(nano)) == (short, exact)
    assert short_money_text(nano, "EUR") == f"{short} EUR"
