"""Sums of what the gateway has counted, for charts of the last hour: of all models, and of each."""

from dataclasses import dataclass

from app.telemetry.metrics.buckets import TTFT_BUCKETS
from app.telemetry.metrics.gateway_series import Metrics

CLIENT_CLOSED_REQUEST = "499"
# Outcomes of interrupted streams that left no client with a part of an answer.
_UNBROKEN = frozenset({"continued", "disconnected", "finished"})


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start of the gateway, and the requests that wait now."""

    # Completion tokens of completed requests.
    tokens: int
    # Responses with status 5xx, and streams that ended with an error.
    errors: int
    # Responses with status 4xx, except those whose client had disconnected.
    refused: int
    # Streams by their time to first token: not cumulative, the last is above all bounds.
    ttft: tuple[int, ...]
    waiting: int
    ttft_bounds: tuple[float, ...] = TTFT_BUCKETS


def read_totals(metrics: Metrics) -> Totals:
    """Return the sums at this moment."""
    metrics.count_completed()
    errors = refused = 0.0
    for (_, _, status), count in metrics.requests.values.items():
        if status.startswith("5"):
            errors += count
        elif status.startswith("4") and status != CLIENT_CLOSED_REQUEST:
            refused += count
    for (_, _, outcome), count in metrics.continuations.values.items():
        if outcome not in _UNBROKEN:
            errors += count
    return Totals(
        tokens=sum(metrics.completion_tokens_by_model().values()),
        errors=int(errors),
        refused=int(refused),
        ttft=tuple(metrics.time_to_first_token.summed_counts()),
        waiting=int(sum(metrics.queue_depth.values.values())),
    )


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """Counts of a model since the start of the gateway: completion tokens, and TTFT as above."""

    tokens: int
    ttft: tuple[int, ...]


def read_model_totals(metrics: Metrics) -> dict[str, ModelTotals]:
    """Return the counts of each model at this moment."""
    ttft = metrics.time_to_first_token.counts()
    none = (0,) * (len(TTFT_BUCKETS) + 1)
    tokens = metrics.completion_tokens_by_model()
    return {name: ModelTotals(count, ttft.get((name,), none)) for name, count in tokens.items()}
