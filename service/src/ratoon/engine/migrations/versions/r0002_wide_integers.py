"""Integers of 64 bits: a seq is the caller's, and a checkpoint may be larger than 2 GiB.

SQLite's are that wide already.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_COLUMNS = {
    "policies": ("version", "max_version", "next_seq", "token"),
    "operations": ("seq", "version"),
    "checkpoints": ("version", "seq", "replay_from_seq", "size_bytes"),
}


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        return
    for table, columns in _COLUMNS.items():
        for column in columns:
            op.alter_column(table, column, type_=sa.BigInteger)
