"""What an engine reports about its load, from its page of metrics (vLLM 0.27 to 0.33). Pure."""

import math
import re
from dataclasses import dataclass

# A line is a name, perhaps labels, a value and perhaps a time; values of labels may hold spaces.
_LINE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|num_preemptions_total|kv_cache_usage_perc"
    rb"|request_success_total)(?:\{[^\n]*\})? ([^ \n]{1,40})",
    re.MULTILINE,
)
# More than any engine has. A count that is no number of this size is a lie or a fault.
_MAX_COUNT = 1e15


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """The load of one engine at one moment; that of its data-parallel ranks together."""

    running: int  # requests in the batch
    waiting: int  # requests in the engine's own queue
    preemptions: int  # since the engine began
    ended: int  # requests, since the engine began; 0 if it does not say
    kv_usage: float  # share of the KV cache that requests hold, 0 to 1; of the fullest rank


def read_counters(page: bytes) -> EngineCounters | None:
    """Return the counters on a page in Prometheus's text format; None: not all are there."""
    found: dict[bytes, list[float]] = {}
    for name, text in _LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            return None
        if not math.isfinite(value) or not 0 <= value <= _MAX_COUNT:
            return None
        found.setdefault(name, []).append(value)
    try:
        return EngineCounters(
            running=int(sum(found[b"num_requests_running"])),
            waiting=int(sum(found[b"num_requests_waiting"])),
            preemptions=int(sum(found[b"num_preemptions_total"])),
            ended=int(sum(found.get(b"request_success_total", ()))),
            kv_usage=max(found[b"kv_cache_usage_perc"]),
        )
    except KeyError:
        return None
