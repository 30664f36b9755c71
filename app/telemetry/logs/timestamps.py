"""Timestamps of log lines, without their fraction."""

import time


def utc(second: int) -> str:
    """Return a timestamp for machines (RFC 3339, section 5.6), without the final Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def local(second: int) -> str:
    """Return a timestamp for people, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
