"""What callers call their checkpoints, apart from the folders they are in, and how long they stay.

The column's place does not matter: rows are read by name.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("name", sa.String(64)))
    op.add_column("checkpoints", sa.Column("pinned", sa.Boolean))
    op.add_column("checkpoints", sa.Column("expires_at", sa.Float))
