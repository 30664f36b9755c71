"""Budgets in money, of keys and owners, and alerts on them."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# A lock that a long reader such as pg_dump blocks is retried later: statements of gateways that
# keep writing while this runs queue behind the lock request, and give up after 2 s.
LOCK_TIMEOUT = "1s"
IDENTITY = ("subject", "name", "period", "day", "budget", "permille", "measure")


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    if postgresql:
        op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    # Nullable and without a default: no row is rewritten, and gateways of the version before, which
    # do not name these columns, keep creating keys and owners: without such a budget.
    for table in ("api_keys", "owners"):
        for name in ("daily_cost_nano", "monthly_cost_nano"):
            op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=True))
    # A budget of so many tokens and one of so much money are two. The table has few rows.
    op.add_column(
        "budget_alerts",
        sa.Column("measure", sa.String(length=8), server_default="tokens", nullable=False),
    )
    if postgresql:
        op.drop_constraint("pk_budget_alerts", "budget_alerts", type_="primary")
        op.create_primary_key("pk_budget_alerts", "budget_alerts", list(IDENTITY))
    else:
        _copy_with_primary_key()


def _copy_with_primary_key() -> None:
    """Copy the table of alerts: SQLite cannot change a primary key."""
    op.rename_table("budget_alerts", "budget_alerts_before")
    op.drop_index("ix_budget_alerts_due_ms")
    op.create_table(
        "budget_alerts",
        sa.Column("subject", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("period", sa.String(length=8), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("budget", sa.BigInteger(), nullable=False),
        sa.Column("permille", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("measure", sa.String(length=8), server_default="tokens", nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint(*IDENTITY, name="pk_budget_alerts"),
    )
    names = ", ".join((*IDENTITY, "id", "used", "at_ms", "attempts", "due_ms"))
    op.execute(
        f"INSERT INTO budget_alerts ({names}) SELECT {names} FROM budget_alerts_before"  # noqa: S608
    )
    op.drop_table("budget_alerts_before")
    op.create_index("ix_budget_alerts_due_ms", "budget_alerts", ["due_ms"])
