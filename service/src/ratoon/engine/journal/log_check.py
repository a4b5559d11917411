"""Detects damage to a SQLite log after it was written, which SQLite itself cannot.

Reads a `-wal` file before anybody opens it. No state that a power cut leaves is called damaged.

SQLite reads the log up to the first frame with a wrong checksum, and takes the rest for an
unfinished transaction. But every commit is synced before the next transaction begins, so the rest
can hold one transaction at most. More means damage.

Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError

_HEADER = struct.Struct(">8I")
_FRAME_HEADER_BYTES = 24
# The last bit says whether checksums are over big-endian words.
_MAGIC = 0x377F0682
_DEFAULT_PAGE_BYTES = 4096
_MASK = 2**32 - 1


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
