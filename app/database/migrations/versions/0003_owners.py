"""Owners with limits and budgets, usage by owner, alerts on budgets."""

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

SUMS = (
    "requests",
    "estimated_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "cost_nano",
)


# Gateways of the version before write while this runs, and give up a statement after 2 s. A lock
# that a long reader such as pg_dump blocks is retried later, because every statement queued behind
# the lock request waits as well.
LOCK_TIMEOUT = "1s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    op.create_table(
        "owners",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("concurrent_requests", sa.Integer(), nullable=True),
        sa.Column("daily_tokens", sa.BigInteger(), nullable=True),
        sa.Column("monthly_tokens", sa.BigInteger(), nullable=True),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_owners"),
    )
    op.create_table(
        "usage_by_owner",
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint("owner", "day", "key_id", "model", name="pk_usage_by_owner"),
    )
    op.create_index("ix_usage_by_owner_day", "usage_by_owner", ["day"])
    # Days that are over, which is nearly all, before anything is locked that a gateway writes.
    recent = (datetime.now(UTC) - timedelta(days=2)).date().isoformat()
    _copy_sums(f"usage_daily.day < '{recent}'")
    op.create_index("ix_api_keys_owner", "api_keys", ["owner"])
    owner = sa.Column("owner", sa.String(length=200), server_default="", nullable=False)
    op.add_column("usage_records", owner)
    # From here on no gateway writes usage: sums change with records, in one transaction.
    _copy_sums(f"usage_daily.day >= '{recent}'")

    op.create_table(
        "budget_alerts",
        sa.Column("subject", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("period", sa.String(length=8), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("budget", sa.BigInteger(), nullable=False),
        sa.Column("permille", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint(
            "subject", "name", "period", "day", "budget", "permille", name="pk_budget_alerts"
        ),
    )
    op.create_index("ix_budget_alerts_due_ms", "budget_alerts", ["due_ms"])


def _copy_sums(days: str) -> None:
    """Copy sums of usage of before, which has no owner, to the owner that the key has now."""
    sums = ", ".join(f"usage_daily.{name}" for name in SUMS)
    op.execute(
        f"INSERT INTO usage_by_owner (owner, day, key_id, model, {', '.join(SUMS)}) "  # noqa: S608
        f"SELECT api_keys.owner, usage_daily.day, usage_daily.key_id, usage_daily.model, {sums} "
        "FROM usage_daily JOIN api_keys ON api_keys.id = usage_daily.key_id "
        f"WHERE api_keys.owner <> '' AND {days}"
    )
