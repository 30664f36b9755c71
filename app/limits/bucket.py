"""Token buckets by the generic cell rate algorithm (GCRA): pure, no I/O, no clock.

A bucket is one number, `full_at`: the time at which it will be full again if nothing is taken. Its
debt is the missing part, in seconds of refill; a full bucket has no debt and need not be stored. A
limit per minute refills `limit / 60` units a second and holds `burst_s` seconds' worth, so a bucket
is empty at a debt of `burst_s`.

Costs are in seconds too. So a changed limit takes effect at once, while the debt stays the wait
that clients were given. A cost above the bucket's size passes when the bucket is full, and leaves
a debt above `burst_s`: a large request is delayed, never impossible.
"""

from math import inf

# Tolerance for rounding errors of a debt; the clock has a resolution of microseconds.
EPSILON_S = 1e-7


def seconds(amount: float, limit: int) -> float:
    """Return the cost of an amount, in seconds of refill; negative for a refund."""
    if amount == 0:
        return 0.0
    return amount * 60.0 / limit if limit else inf


def debt(full_at: float, now: float) -> float:
    """Return how many seconds a bucket is from being full."""
    debt_s = full_at - now
    return debt_s if debt_s > 0.0 else 0.0


def wait(debt_s: float, cost_s: float, burst_s: float) -> float:
    """Return the seconds until a cost passes: 0 if it passes now, inf if it never will."""
    if cost_s == 0.0:
        return 0.0
    if cost_s == inf:
        return inf
    missing = debt_s - (burst_s - cost_s) if burst_s > cost_s else debt_s
    return missing if missing > EPSILON_S else 0.0


def charge(full_at: float, now: float, cost_s: float) -> float:
    """Return the bucket after a cost or a refund (a negative cost, which at most fills it)."""
    debt_s = full_at - now
    if debt_s > 0.0:
        cost_s += debt_s
    return now + cost_s if cost_s > 0.0 else now


def remaining(debt_s: float, limit: int, burst_s: float) -> int:
    """Return the number of units that are available now."""
    left = (burst_s - debt_s) * limit / 60.0 + 1e-6
    return int(left) if left > 0.0 else 0
