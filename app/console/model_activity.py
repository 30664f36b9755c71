"""What each model did in the last minute, and the last request to it that failed.

Read every ten seconds from the counters and the requests in memory, and kept for a minute.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.console.history import INTERVAL_S, TTFT_SPAN_S, quantile
from app.relay import RequestDirectory, RequestView
from app.telemetry.metrics import TTFT_BUCKETS, Metrics, ModelTotals, read_model_totals
from app.usage import RequestFilter

log = logging.getLogger(__name__)

_FAILED = range(500, 600)
_NOTHING = ModelTotals(0, (0,) * (len(TTFT_BUCKETS) + 1))


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters of each model at one moment, and the tokens of its answers in flight."""

    at: float
    totals: Mapping[str, ModelTotals]
    answer_tokens: Mapping[str, int]

    def tokens(self, model: str) -> int:
        """Return the tokens that were generated until then; those in flight are estimates."""
        return self.totals.get(model, _NOTHING).tokens + self.answer_tokens.get(model, 0)


@dataclass(frozen=True, slots=True)
class ModelActivity:
    """A model in the last minute. `ttft_p95` is in seconds; None: no stream has begun."""

    tokens_per_s: float = 0.0
    ttft_p95: float | None = None
    # Since the start of the gateway, and while the request is in memory.
    last_failed: RequestView | None = None


class ModelActivities:
    """The activity of each model by its name. `clock` is monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        requests: RequestDirectory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._requests = requests
        self._clock = clock
        size = int(TTFT_SPAN_S / INTERVAL_S) + 1
        self._readings: deque[_Reading] = deque(maxlen=size)
        self._failed: Mapping[str, RequestView] = {}

    async def run(self) -> None:
        """Read now and after each interval, until canceled."""
        while True:
            try:
                self.read()
            except Exception:
                log.exception("the console misses a reading of the models")
            await asyncio.sleep(INTERVAL_S)

    def read(self) -> None:
        """Add a reading."""
        totals, tokens = read_model_totals(self._metrics), self._requests.answer_tokens()
        self._readings.append(_Reading(self._clock(), totals, tokens))
        failed = self._requests.recent(RequestFilter(statuses=_FAILED))
        self._failed = _latest(failed)

    def of(self, model: str) -> ModelActivity:
        """Return the activity of a model."""
        last_failed = self._failed.get(model)
        if len(self._readings) < 2:
            return ModelActivity(last_failed=last_failed)
        first, last = self._readings[0], self._readings[-1]
        before, now = (one.totals.get(model, _NOTHING).ttft for one in (first, last))
        counts = [later - earlier for earlier, later in zip(before, now, strict=True)]
        # The count of a completed answer may fall below its estimate.
        tokens = max(last.tokens(model) - first.tokens(model), 0)
        return ModelActivity(
            tokens / max(last.at - first.at, 1e-3),
            quantile(0.95, TTFT_BUCKETS, counts),
            last_failed,
        )


def _latest(views: Sequence[RequestView]) -> Mapping[str, RequestView]:
    """Return the first view of each model."""
    found: dict[str, RequestView] = {}
    for view in views:
        found.setdefault(view.record.model, view)
    return found
