"""Connections to Redis, with one error for every fault and no client-side state.

`connection` sends commands, `subscription` reads a channel. Both import redis-py, which takes
9 MiB, so they are imported only where Redis is used.
"""

from app.redis.errors import RedisUnavailable

__all__ = ["RedisUnavailable"]
