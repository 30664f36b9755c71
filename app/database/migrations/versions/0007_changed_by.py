"""Who made the last change of a key or an owner."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# A lock that a long reader such as pg_dump blocks is retried later: statements of gateways that
# keep writing while this runs queue behind the lock request, and give up after 2 s.
LOCK_TIMEOUT = "1s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    # Nullable and without a default: no row is rewritten, and gateways of the version before, which
    # do not name this column, keep changing keys: the column then names the change before.
    for table in ("api_keys", "owners"):
        op.add_column(table, sa.Column("changed_by", sa.String(length=200), nullable=True))
