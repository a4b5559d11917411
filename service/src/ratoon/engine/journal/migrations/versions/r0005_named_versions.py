"""Names that callers give to versions of the weights, which keep them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
_WIDE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "named_versions",
        sa.Column("policy_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("version", _WIDE, nullable=False),
        sa.Column("size_bytes", _WIDE, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("row_digest", sa.String(32), nullable=False, server_default=""),
    )
