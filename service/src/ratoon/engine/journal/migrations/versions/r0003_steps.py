"""The figures of every step, and lists of operations by time."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from ratoon.engine.journal.integrity import insert_row
from ratoon.engine.journal.steps import FIGURES, pack

revision = "0003"
down_revision = "0002"

_WIDE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_KINDS = ("update", "optim_step", "load_checkpoint", "import_weights")
_OPERATIONS = sa.table(
    "operations",
    *map(sa.column, ("operation_id", "policy_id", "kind", "seq", "state", "result", "version")),
    sa.column("finished_at"),
)
_PORTION_ROWS = 500


def upgrade() -> None:
    op.create_index(
        "operations_of_policy_by_time", "operations", ["policy_id", "created_at", "operation_id"]
    )
    op.create_index("operations_by_time", "operations", ["created_at", "operation_id"])
    steps = op.create_table(
        "steps",
        sa.Column("policy_id", sa.String(64), primary_key=True),
        sa.Column("seq", _WIDE, primary_key=True, autoincrement=False),
        sa.Column("version", _WIDE, nullable=False),
        sa.Column("finished_at", sa.Float, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("figures", sa.LargeBinary),
        sa.Column("warnings", sa.Text),
        sa.Column("skip_reason", sa.String(32)),
        sa.Column("row_digest", sa.String(32), nullable=False, server_default=""),
        sqlite_with_rowid=False,
    )
    _fill(op.get_bind(), steps)


def _fill(connection: sa.Connection, steps: sa.Table) -> None:
    """Add the steps that there are. A damaged row is left for the check that every start makes."""
    columns = _OPERATIONS.c
    query = (
        sa.select(_OPERATIONS)
        .where(columns.state == "applied", columns.kind.in_(_KINDS))
        .order_by(columns.operation_id)
        .limit(_PORTION_ROWS)
    )
    last = ""
    while True:
        rows = connection.execute(query.where(columns.operation_id > last)).mappings().all()
        for row in rows:
            try:
                values = _step_of(row)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            insert_row(connection, steps, values)
        if not rows:
            return
        last = rows[-1]["operation_id"]


def _step_of(row: sa.RowMapping) -> dict[str, Any]:
    copied = ("policy_id", "seq", "version", "finished_at", "kind")
    values = {name: row[name] for name in copied} | {"figures": None, "skip_reason": None}
    report: dict[str, Any] | None = json.loads(row["result"]).get("report")
    if report is not None:
        seconds: dict[str, Any] = report.get("seconds") or {}
        figures: dict[str, float | None] = {
            name: seconds.get(name.removeprefix("seconds."))
            if name.startswith("seconds.")
            else report.get(name)
            for name in FIGURES
        }
        values |= {"figures": pack(figures), "skip_reason": report.get("skip_reason")}
    return values | {"warnings": None}
