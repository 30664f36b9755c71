"""The error of every fault of Redis."""


class RedisUnavailable(Exception):
    """Redis did not answer in time, or not correctly. The message holds no password."""
