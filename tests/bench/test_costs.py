from collections.abc import Callable, Iterator
from itertools import count

import pytest

from app.request_body.body import parse
from app.request_body.field_rules import FieldRules
from app.request_body.rewrite import rewrite_body
from app.routing import Bounds
from app.settings import FieldSettings
from bench import isolation
from bench.costs import PER_ROUND, Cost, cost_table, cpu_us
from bench.isolation import BUDGET_US, MODEL, chat_body, isolation_cost, measure, table


def test_median_is_compared_with_the_budget() -> None:
    rows = cost_table(
        "Costs",
        [
            Cost("low", "µs", [1.0, 2.0, 9.0], 3.0),
            Cost("high", "µs", [1.0, 3.0, 4.0], 3.0),
            Cost("free", "ms", [0.5]),
        ],
        "Why.",
    ).rows

    assert rows == [
        ["low", "µs", "1.00", "2.00", "9.00", "3", "met"],
        ["high", "µs", "1.00", "3.00", "4.00", "3", "not met"],
        ["free", "ms", "0.50", "0.50", "0.50", "", ""],
    ]


def test_a_cost_is_of_as_many_calls_as_a_round_has() -> None:
    calls = count()

    def acts() -> Iterator[Callable[[], object]]:
        while True:
            yield lambda: next(calls)

    assert cpu_us(acts()) >= 0
    assert next(calls) == PER_ROUND


def test_measured_function_is_called_once_per_request_of_a_round() -> None:
    calls = count()

    cost = isolation_cost("isolation", lambda: next(calls), BUDGET_US, quick=True)

    assert next(calls) == PER_ROUND * len(cost.values)
    assert (cost.what, cost.unit, cost.budget) == ("isolation", "µs", BUDGET_US)


def test_a_chat_body_has_its_size_and_would_be_forwarded_unchanged() -> None:
    raw = chat_body(600)

    body = parse(b"application/json", raw)
    plan = rewrite_body("/v1/chat/completions", body, Bounds(), FieldRules(FieldSettings()), None)

    assert len(raw) == 600
    assert body.for_engine(MODEL, plan.changes, plan.dropped) is raw


def test_the_steps_of_isolation_are_measured_together_and_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "ROUNDS", 4)

    rows = table(measure(quick=True)).rows

    assert [row[0] for row in rows] == [
        "isolation of a chat request of 600 bytes",
        "the rules on fields alone",
        "the cache salt alone, with its splice",
        "the engine's request ID alone",
    ]
    assert [row[5] for row in rows] == ["3", "", "", ""]
