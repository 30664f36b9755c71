"""Interrupted streams in the ledger: whether they went on, and at what cost."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# A lock that a long reader such as pg_dump blocks is retried later: statements of gateways that
# keep writing while this runs queue behind the lock request, and give up after 2 s.
LOCK_TIMEOUT = "1s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    # Nullable and without a default: no row is rewritten, and gateways of the version before, which
    # do not name these columns, keep writing.
    op.add_column("usage_records", sa.Column("continued", sa.Integer(), nullable=True))
    op.add_column("usage_records", sa.Column("recomputed_tokens", sa.BigInteger(), nullable=True))
    op.add_column("usage_records", sa.Column("not_continued", sa.String(length=32), nullable=True))
