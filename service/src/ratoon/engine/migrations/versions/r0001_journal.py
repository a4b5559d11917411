"""The journal as it was before it had revisions.

A database without a revision that has these tables is at this one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "policies",
        sa.Column("policy_id", sa.String(64), primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("max_version", sa.Integer, nullable=False),
        sa.Column("next_seq", sa.Integer, nullable=False),
        sa.Column("token", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("info", sa.Text),
        sa.Column("published", sa.Text, nullable=False),
    )
    op.create_table(
        "operations",
        sa.Column("operation_id", sa.String(128), primary_key=True),
        sa.Column("policy_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("seq", sa.Integer),
        sa.Column("request_id", sa.String(256)),
        sa.Column("payload_hash", sa.String(64), nullable=False),
        sa.Column("command", sa.Text),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("plan", sa.Text),
        sa.Column("result", sa.Text),
        sa.Column("version", sa.Integer),
        sa.Column("weights_digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.UniqueConstraint("policy_id", "seq"),
        sa.UniqueConstraint("policy_id", "request_id"),
    )
    op.create_index("operations_by_state", "operations", ["policy_id", "state"])
    op.create_table(
        "checkpoints",
        sa.Column("policy_id", sa.String(64), primary_key=True),
        sa.Column("checkpoint_id", sa.String(64), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("replay_from_seq", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("size_bytes", sa.Integer, nullable=False),
    )
