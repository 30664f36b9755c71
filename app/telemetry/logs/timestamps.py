"""Moments as lines of the log show them, without their fraction."""

import time


def utc(second: int) -> str:
    """Return a moment for machines (RFC 3339, section 5.6), without the Z at its end."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def local(second: int) -> str:
    """Return a moment for people, in the time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
