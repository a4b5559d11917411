"""The last fencing token of all: a policy that is made again goes on counting."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ratoon.engine.sealed import insert_row

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("last", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("row_digest", sa.String(32), nullable=False, server_default=""),
    )
    connection = op.get_bind()
    table = sa.Table("tokens", sa.MetaData(), autoload_with=connection)
    insert_row(connection, table, {"name": "last", "last": 0})
