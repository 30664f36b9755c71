"""SQL statements of the ledger, in the dialect of each database.

A statement writes a whole group of rows, so as not to delay streams: SQLite's driver takes the GIL
again after each statement, and asyncpg converts each parameter on the event loop. So SQLite gets
one statement with all values, in a quarter of the time of json_each, and PostgreSQL one parameter,
a list of JSON objects.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Insert,
    Select,
    String,
    Table,
    bindparam,
    case,
    cast,
    column,
    func,
    select,
)

from app.database import Database, dialect_insert
from app.database.schema import usage_by_owner, usage_daily, usage_records
from app.money import NANO
from app.usage.records import SUM_LIMITS, DailySums, Row, storable
from app.usage.spending import BudgetSubject, Measure, Spent

# The column of each kind of account in its table of sums, and the maximum length of its names.
ACCOUNT_COLUMNS: Mapping[BudgetSubject, tuple[Any, int]] = {
    "key": (usage_daily.c.key_id, 64),
    "owner": (usage_by_owner.c.owner, 200),
}
_json = msgspec.json.Encoder()
_COLUMNS = Row.__struct_fields__


def cost_sums(
    cost: ColumnElement[int], name: str = "cost"
) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return a sum of costs in two parts, neither of which can exceed 64 bits."""
    whole, part = func.sum(cost // NANO), func.sum(cost % NANO)
    return whole.label(f"{name}_whole"), part.label(f"{name}_part")


def cost_of(row: Any, name: str = "cost") -> int:
    """Return the cost of which a row has the two sums; 0 if they are null."""
    return int(getattr(row, f"{name}_whole") or 0) * NANO + int(getattr(row, f"{name}_part") or 0)


def spent_by_account(subject: BudgetSubject, day: str) -> Select[Any]:
    """Return the query of what accounts of a kind have spent on a UTC day, and in its month."""
    account, _ = ACCOUNT_COLUMNS[subject]
    sums = account.table.c
    tokens, of_day = (
        sums.prompt_tokens + sums.completion_tokens,
        case((sums.day == day, 1), else_=0),
    )
    return (
        select(
            account.label("account"),
            func.sum(tokens * of_day).label("of_day"),
            func.sum(tokens).label("of_month"),
            *cost_sums(sums.cost_nano * of_day, "day"),
            *cost_sums(sums.cost_nano, "month"),
        )
        .where(sums.day.between(f"{day[:7]}-01", day))
        .group_by(account)
    )


async def written_spending(
    database: Database, subject: BudgetSubject, names: Collection[str], day: str
) -> dict[str, dict[Measure, Spent]]:
    """Return what accounts have spent on a day and in its month, without requests in flight."""
    column, longest = ACCOUNT_COLUMNS[subject]
    written = {storable(name, longest): name for name in names}
    statement = spent_by_account(subject, day).where(column.in_(list(written)))
    async with database.read() as connection:
        rows = (await connection.execute(statement)).all()
    return {
        written[row.account]: {
            "tokens": Spent(int(row.of_day), int(row.of_month)),
            "cost": Spent(cost_of(row, "day"), cost_of(row, "month")),
        }
        for row in rows
    }


def insert_records(connection: Connection, rows: Sequence[Row]) -> None:
    """Insert rows into `usage_records`; SQLite's limit is 1,024 rows."""
    if connection.dialect.name == "postgresql":
        connection.execute(_insert_from_json(), {"rows": _json.encode(rows).decode()})
    else:
        done = 0
        while left := len(rows) - done:
            # A power of two: SQLite takes longer to prepare a statement than to run it, and caches
            # prepared ones.
            size = 1 << (left.bit_length() - 1)
            group = islice(rows, done, done + size)
            values = tuple(chain.from_iterable(map(msgspec.structs.astuple, group)))
            connection.exec_driver_sql(_insert_values(size), values)
            done += size


def add_sums(connection: Connection, sums: DailySums) -> None:
    """Add sums to `usage_daily` and `usage_by_owner`."""
    dialect = connection.dialect.name
    if keyed := sums.by_key():
        connection.execute(_add_to(usage_daily, dialect), keyed)
    if owned := sums.by_owner():
        connection.execute(_add_to(usage_by_owner, dialect), owned)


@cache
def _insert_values(rows: int) -> str:
    each = f"({', '.join('?' * len(_COLUMNS))})"
    values = ", ".join([each] * rows)
    return f"INSERT INTO {usage_records.name} ({', '.join(_COLUMNS)}) VALUES {values}"  # noqa: S608


@cache
def _insert_from_json() -> Insert:
    rows = bindparam("rows", type_=String)
    typed = [column(name, usage_records.c[name].type) for name in _COLUMNS]
    records = func.json_to_recordset(cast(rows, JSON)).table_valued(*typed)
    source = select(*records.render_derived(with_types=True).columns)
    return usage_records.insert().from_select(_COLUMNS, source)


@cache
def _add_to(table: Table, dialect: str) -> Any:
    statement: Any = dialect_insert(table, dialect)
    sums = {}
    for name, most in SUM_LIMITS.items():
        total = table.c[name] + statement.excluded[name]
        sums[name] = case((total > most, most), else_=total)
    return statement.on_conflict_do_update(index_elements=table.primary_key, set_=sums)
