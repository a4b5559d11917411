"""Kinds of tile pairs against their definition, one pair at a time."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from ratoon_kernels import Span
from ratoon_kernels.schedule import build_schedule
from ratoon_kernels.tiles import Sweeps, TileTable, reduce_key_tiles, sweep_query_tiles
from tests.kernels.forests import NAMED, Forest, random_forests, star
from tests.kernels.schedule_twin import random_spans

SKIP, PARTIAL, FULL = 0, 1, 2

Kinds = npt.NDArray[np.int64]


def _kinds_by_formula(
    forest: Forest, queries: Span, keys: Span, query_tile: int, key_tile: int
) -> Kinds:
    """kinds[query tile, key tile], in packed indices, which know no `delta`."""
    end = forest.layout().end_T.numpy()
    query_starts = range(queries.start, queries.stop, query_tile)
    key_starts = range(keys.start, keys.stop, key_tile)
    kinds = np.full((len(query_starts), len(key_starts)), SKIP)
    for (i, q0), (j, k0) in itertools.product(enumerate(query_starts), enumerate(key_starts)):
        q1, k1 = min(q0 + query_tile, queries.stop), min(k0 + key_tile, keys.stop)
        least, greatest = end[k0:k1].min(), end[k0:k1].max()
        if k0 >= q1 or greatest <= q0:
            continue
        is_whole = k1 - k0 == key_tile
        kinds[i, j] = FULL if is_whole and k1 - 1 <= q0 and least >= q1 else PARTIAL
    return kinds


def _kinds_by_runs(table: TileTable, num_key_tiles: int) -> Kinds:
    kinds = np.full((table.num_query_tiles, num_key_tiles), SKIP)
    assert table.run_offsets[-1] == len(table.run_start)
    for tile in range(table.num_query_tiles):
        last_stop = 0
        for run in range(table.run_offsets[tile], table.run_offsets[tile + 1]):
            start, stop = int(table.run_start[run]), int(table.run_stop[run])
            assert last_stop <= start < stop, "runs are in key order and not empty"
            assert table.run_is_full[run] or stop == start + 1, "partial tiles come one by one"
            if table.run_is_full[run] and last_stop == start and start > 0:
                assert kinds[tile, start - 1] != FULL, "adjoining full tiles are one run"
            kinds[tile, start:stop] = FULL if table.run_is_full[run] else PARTIAL
            last_stop = stop
    return kinds


def _kinds_by_sweeps(sweeps: Sweeps, num_query_tiles: int) -> Kinds:
    kinds = np.full((num_query_tiles, len(sweeps.start_B)), SKIP)
    for j in range(len(sweeps.start_B)):
        full_start, full_stop = sweeps.full_start_B[j], sweeps.full_stop_B[j]
        assert 0 <= sweeps.start_B[j] <= full_start <= full_stop <= sweeps.stop_B[j]
        assert sweeps.stop_B[j] <= num_query_tiles
        kinds[sweeps.start_B[j] : sweeps.stop_B[j], j] = PARTIAL
        kinds[full_start:full_stop, j] = FULL
    return kinds


def _check(forest: Forest, queries: Span, keys: Span, size: int, query_size: int) -> None:
    end = forest.layout().end_T.numpy()
    schedule = build_schedule(end, queries, keys, tile_size=size)
    kinds = _kinds_by_formula(forest, queries, keys, size, size)
    np.testing.assert_array_equal(_kinds_by_runs(schedule.tiles, kinds.shape[1]), kinds)
    for rows in (size, query_size):
        key_tiles = reduce_key_tiles(
            schedule.end, size=size, num_queries=len(queries), delta=queries.start - keys.start
        )
        expected = _kinds_by_formula(forest, queries, keys, rows, size)
        got = _kinds_by_sweeps(sweep_query_tiles(key_tiles, rows), len(expected))
        np.testing.assert_array_equal(got, expected)


def test_kinds_are_the_definition_on_random_forests() -> None:
    rng = np.random.default_rng(0)
    for forest in random_forests(seed=1, count=100, max_nodes=12, max_length=8):
        whole = Span(0, forest.num_tokens)
        size, query_size = (int(x) for x in rng.integers(2, 9, 2))
        _check(forest, whole, whole, size, query_size)
        _check(forest, *random_spans(rng, forest.num_tokens), size, query_size)


@pytest.mark.parametrize("size", [2, 3, 8, 128])
@pytest.mark.parametrize("name", NAMED)
def test_kinds_are_the_definition_on_named_forests(name: str, size: int) -> None:
    whole = Span(0, NAMED[name].num_tokens)
    if NAMED[name].num_tokens <= 50 * size:
        _check(NAMED[name], whole, whole, size, 5 * size // 8 + 1)


def test_a_shared_prompt_is_one_full_run_of_every_response_tile() -> None:
    forest = star(64, 4, 8)
    whole = Span(0, forest.num_tokens)
    table = build_schedule(forest.layout().end_T.numpy(), whole, whole, tile_size=4).tiles

    def runs_of(tile: int) -> list[tuple[int, int, bool]]:
        runs = range(table.run_offsets[tile], table.run_offsets[tile + 1])
        return [
            (int(table.run_start[run]), int(table.run_stop[run]), bool(table.run_is_full[run]))
            for run in runs
        ]

    assert runs_of(15) == [(0, 15, True), (15, 16, False)]
    assert runs_of(17) == [(0, 17, True), (17, 18, False)]
    assert runs_of(18) == [(0, 16, True), (18, 19, False)]
    assert runs_of(19) == [(0, 16, True), (18, 19, True), (19, 20, False)]


def test_a_cached_prefix_is_full_where_the_diagonal_was() -> None:
    """Queries one token short of a tile behind the keys see a whole tile from their first row."""
    end = np.full(11, 11, np.int32)
    table = build_schedule(end, Span(3, 11), Span(0, 11), tile_size=4).tiles
    runs = list(zip(table.run_start, table.run_stop, table.run_is_full, strict=True))
    assert runs == [(0, 1, True), (1, 2, False), (0, 2, True), (2, 3, False)]
    assert table.run_offsets.tolist() == [0, 2, 4]


def test_a_forest_of_no_tokens_has_no_tiles() -> None:
    table = build_schedule(np.zeros(0, np.int32), Span(0, 0), Span(0, 0)).tiles
    assert (table.num_query_tiles, table.run_offsets.tolist(), len(table.run_start)) == (0, [0], 0)
