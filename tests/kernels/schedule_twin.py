"""What the CUDA kernels do with a packed schedule, pair by pair, in Python.

It reads the table and the header alone, as the kernels do, and counts how often each pair of a
query row and a key row is computed. Keys that only fill the last tile up are counted as well.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ratoon_kernels import Span
from ratoon_kernels.schedule import ScheduleHeader, Section, WorkSections

Counts = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32]


class Twin:
    """The forward and the backward over one packed schedule.

    `counts` of both are int64 [Q, key tiles * tile_size].
    """

    def __init__(self, table: IntArray, header: ScheduleHeader, *, tile: int, step: int) -> None:
        self.table, self.header, self.tile, self.step = table, header, tile, step
        end = self.rows(header.end, 1)[:, 0]
        q = np.arange(header.num_queries)[:, None]
        k = np.arange(len(end))[None, :]
        self.is_attended = (k - header.delta <= q) & (q < end)
        self.is_windowed = header.start.count > 0
        if self.is_windowed:
            start = self.rows(header.start, 1)[:, 0]
            num_tiles = -(-header.num_queries // tile)
            assert len(start) >= num_tiles * tile, "tiles are copied whole"
            self.num_starts = len(start)
            self.is_attended &= k >= start[: header.num_queries, None]

    def rows(self, section: Section, width: int) -> IntArray:
        assert section.offset % 4 == 0, "kernels read vectors of 16 bytes"
        stop = section.offset + section.count * width
        return self.table[section.offset : stop].reshape(section.count, width)

    def forward(self) -> Counts:
        counts = np.zeros(self.is_attended.shape, np.int64)
        runs = self.rows(self.header.runs, 2).tolist()
        written: list[int] = []
        for query_tile, begin, stop, num_tiles in self.rows(self.header.forward_items, 4).tolist():
            written.append(query_tile)
            walked = [tile for run in runs[begin:stop] for tile in _tiles_of_run(*run)]
            assert len(walked) == num_tiles
            for key_tile, is_full in walked:
                first = query_tile * self.tile
                self._compute(counts, first, self.tile, key_tile, is_full)
                reached = counts[first : first + self.tile, self._columns(key_tile)]
                assert not self.is_windowed or reached.any(), "what is out of reach is left out"
        num_query_tiles = -(-self.header.num_queries // self.tile)
        assert sorted(written) == list(range(num_query_tiles)), "every output row is written once"
        return counts

    def backward(self, level: WorkSections) -> Counts:
        """The deterministic backward: each piece of a split key tile has a slot of its own."""
        pieces = self.rows(level.pieces, 8).tolist()
        written = sorted(piece[3] for piece in pieces if piece[3] >= 0)
        assert written == list(range(level.num_slots)), "a slot belongs to one piece"
        assert all(row[2] > 1 for row in self.rows(level.split_tiles, 4).tolist())
        return self._sweep(level)

    def backward_with_dq(self) -> Counts:
        """The pieces of a split key tile add to one slot."""
        level = self.header.sweep
        longest = self.rows(level.pieces, 8)[:, 6].tolist()
        assert sorted(longest) == list(range(len(longest))), "the last kv head takes each piece"
        assert all(row[2] == 1 for row in self.rows(level.split_tiles, 4).tolist())
        return self._sweep(level)

    def _sweep(self, level: WorkSections) -> Counts:
        shape = self.is_attended.shape
        counts = np.zeros(shape, np.int64)
        slots = np.zeros((level.num_slots, shape[0], self.tile), np.int64)
        whole: list[int] = []
        for key_tile, start, stop, slot, full_start, full_stop, _, zero in self.rows(
            level.pieces, 8
        ).tolist():
            assert start < stop
            assert -1 <= slot < level.num_slots
            assert zero == 0
            piece = np.zeros(shape, np.int64)
            for row in range(start, stop, self.step):
                is_full = full_start <= row and row + self.step <= full_stop
                assert not self.is_windowed or row + self.step <= self.num_starts
                self._compute(piece, row, self.step, key_tile, is_full)
            columns = self._columns(key_tile)
            if slot < 0:
                whole.append(key_tile)
                counts[:, columns] = piece[:, columns]
            else:
                slots[slot] += piece[:, columns]
        read: list[int] = []
        for key_tile, first, num_slots, zero in self.rows(level.split_tiles, 4).tolist():
            assert zero == 0
            whole.append(key_tile)
            read += range(first, first + num_slots)
            columns = self._columns(key_tile)
            counts[:, columns] = slots[first : first + num_slots].sum(axis=0)
        assert read == list(range(level.num_slots)), "a slot is added up once"
        assert len(set(whole)) == len(whole), "a key tile is written once"
        return counts

    def _columns(self, key_tile: int) -> slice:
        return slice(key_tile * self.tile, (key_tile + 1) * self.tile)

    def _compute(
        self, counts: Counts, first_row: int, num_rows: int, key_tile: int, is_full: bool
    ) -> None:
        rows = slice(first_row, first_row + num_rows)  # Rows past the last query are dropped.
        columns = self._columns(key_tile)
        assert first_row < self.header.num_queries
        attended = self.is_attended[rows, columns]
        assert attended.shape[1] == self.tile
        # A range of query rows under a window tells only its first full tiles.
        assert is_full or not attended.all() or self.is_windowed, "a full tile pair needs no mask"
        counts[rows, columns] += True if is_full else attended


def _tiles_of_run(first: int, code: int) -> Iterator[tuple[int, bool]]:
    for tile in range(first, first + code // 2):
        yield tile, bool(code % 2)


def random_spans(rng: np.random.Generator, num_tokens: int) -> tuple[Span, Span]:
    """Packed ranges of queries and of keys: any two, or of the kinds that callers have."""
    a, b, c, d = sorted(rng.integers(0, num_tokens + 1, 4).tolist())
    kinds = (
        (Span(b, d), Span(a, c)),
        (Span(a, c), Span(b, d)),
        (Span(a, d), Span(b, c)),
        (Span(b, c), Span(a, d)),
        (Span(c, d), Span(0, c)),  # A wave against its cached prefix.
        (Span(c, d), Span(a, b)),
        (Span(a, b), Span(c, d)),  # No query comes after any key.
        (Span(a, b), Span(a, b)),
        (Span(a, a), Span(b, d)),
        (Span(b, d), Span(a, a)),
    )
    return kinds[int(rng.integers(len(kinds)))]
