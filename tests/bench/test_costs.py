import json
from collections.abc import Callable, Iterator
from itertools import count

from bench.costs import PER_ROUND, Cost, cost_table, cpu_us
from bench.isolation import BUDGET_US, add_cache_salt, chat_body, isolation_cost, table


def test_the_median_is_judged_by_the_budget() -> None:
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


def test_what_is_measured_is_called_with_a_chat_body() -> None:
    bodies: set[bytes] = set()

    cost = isolation_cost(bodies.add, quick=True)

    assert cost.budget == BUDGET_US
    assert bodies == {chat_body(600)}
    assert table([cost]).rows[0][0] == "isolation of a chat request of 600 bytes"


def test_a_chat_body_has_its_size_and_takes_a_salt() -> None:
    body = chat_body(600)

    salted = json.loads(add_cache_salt(body))

    assert len(body) == 600
    assert len(salted.pop("cache_salt")) == 64
    assert salted == json.loads(body)
