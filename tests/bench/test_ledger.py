"""The benchmark of the ledger writes what the gateway writes."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.usage.ledger import BATCH
from bench.ledger import Cost, cost, table


@pytest.mark.parametrize("history", [True, False])
def test_every_request_is_stored_with_or_without_its_phases(history: bool, tmp_path: Path) -> None:
    file = tmp_path / "gateway.db"
    count = BATCH + 1
    assert cost(file, count, history=history).size > 100
    with closing(sqlite3.connect(file)) as database:
        query = "SELECT count(*), count(timeline), count(own_id) FROM usage_records"
        [found] = database.execute(query)
        [(summed,)] = database.execute("SELECT sum(requests) FROM usage_daily")
    assert found == ((count, count, count) if history else (count, 0, 0))
    assert summed == count


def test_the_table_has_the_difference_of_each_round() -> None:
    pairs = [(Cost(110.0, 380.0), Cost(100.0, 290.0)), (Cost(230.0, 380.0), Cost(200.0, 290.0))]
    rows = table(pairs).rows
    assert [row[1] for row in rows] == ["170.0", "150.0", "20.0"]
    assert [row[3] for row in rows] == ["380", "290", "90"]
