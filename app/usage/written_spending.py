"""What keys and owners have spent, as the database has it: without requests in flight."""

from collections.abc import Collection

from sqlalchemy import case, func, select

from app.database import Database
from app.money import NANO
from app.usage.records import storable
from app.usage.spending import BudgetSubject, Measure, Spent
from app.usage.statements import ACCOUNT_COLUMNS, cost_sums


async def written_spending(
    database: Database, subject: BudgetSubject, names: Collection[str], day: str
) -> dict[str, dict[Measure, Spent]]:
    """Return the written spending of accounts on a day and in its month."""
    column, longest = ACCOUNT_COLUMNS[subject]
    table = column.table
    tokens, cost = table.c.prompt_tokens + table.c.completion_tokens, table.c.cost_nano
    today = case((table.c.day == day, 1), else_=0)
    written = {storable(name, longest): name for name in names}
    statement = (
        select(
            column,
            func.sum(tokens * today),
            func.sum(tokens),
            *cost_sums(cost * today, "today"),
            *cost_sums(cost),
        )
        .where(column.in_(list(written)), table.c.day.between(f"{day[:7]}-01", day))
        .group_by(column)
    )
    async with database.read() as connection:
        rows = (await connection.execute(statement)).all()
    return {
        written[name]: {
            "tokens": Spent(int(today), int(month)),
            "cost": Spent(int(today_whole) * NANO + int(today_part), int(whole) * NANO + int(part)),
        }
        for name, today, month, today_whole, today_part, whole, part in rows
    }
