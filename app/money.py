"""Amounts of money as whole numbers, so that sums and comparisons are exact. Pure.

The unit is 1/1,000,000,000 of the configuration's currency ("nano"): a token may cost less than a
millionth.
"""

from decimal import Decimal

NANO = 10**9
# Beyond any budget, and with every sum of prices far below 2**63.
MAX_AMOUNT = 10**9
# Decimal places that a budget may have.
PLACES = 6


def parse_amount(value: object) -> Decimal:
    """Return an amount of money that a person or a client has given. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise ValueError("must be a number, such as 12.50")  # noqa: TRY004 - as pydantic needs it
    # The shortest text of a float is what was written, for up to 15 digits.
    amount = value if isinstance(value, Decimal) else Decimal(str(value))
    if not amount.is_finite() or not 0 <= amount <= MAX_AMOUNT:
        raise ValueError(f"must be from 0 to {MAX_AMOUNT:,}")
    if amount != round(amount, PLACES):
        raise ValueError(f"must have at most {PLACES} decimal places")
    return amount


def nano_of(amount: Decimal) -> int:
    """Return an amount of money in nano."""
    return int(amount * NANO)


def optional_nano(amount: Decimal | None) -> int | None:
    """Return an amount of money in nano; None for none."""
    return None if amount is None else nano_of(amount)


def amount_of(nano: int) -> float:
    """Return an amount of money as JSON has it."""
    return nano / NANO


def amount_text(amount: float, currency: str = "") -> str:
    """Return an amount of `amount_of` for people."""
    return money_text(nano_of(Decimal(str(amount))), currency)


def short_money_text(nano: int, currency: str = "") -> str:
    """Return an amount for people, in hundredths: `2.67 EUR`; `< 0.01 EUR` for less than one."""
    if 0 < nano < NANO // 100:
        return f"< 0.01 {currency}".rstrip()
    hundredths = round(Decimal(nano) / NANO, 2)
    return f"{hundredths:,.2f} {currency}".rstrip()


def money_text(nano: int, currency: str = "") -> str:
    """Return an amount for people, exact: with two decimal places, or up to nine."""
    whole, part = divmod(nano, NANO)
    places = f"{part:09d}".rstrip("0").ljust(2, "0")
    return f"{whole:,}.{places} {currency}".rstrip()
