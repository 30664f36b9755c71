"""The slowest requests of many days, found on PostgreSQL without reading all of them."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # SQLite, whose ledgers are smaller, searches without: its planner would also take this index
    # for a key's requests, of which it would read all weeks.
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            # It may have been made before, CONCURRENTLY: of a large ledger this takes minutes, in
            # which usage waits in memory.
            "CREATE INDEX IF NOT EXISTS ix_usage_records_week_total_ms ON usage_records "
            "((at_ms / 604800000), total_ms) WHERE own_id IS NOT NULL"
        )
