"""Finds how many requests each engine takes at once: `queue.max_in_flight: auto`.

`target` decides, from an engine's own counters; it knows no clock and no engine. `counters` reads
these from the engine's page of metrics, and `tuner` has them read while requests are in flight.
"""

from app.concurrency.counters import EngineCounters, read_counters
from app.concurrency.target import ConcurrencyTarget, initial_target
from app.concurrency.tuner import ConcurrencyTuner

__all__ = [
    "ConcurrencyTarget",
    "ConcurrencyTuner",
    "EngineCounters",
    "initial_target",
    "read_counters",
]
