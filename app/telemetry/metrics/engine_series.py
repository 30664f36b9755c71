"""State, restarts and start-up facts of engines, read at each scrape.

A remote engine reports its facts itself: text that becomes a label is made printable and short.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from app.telemetry.metrics.series import Counter, Gauge, Registry, create_series

MAX_LABEL_CHARS = 64
_ENGINE = ("model", "gateway_engine")
_INFO = ("version", "architecture", "dtype", "quantization", "attention_backend")
_GAUGES = (
    ("max_model_len", "gateway_engine_max_model_len", "Tokens of the longest sequence."),
    ("kv_cache_tokens", "gateway_engine_kv_cache_tokens", "Capacity of the KV cache, in tokens."),
    ("weights_gib", "gateway_engine_weights_gib", "GiB of the weights, of one rank."),
    ("memory_gib", "gateway_engine_memory_gib", "GiB of memory that the engine uses."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """The figures of one engine; None where it reported none."""

    model: str
    engine: str
    restarts: int
    ejected: bool = False
    ejections: int = 0
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
    """The series of every engine: state, restarts, an info gauge and a gauge for each figure."""

    _state: Annotated[
        Gauge,
        "gateway_engine_state",
        "1 for the current state of an engine, 0 for the other states.",
        (*_ENGINE, "state"),
    ]
    _restarts: Annotated[
        Counter, "gateway_engine_restarts_total", "Restarts of an engine after a failure.", _ENGINE
    ]
    _ejected: Annotated[
        Gauge,
        "gateway_engine_ejected",
        "1 while an engine gets no requests because its answers fail, 0 otherwise.",
        _ENGINE,
    ]
    _ejections: Annotated[
        Counter,
        "gateway_engine_ejections_total",
        "How often an engine was taken out because its answers failed.",
        _ENGINE,
    ]
    _info: Annotated[
        Gauge,
        "gateway_engine_info",
        "1; the labels are what the engine reported, cut at 64 characters.",
        (*_ENGINE, *_INFO),
    ]

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        create_series(self, registry)
        self._gauges = {
            field: Gauge(registry, name, help_text, _ENGINE) for field, name, help_text in _GAUGES
        }

    def watch_states(
        self, read: Callable[[], Iterable[tuple[str, str, str]]], states: Iterable[str]
    ) -> None:
        """Export the state of engines; `read` returns (model, engine, state) for each."""
        all_states = tuple(states)

        def set_states() -> None:
            self._state.values = {
                (model, engine, state): int(state == current)
                for model, engine, current in read()
                for state in all_states
            }

        self._registry.before_scrape(set_states)

    def watch_figures(self, read: Callable[[], Iterable[EngineFigures]]) -> None:
        """Export the figures of engines; `read` returns one for each engine."""

        def set_figures() -> None:
            figures = {(engine.model, engine.engine): engine for engine in read()}
            self._restarts.values = {key: engine.restarts for key, engine in figures.items()}
            self._ejected.values = {key: int(engine.ejected) for key, engine in figures.items()}
            self._ejections.values = {key: engine.ejections for key, engine in figures.items()}
            infos = {k: [getattr(engine, name) for name in _INFO] for k, engine in figures.items()}
            self._info.values = {
                (*key, *map(clean_label, info)): 1 for key, info in infos.items() if any(info)
            }
            for field, gauge in self._gauges.items():
                gauge.values = {
                    key: value
                    for key, engine in figures.items()
                    if (value := getattr(engine, field)) is not None
                }

        self._registry.before_scrape(set_figures)


def clean_label(value: str | None) -> str:
    """Return an engine's text as a label value: printable ASCII, short, empty for None."""
    return "".join(c if " " <= c <= "~" else "?" for c in (value or "")[:MAX_LABEL_CHARS])
