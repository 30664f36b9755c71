"""What is known of engines, read when somebody scrapes.

A remote engine may call itself what it likes: what becomes a label is printable and short.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.telemetry.metrics.series import Counter, Gauge, Registry

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


class EngineSeries:
    """The state of every engine, its restarts, what runs, and a gauge for each figure."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._state = Gauge(
            registry,
            "gateway_engine_state",
            "1 for the state that an engine is in, 0 for the others.",
            (*_ENGINE, "state"),
        )
        self._restarts = Counter(
            registry,
            "gateway_engine_restarts",
            "How often an engine was started again after it had failed.",
            _ENGINE,
        )
        self._info = Gauge(
            registry, "gateway_engine_info", "1; the labels tell what runs.", (*_ENGINE, *_INFO)
        )
        self._gauges = {
            field: Gauge(registry, name, text, _ENGINE) for field, name, text in _GAUGES
        }

    def watch_states(
        self, read: Callable[[], Iterable[tuple[str, str, str]]], states: Iterable[str]
    ) -> None:
        """Export the state of engines; `read` returns (model, engine, state) for each."""
        every = tuple(states)

        def set_states() -> None:
            self._state.values = {
                (model, engine, state): int(state == current)
                for model, engine, current in read()
                for state in every
            }

        self._registry.before_scrape(set_states)

    def watch_figures(self, read: Callable[[], Iterable[EngineFigures]]) -> None:
        """Export what is known of engines; `read` returns it for each."""

        def set_figures() -> None:
            figures = {(one.model, one.engine): one for one in read()}
            self._restarts.values = {place: one.restarts for place, one in figures.items()}
            told = {place: [getattr(one, name) for name in _INFO] for place, one in figures.items()}
            self._info.values = {
                (*place, *map(label, values)): 1 for place, values in told.items() if any(values)
            }
            for field, gauge in self._gauges.items():
                gauge.values = {
                    place: value
                    for place, one in figures.items()
                    if (value := getattr(one, field)) is not None
                }

        self._registry.before_scrape(set_figures)


def label(value: str | None) -> str:
    """Return what an engine said as a label's value: printable ASCII, short, empty for None."""
    return "".join(c if " " <= c <= "~" else "?" for c in (value or "")[:LONGEST_LABEL])
