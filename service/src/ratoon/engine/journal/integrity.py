"""Damage of the database is found before anything is loaded: in rows, and in a SQLite log.

Every write of a row goes through here. Rows are sealed with a digest of their columns, and a row
that does not match its digest is refused by name. Null columns are left out of the digest, so a new
column leaves old rows valid.

SQLite itself cannot detect damage to its log after it was written. It reads the log up to the first
frame with a wrong checksum, and takes the rest for an unfinished transaction. But every commit is
synced before the next transaction begins, so the rest can hold one transaction at most. More means
damage. A `-wal` file is read before anybody opens it, and no state that a power cut leaves is
called damaged. Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
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

from ratoon.errors import ErrorCode, RatoonError

DIGEST = "row_digest"
_HEADER = struct.Struct(">8I")
_FRAME_HEADER_BYTES = 24
# The last bit says whether checksums are over big-endian words.
_MAGIC = 0x377F0682
_DEFAULT_PAGE_BYTES = 4096
_MASK = 2**32 - 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """`commits_F`: at which of the F frames a transaction ends, without those of an earlier use of
    the file. `num_read`: how many frames SQLite reads.
    """

    has_header: bool
    commits_F: NDArray[np.bool_]
    num_read: int


def check_log(database: Path) -> None:
    """Raises INTERNAL for a damaged log of the SQLite file `database`."""
    path = database.with_name(f"{database.name}-wal")
    fault, seen = "", None
    # Read again what another process changed meanwhile.
    while (data := _read(path)) != seen:
        fault, seen = find_damage(data), data
    if fault:
        raise RatoonError(
            ErrorCode.INTERNAL,
            f"database_url: the journal's log {path} is damaged ({fault}): restore it and the "
            "journal from a backup",
            field="database_url",
            got=fault,
            expected="transactions as they were written",
        )


def find_damage(data: bytes) -> str:
    """The fault of a log; "": nothing that a power cut would not explain."""
    log = _parse(data)
    if log is None:
        return ""
    num_lost = int(np.count_nonzero(log.commits_F[log.num_read :]))
    if not log.has_header and num_lost:
        # The header is synced before the first frame is written.
        return f"its header, {num_lost} transactions follow"
    if num_lost > 1:
        return f"after frame {log.num_read}, {num_lost} transactions follow"
    return ""


def _parse(data: bytes) -> _Log | None:
    """Read a log; None: it has no frames."""
    if len(data) < _HEADER.size:
        return None
    magic, _, page_bytes, _, *salts, sum1, sum2 = _HEADER.unpack_from(data)
    words = ">u4" if magic & 1 else "<u4"
    head = _Checksum(np.frombuffer(data[:24], words)[None, :])
    has_header = magic & ~1 == _MAGIC and head.after((0, 0), 0) == (sum1, sum2)
    frame_bytes = _FRAME_HEADER_BYTES + (page_bytes if has_header else _DEFAULT_PAGE_BYTES)
    num_frames = (len(data) - _HEADER.size) // frame_bytes
    if not num_frames:
        return None
    frames_FB = np.frombuffer(data, np.uint8, num_frames * frame_bytes, _HEADER.size)
    frames_FB = frames_FB.reshape(num_frames, frame_bytes)
    # Page, database size after a commit (0: no commit), salts, checksums.
    heads_F6 = np.ascontiguousarray(frames_FB[:, :_FRAME_HEADER_BYTES]).view(">u4")
    is_ours_F = (heads_F6[:, 2:4] == (salts if has_header else heads_F6[0, 2:4])).all(axis=1)
    commits_F = heads_F6[:, 1] != 0
    summed_FB = np.concatenate([frames_FB[:, :8], frames_FB[:, _FRAME_HEADER_BYTES:]], axis=1)
    checksum, sums = _Checksum(summed_FB.view(words)), (sum1, sum2)
    num_read = 0
    for frame in range(num_frames if has_header else 0):
        sums = checksum.after(sums, frame)
        if not is_ours_F[frame] or sums != (heads_F6[frame, 4], heads_F6[frame, 5]):
            break
        # A transaction without a commit frame is not read.
        num_read = frame + 1 if commits_F[frame] else num_read
    return _Log(has_header=has_header, commits_F=commits_F & is_ours_F, num_read=num_read)


class _Checksum:
    """SQLite's running checksum over rows of 32-bit words [F, 2 M].

    For each pair (x, y): s += x + t, t += y + s, all modulo 2**32. That is linear: a row adds a
    weighted sum of its words to a fixed multiple of the previous checksum.
    """

    def __init__(self, rows: NDArray[np.uint32]) -> None:
        num_pairs = rows.shape[1] // 2
        # Powers of ((1, 1), (1, 2)), row by row.
        powers = [(1, 0, 0, 1)]
        for _ in range(num_pairs):
            a, b, c, d = powers[-1]
            powers.append(
                ((a + c) & _MASK, (b + d) & _MASK, (a + 2 * c) & _MASK, (b + 2 * d) & _MASK)
            )
        self._power = powers[-1]
        a_M, b_M, c_M, d_M = np.array(powers[-2::-1], np.uint32).T
        x_FM, y_FM = (rows[:, start::2].astype(np.uint32) for start in (0, 1))
        self._sums = (
            (x_FM * (a_M + b_M) + y_FM * b_M).sum(axis=1, dtype=np.uint32),
            (x_FM * (c_M + d_M) + y_FM * d_M).sum(axis=1, dtype=np.uint32),
        )

    def after(self, before: tuple[int, int], row: int) -> tuple[int, int]:
        """The checksum of a row whose predecessor has the checksum `before`."""
        (a, b, c, d), (s, t) = self._power, before
        s_row, t_row = (int(sums[row]) for sums in self._sums)
        return (a * s + b * t + s_row) & _MASK, (c * s + d * t + t_row) & _MASK


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
