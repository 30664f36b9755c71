"""What keys and owners have spent, as the database has it: without requests in flight."""

from collections.abc import Collection

from app.database import Database
from app.money import NANO
from app.usage.records import storable
from app.usage.spending import BudgetSubject, Measure, Spent
from app.usage.statements import ACCOUNT_COLUMNS, spent_by_account


async def written_spending(
    database: Database, subject: BudgetSubject, names: Collection[str], day: str
) -> dict[str, dict[Measure, Spent]]:
    """Return the written spending of accounts on a day and in its month."""
    column, longest = ACCOUNT_COLUMNS[subject]
    written = {storable(name, longest): name for name in names}
    statement = spent_by_account(subject, day).where(column.in_(list(written)))
    async with database.read() as connection:
        rows = (await connection.execute(statement)).all()
    return {
        written[row.account]: {
            "tokens": Spent(int(row.of_day), int(row.of_month)),
            "cost": Spent(
                int(row.day_whole) * NANO + int(row.day_part),
                int(row.month_whole) * NANO + int(row.month_part),
            ),
        }
        for row in rows
    }
