"""A digest in each row, of the row: what was written before is taken as it is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ratoon.engine.sealed import seal_all

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    connection = op.get_bind()
    for name in ("policies", "operations", "checkpoints"):
        op.add_column(
            name, sa.Column("row_digest", sa.String(32), nullable=False, server_default="")
        )
        seal_all(connection, sa.Table(name, sa.MetaData(), autoload_with=connection))
