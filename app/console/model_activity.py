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
class ModelActivity:
    """A model in the last minute. `ttft_p95` is in seconds; None: no stream has begun."""

    requests_per_min: float = 0.0
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
        self._readings: deque[tuple[float, Mapping[str, ModelTotals]]] = deque(maxlen=size)
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
        self._readings.append((self._clock(), read_model_totals(self._metrics)))
        failed = self._requests.recent(RequestFilter(statuses=_FAILED))
        self._failed = _latest(failed)

    def of(self, model: str) -> ModelActivity:
        """Return the activity of a model."""
        last_failed = self._failed.get(model)
        if len(self._readings) < 2:
            return ModelActivity(last_failed=last_failed)
        (began, old), (ended, new) = self._readings[0], self._readings[-1]
        before, now = old.get(model, _NOTHING), new.get(model, _NOTHING)
        counts = [later - earlier for earlier, later in zip(before.ttft, now.ttft, strict=True)]
        return ModelActivity(
            (now.requests - before.requests) / max(ended - began, 1e-3) * 60,
            quantile(0.95, TTFT_BUCKETS, counts),
            last_failed,
        )


def _latest(views: Sequence[RequestView]) -> Mapping[str, RequestView]:
    """Return the first view of each model."""
    found: dict[str, RequestView] = {}
    for view in views:
        found.setdefault(view.record.model, view)
    return found
