"""What the history of requests shows of each: its moments, its fault, and an ID of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# A lock that a long reader such as pg_dump blocks is retried later: statements of gateways that
# keep writing while this runs queue behind the lock request, and give up after 2 s.
LOCK_TIMEOUT = "1s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    # Columns that may be null rewrite no row. Gateways of the version before keep writing.
    for column in (
        sa.Column("own_id", sa.String(length=32), nullable=True),
        sa.Column("requested_model", sa.String(length=256), nullable=True),
        sa.Column("error", sa.String(length=64), nullable=True),
        sa.Column("fault", sa.String(length=300), nullable=True),
        sa.Column("client_wait_ms", sa.Float(), nullable=True),
        sa.Column("timeline", sa.Text(), nullable=True),
    ):
        op.add_column("usage_records", column)
    # Of rows to come alone: of a large ledger an index of all would be built for minutes.
    some = sa.text("own_id IS NOT NULL")
    op.create_index(
        "ix_usage_records_own_id",
        "usage_records",
        ["own_id"],
        sqlite_where=some,
        postgresql_where=some,
    )
