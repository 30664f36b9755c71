"""Keys that may load and unload models."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# A lock that a long reader such as pg_dump blocks is retried later: statements of gateways that
# keep writing while this runs queue behind the lock request, and give up after 2 s.
LOCK_TIMEOUT = "1s"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
    # A constant default rewrites no row. Gateways of the version before, which do not name this
    # column, keep creating keys: without the permission.
    op.add_column(
        "api_keys",
        sa.Column("may_load_models", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
