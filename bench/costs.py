"""CPU cost of a step that every request takes, measured in process: no sockets, no engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.figures import median, percentile
from bench.report import Table, number

ROUNDS = 50
PER_ROUND = 1_000


@dataclass(frozen=True, slots=True)
class Cost:
    """One figure over many rounds, in its unit."""

    what: str
    unit: str
    values: Sequence[float]
    budget: float | None = None


def cpu_us(acts: Iterator[Callable[[], object]]) -> float:
    """Return the CPU time of one request in µs, over PER_ROUND of them."""
    chosen = [next(acts) for _ in range(PER_ROUND)]
    began = time.process_time_ns()
    for act in chosen:
        act()
    return (time.process_time_ns() - began) / PER_ROUND / 1e3


def cost_table(title: str, costs: Sequence[Cost], note: str) -> Table:
    """Return the section of the report; the median is compared with the budget."""
    rows = []
    for cost in costs:
        middle = median(cost.values)
        budget = "" if cost.budget is None else f"{cost.budget:g}"
        met = "" if cost.budget is None else "met" if (middle or 0) < cost.budget else "not met"
        shown = (min(cost.values), middle, percentile(cost.values, 0.99))
        rows.append([cost.what, cost.unit, *(number(one, 2) for one in shown), budget, met])
    columns = ["", "unit", "shortest", "median", "p99", "budget", ""]
    return Table(title, columns, rows, note)
