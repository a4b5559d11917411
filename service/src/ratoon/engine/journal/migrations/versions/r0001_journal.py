"""The journal's tables, and the one row that holds the last fencing token."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from ratoon.engine.journal.integrity import insert_row

revision = "0001"
down_revision = None

# 64 bits: callers choose seqs, and a checkpoint may be larger than 2 GiB.
_WIDE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _policies()
    _operations()
    _checkpoints()
    op.create_table(
        "numerics",
        sa.Column("numerics", sa.String(32), primary_key=True),
        sa.Column("fields", sa.Text, nullable=False),
        _row_digest(),
    )
    tokens = op.create_table(
        "tokens",
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("last", _WIDE, nullable=False),
        _row_digest(),
    )
    insert_row(op.get_bind(), tokens, {"name": "last", "last": 0})


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("policy_id", sa.String(64), primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("version", _WIDE, nullable=False),
        sa.Column("max_version", _WIDE, nullable=False),
        sa.Column("next_seq", _WIDE, nullable=False),
        sa.Column("token", _WIDE, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("info", sa.Text),
        sa.Column("published", sa.Text, nullable=False),
        sa.Column("failure", sa.Text),
        _row_digest(),
    )


def _operations() -> None:
    op.create_table(
        "operations",
        sa.Column("operation_id", sa.String(128), primary_key=True),
        sa.Column("policy_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("seq", _WIDE),
        sa.Column("request_id", sa.String(256)),
        sa.Column("payload_hash", sa.String(64), nullable=False),
        sa.Column("command", sa.Text),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("body_bytes", _WIDE, nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("choices", sa.Text),
        sa.Column("result", sa.Text),
        sa.Column("version", _WIDE),
        sa.Column("weights_digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.Column("numerics", sa.String(32)),
        _row_digest(),
        sa.UniqueConstraint("policy_id", "seq"),
        sa.UniqueConstraint("policy_id", "request_id"),
    )
    is_kept = sa.text("command IS NOT NULL")
    op.create_index(
        "operations_kept",
        "operations",
        ["policy_id", "seq"],
        sqlite_where=is_kept,
        postgresql_where=is_kept,
    )


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("policy_id", sa.String(64), primary_key=True),
        sa.Column("checkpoint_id", sa.String(64), primary_key=True),
        sa.Column("version", _WIDE, nullable=False),
        sa.Column("seq", _WIDE, nullable=False),
        sa.Column("replay_from_seq", _WIDE, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("size_bytes", _WIDE, nullable=False),
        sa.Column("weights_digest", sa.String(64)),
        _row_digest(),
    )


def _row_digest() -> sa.Column[str]:
    return sa.Column("row_digest", sa.String(32), nullable=False, server_default="")
