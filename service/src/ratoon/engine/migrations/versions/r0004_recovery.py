"""What recovery compares: numerics of operations, digests of checkpoints, why a policy stopped."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("policies", sa.Column("failure", sa.Text))
    op.add_column("operations", sa.Column("numerics", sa.String(32)))
    op.add_column("checkpoints", sa.Column("weights_digest", sa.String(64)))
    op.create_table(
        "numerics",
        sa.Column("numerics", sa.String(32), primary_key=True),
        sa.Column("fields", sa.Text, nullable=False),
        sa.Column("row_digest", sa.String(32), nullable=False, server_default=""),
    )
