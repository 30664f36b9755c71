"""Keys with a deadline for requests that state none."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("max_wait_s", sa.Integer(), nullable=True))
