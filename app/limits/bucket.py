"""Token buckets by the generic cell rate algorithm (GCRA): pure, no I/O, no clock.

A bucket is one number, `full_at`: when it will be full again if nobody takes from it. What is
missing is its debt, in seconds of refill; a full bucket owes nothing and need not be kept. A limit
per minute refills `limit / 60` a second and holds `burst_s` seconds' worth, so a bucket is empty at
a debt of `burst_s`.

Costs are in seconds too. So a limit that changes takes hold at once, while what is owed stays the
wait that clients were told. A cost above what the bucket holds passes when the bucket is full, and
leaves it owing more than `burst_s`: a large request is delayed, never impossible.
"""

from math import inf

# Rounding may leave a debt that much above what it is; a clock beside it has microseconds.
EPSILON_S = 1e-7


def seconds(amount: float, limit: int) -> float:
    """Return what an amount costs, in seconds of refill; negative for what is given back."""
    if amount == 0:
        return 0.0
    return amount * 60.0 / limit if limit else inf


def debt(full_at: float, now: float) -> float:
    """Return how many seconds a bucket is from being full."""
    debt_s = full_at - now
    return debt_s if debt_s > 0.0 else 0.0


def wait(debt_s: float, cost_s: float, burst_s: float) -> float:
    """Return in how many seconds a cost passes: 0 if it does now, inf if it never will."""
    if cost_s == 0.0:
        return 0.0
    if cost_s == inf:
        return inf
    missing = debt_s - (burst_s - cost_s) if burst_s > cost_s else debt_s
    return missing if missing > EPSILON_S else 0.0


def charge(full_at: float, now: float, cost_s: float) -> float:
    """Return the bucket after a cost or a refund, which is a negative cost and fills it at most."""
    debt_s = full_at - now
    if debt_s > 0.0:
        cost_s += debt_s
    return now + cost_s if cost_s > 0.0 else now


def remaining(debt_s: float, limit: int, burst_s: float) -> int:
    """Return how many units of a limit may be had at once."""
    left = (burst_s - debt_s) * limit / 60.0 + 1e-6
    return int(left) if left > 0.0 else 0
