"""People who sign in to the console by an identity provider."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "person_sessions",
        sa.Column("id", sa.LargeBinary(length=32), nullable=False),
        sa.Column("person", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("terms", sa.LargeBinary(length=32), nullable=False),
        sa.Column("subject", sa.LargeBinary(length=32), nullable=False),
        sa.Column("provider_session", sa.LargeBinary(length=32), nullable=True),
        sa.Column("issued_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("id_token", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_person_sessions"),
    )
    op.create_index("ix_person_sessions_expires_ms", "person_sessions", ["expires_ms"])
