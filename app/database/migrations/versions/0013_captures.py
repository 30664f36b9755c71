"""Requests and answers that are captured, encrypted."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "captures",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=210), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_captures"),
    )
    op.create_index("ix_captures_tenant_at_ms_size", "captures", ["tenant", "at_ms", "size"])
    op.create_index("ix_captures_expires_ms", "captures", ["expires_ms"])
