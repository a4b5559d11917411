"""Rows sealed with a digest of their columns, so that damaged ones are never loaded.

Every write of a row goes through here, and a row that does not match its digest is refused by name.
Null columns are left out of the digest, so a new column leaves old rows valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import xxhash
from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Insert,
    RowMapping,
    Select,
    Table,
    Update,
    bindparam,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError

from ratoon.engine.journal.connections import is_server_away
from ratoon.errors import ErrorCode, RatoonError

DIGEST = "row_digest"
# Rows that a server sends at a time: a whole table would fill the memory, and take the time of a
# statement.
_PORTION_ROWS = 500


class DamagedRowError(Exception):
    """A row does not match its digest; the message names the table and the row."""


def insert_row(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    connection.execute(_insert(table), {**values, DIGEST: _digest(table, values)})


def lock_row(connection: Connection, table: Table, key: str) -> dict[str, Any] | None:
    """The row of a primary key of one column, its own until the transaction ends; None: no row.

    Raises `DamagedRowError`.
    """
    row = connection.execute(_locked(table), {"key": key}).mappings().first()
    return None if row is None else verified(table, row)


def update_row(
    connection: Connection, table: Table, row: Mapping[str, Any], columns: Mapping[str, Any]
) -> None:
    """Set `columns` of a verified row that the transaction has locked."""
    keys = {f"key_{column.name}": row[column.name] for column in table.primary_key}
    digest = _digest(table, {**row, **columns})
    connection.execute(_update(table), {**keys, **columns, DIGEST: digest})


def update_rows(
    connection: Connection, table: Table, condition: ColumnElement[bool], columns: Mapping[str, Any]
) -> None:
    """Set `columns` of the rows that match `condition`. Raises `DamagedRowError`."""
    rows = connection.execute(select(table).where(condition).with_for_update()).mappings().all()
    for row in rows:
        update_row(connection, table, verified(table, row), columns)


def verified(table: Table, row: RowMapping | Mapping[str, Any]) -> dict[str, Any]:
    """The row's values without its digest. Raises `DamagedRowError`."""
    values = {name: value for name, value in row.items() if name != DIGEST}
    if row[DIGEST] != _digest(table, values):
        key = ", ".join(repr(row[column.name]) for column in table.primary_key)
        raise DamagedRowError(f"row {key} of the table {table.name} is damaged")
    return values


def check_all(connection: Connection, *tables: Table) -> None:
    """Read every row, in portions. Raises INTERNAL naming the first damaged one, or why not.

    Raises `OperationalError` where the server goes away meanwhile.
    """
    portions = {"yield_per": _PORTION_ROWS}
    try:
        for table in tables:
            names = table.c.keys()
            for row in connection.execute(select(table), execution_options=portions):
                verified(table, dict(zip(names, row, strict=True)))
    except (DamagedRowError, DBAPIError) as err:
        if isinstance(err, DBAPIError) and is_server_away(err):
            raise
        fault = str(err.orig) if isinstance(err, DBAPIError) else str(err)
        raise RatoonError(
            ErrorCode.INTERNAL,
            f"database_url: the journal cannot be read ({fault}): restore it from a backup",
            field="database_url",
            got=fault,
            expected="rows as they were written",
        ) from err


def _digest(table: Table, values: Mapping[str, Any]) -> str:
    """Digest of names and values as JSON. Integers given for a float column count as floats.

    A value that JSON cannot hold is not ours: SQLite returns a damaged number as bytes.
    """
    floats = _floats(table)
    fields = {
        name: float(value) if name in floats and isinstance(value, int) else value
        for name, value in values.items()
        if name != DIGEST and value is not None
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=repr)
    return xxhash.xxh3_128_hexdigest(text.encode())


# Statements are built once: building one takes longer than running it.


@cache
def _floats(table: Table) -> frozenset[str]:
    return frozenset(column.name for column in table.c if isinstance(column.type, Float))


@cache
def _insert(table: Table) -> Insert:
    return table.insert()


@cache
def _locked(table: Table) -> Select[Any]:
    (column,) = table.primary_key
    return select(table).where(column == bindparam("key")).with_for_update()


@cache
def _update(table: Table) -> Update:
    """Sets the columns that are named when it is executed."""
    keys = (column == bindparam(f"key_{column.name}") for column in table.primary_key)
    return update(table).where(*keys)
