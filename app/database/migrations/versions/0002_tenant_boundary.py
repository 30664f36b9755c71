"""Rules on a key's request fields, ending its requests, shared secrets, stored responses."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("fields", sa.JSON(), nullable=True))
    op.add_column("api_keys", sa.Column("cut_ms", sa.BigInteger(), nullable=True))

    op.create_table(
        "secrets",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )
    op.create_table(
        "stored_responses",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("engine", sa.String(length=64), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stored_responses"),
    )
    op.create_index("ix_stored_responses_at_ms", "stored_responses", ["at_ms"])
    op.create_index("ix_stored_responses_key_id_at_ms", "stored_responses", ["key_id", "at_ms"])
