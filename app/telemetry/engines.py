"""What is known of engines, read when somebody scrapes.

A remote engine may call itself what it likes: what becomes a label is printable and short.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LONGEST_LABEL = 64
_ENGINE = ("model", "gateway_engine")
_INFO = ("version", "architecture", "dtype", "quantization", "attention_backend")
_GAUGES = (
    ("max_model_len", "gateway_engine_max_model_len", "Tokens of the longest sequence."),
    ("kv_cache_tokens", "gateway_engine_kv_cache_tokens", "Tokens that the KV cache holds."),
    ("weights_gib", "gateway_engine_weights_gib", "Memory of the weights, of one rank."),
    ("memory_gib", "gateway_engine_memory_gib", "Memory that the engine takes."),
)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What is told of one engine; None where it did not say."""

    model: str
    engine: str
    restarts: int
    version: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    weights_gib: float | None = None
    memory_gib: float | None = None


class EngineSeries(Collector):
    """gateway_engine_restarts_total, gateway_engine_info, and a gauge for each figure."""

    def __init__(self, read: Callable[[], Iterable[EngineFigures]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        figures = list(self._read())
        restarts = CounterMetricFamily(
            "gateway_engine_restarts",
            "How often an engine was started again after it had failed.",
            labels=_ENGINE,
        )
        info = GaugeMetricFamily(
            "gateway_engine_info", "1; the labels tell what runs.", labels=(*_ENGINE, *_INFO)
        )
        for one in figures:
            restarts.add_metric((one.model, one.engine), one.restarts)
            told = [getattr(one, name) for name in _INFO]
            if any(told):
                info.add_metric((one.model, one.engine, *map(label, told)), 1.0)
        yield restarts
        yield info
        for field, name, text in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_ENGINE)
            for one in figures:
                value = getattr(one, field)
                if value is not None:
                    gauge.add_metric((one.model, one.engine), value)
            yield gauge


def label(value: str | None) -> str:
    """Return what an engine said as a label's value: printable ASCII, short, empty for None."""
    return "".join(c if " " <= c <= "~" else "?" for c in (value or "")[:LONGEST_LABEL])
