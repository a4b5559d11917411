import itertools

import numpy as np
import numpy.typing as npt
import pytest

from ratoon_kernels import TileTable, build_tile_table
from tests.kernels.forests import NAMED, Forest, random_forests, star

SKIP, PARTIAL, FULL = 0, 1, 2


def _kinds_by_formula(end: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int64]:
    """kinds[query tile, key tile], by the definitions, one pair at a time."""
    starts = list(range(0, len(end), size))
    kinds = np.full((len(starts), len(starts)), SKIP)
    for (i, q0), (j, k0) in itertools.product(enumerate(starts), enumerate(starts)):
        q1, k1 = min(q0 + size, len(end)), min(k0 + size, len(end))
        least, greatest = end[k0:k1].min(), end[k0:k1].max()
        if k0 >= q1 or greatest <= q0:
            continue
        # The diagonal stays partial even as one token: a ragged tile needs its bounds checked.
        kinds[i, j] = FULL if i != j and k1 - 1 <= q0 and least >= q1 else PARTIAL
    return kinds


def _kinds_by_runs(table: TileTable) -> npt.NDArray[np.int64]:
    kinds = np.full((table.num_tiles, table.num_tiles), SKIP)
    for tile in range(table.num_tiles):
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


def _check(forest: Forest, size: int) -> None:
    end = forest.layout().end_T.numpy()
    mask = forest.mask()
    table = build_tile_table(end, tile_size=size)
    kinds = _kinds_by_runs(table)
    num_tiles = -(-len(end) // size)
    assert table.num_tiles == num_tiles
    np.testing.assert_array_equal(kinds, _kinds_by_formula(end, size))
    for i, j in itertools.product(range(num_tiles), repeat=2):
        attended = mask[i * size : (i + 1) * size, j * size : (j + 1) * size]
        if kinds[i, j] == FULL:
            assert attended.all()
        elif kinds[i, j] == SKIP:
            assert not attended.any()
    for j in range(num_tiles):
        swept = set(np.flatnonzero(kinds[:, j] != SKIP))
        assert swept == set(range(j, table.stop_B[j]))
        assert set(np.flatnonzero(kinds[:, j] == FULL)) == set(range(j + 1, table.full_stop_B[j]))
    query_work = (kinds != SKIP).sum(axis=1)[table.forward_order_B]
    key_work = (kinds != SKIP).sum(axis=0)[table.backward_order_B]
    assert (np.diff(query_work) <= 0).all()
    assert (np.diff(key_work) <= 0).all()
    for order in (table.forward_order_B, table.backward_order_B):
        assert sorted(order) == list(range(num_tiles))


@pytest.mark.parametrize("size", [4, 8])
def test_runs_and_stops_are_the_classification_on_random_forests(size: int) -> None:
    for forest in random_forests(seed=size, count=1000, max_nodes=12, max_length=8):
        _check(forest, size)


@pytest.mark.parametrize("size", [1, 3, 8, 128])
@pytest.mark.parametrize("name", NAMED)
def test_runs_and_stops_are_the_classification_on_named_forests(name: str, size: int) -> None:
    if NAMED[name].num_tokens <= 100 * size:
        _check(NAMED[name], size)


def test_a_shared_prompt_is_one_full_run_of_every_response_tile() -> None:
    forest = star(64, 4, 8)
    table = build_tile_table(forest.layout().end_T.numpy(), tile_size=4)

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


def test_a_forest_of_no_tokens_has_no_tiles() -> None:
    table = build_tile_table(np.zeros(0, np.int32), tile_size=128)
    assert (table.num_tiles, table.run_offsets.tolist(), len(table.run_start)) == (0, [0], 0)
