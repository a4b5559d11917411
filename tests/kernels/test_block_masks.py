"""The tile lists of block-sparse libraries, against masks made from parent pointers."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ratoon_kernels import BackendUnavailableError
from ratoon_kernels.registry import TREE_ATTENTION_BACKENDS, TreeAttentionBackend
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention import block_plan
from ratoon_kernels.tree_attention.block_plan import (
    BlockGrid,
    BlockPlan,
    TileLists,
    build_block_plan,
)
from ratoon_kernels.tree_attention.operands import Operands
from tests.kernels.forests import NAMED, Forest, forest_from, random_forests, random_problem, star

SKIP, PARTIAL, FULL = 0, 1, 2


def _kinds(lists: TileLists, num_columns: int) -> npt.NDArray[np.int64]:
    """kinds[tile, tile of the other side] as listed; checks that lists rise and do not meet."""
    kinds = np.full((lists.partial_count_11R.shape[2], num_columns), SKIP)
    for counts, indices, kind in (
        (lists.partial_count_11R, lists.partial_index_11RW, PARTIAL),
        (lists.full_count_11R, lists.full_index_11RW, FULL),
    ):
        assert counts.dtype is indices.dtype is torch.int32
        rows = zip(counts[0, 0].tolist(), indices[0, 0].numpy(), strict=True)
        for row, (count, index) in enumerate(rows):
            listed = index[:count]
            assert (np.diff(listed) > 0).all()
            assert (kinds[row, listed] == SKIP).all()
            assert (index[count:] == 0).all()
            kinds[row, listed] = kind
    return kinds


def _check(
    forest: Forest, queries: Span, keys: Span, grid: BlockGrid, window: int | None = None
) -> BlockPlan:
    nodes = forest.layout().node_table_M4.numpy()
    mask = build_block_plan(nodes, queries, keys, grid, "cpu", window)
    attended = np.zeros((grid.padded_queries, grid.padded_keys), np.bool_)
    part = forest.mask(window)[queries.start : queries.stop, keys.start : keys.stop]
    attended[: len(queries), : len(keys)] = part
    query, key = np.arange(grid.padded_queries)[:, None], np.arange(grid.padded_keys)
    is_seen = (key - int(mask.delta_1) <= query) & (query < mask.end_S.numpy())
    if mask.start_Q is not None:
        is_seen &= key >= mask.start_Q.numpy()[:, None]
    np.testing.assert_array_equal(is_seen, attended)
    num_key_tiles = grid.padded_keys // grid.key_tile
    num_backward_tiles = -(-grid.padded_queries // grid.backward_query_tile)
    for kinds, size in (
        (_kinds(mask.of_queries, num_key_tiles), grid.query_tile),
        (_kinds(mask.of_keys, num_backward_tiles).T, grid.backward_query_tile),
    ):
        assert kinds.shape == (-(-grid.padded_queries // size), num_key_tiles)
        for (i, j), kind in np.ndenumerate(kinds):
            rows = slice(i * size, min((i + 1) * size, len(queries)))
            tile = attended[rows, j * grid.key_tile : (j + 1) * grid.key_tile]
            if kind == FULL:
                assert tile.size
                assert tile.all()
            elif kind == SKIP:
                assert not tile.any()
            elif mask.start_Q is not None:
                assert tile.any()
    return mask


def _grid(queries: Span, keys: Span, rng: np.random.Generator) -> BlockGrid:
    key_tile, query_tile, backward_query_tile = (int(x) for x in rng.integers(1, 9, 3))
    return BlockGrid(
        key_tile=key_tile,
        query_tile=query_tile,
        backward_query_tile=backward_query_tile,
        padded_queries=len(queries) + int(rng.integers(0, 20)),
        padded_keys=(-(-len(keys) // key_tile) + int(rng.integers(0, 3))) * key_tile,
        is_full_width=bool(rng.integers(0, 2)),
    )


def test_lists_cover_the_mask_of_any_two_ranges_on_any_grid() -> None:
    rng = np.random.default_rng(0)
    num_checked = 0
    for index, forest in enumerate(random_forests(seed=1, count=150, max_nodes=12, max_length=9)):
        cuts = np.sort(rng.integers(0, forest.num_tokens + 1, (2, 2)), axis=1)
        if index % 3 == 0:
            cuts[:] = (0, forest.num_tokens)
        queries, keys = (Span(int(start), int(stop)) for start, stop in cuts)
        if len(queries) and len(keys):
            grid = _grid(queries, keys, rng)
            _check(forest, queries, keys, grid)
            _check(forest, queries, keys, grid, int(rng.integers(1, 30)))
            num_checked += 1
    assert num_checked > 120


def test_full_width_depends_on_the_padded_lengths_alone() -> None:
    shapes = set()
    for forest in (star(64, 4, 8), forest_from([-1], [5]), NAMED["two_trees"]):
        tokens = Span(0, forest.num_tokens)
        grid = BlockGrid(
            key_tile=8, query_tile=8, backward_query_tile=8, padded_queries=256, padded_keys=512,
            is_full_width=True,
        )  # fmt: skip
        mask = _check(forest, tokens, tokens, grid)
        lists = (mask.of_queries, mask.of_keys)
        shapes.add(
            tuple((x.partial_index_11RW.shape[2:], x.full_index_11RW.shape[2:]) for x in lists)
        )
    assert shapes == {(((32, 64), (32, 64)), ((64, 32), (64, 32)))}


def test_a_shared_prompt_is_full_to_every_response_and_listed_no_wider() -> None:
    forest = star(64, 4, 8)
    tokens = Span(0, forest.num_tokens)
    grid = BlockGrid(
        key_tile=8, query_tile=8, backward_query_tile=8, padded_queries=96, padded_keys=96,
        is_full_width=False,
    )  # fmt: skip
    mask = _check(forest, tokens, tokens, grid)
    np.testing.assert_array_equal(mask.of_queries.full_count_11R[0, 0], [*range(8), 8, 8, 8, 8])
    np.testing.assert_array_equal(mask.of_queries.partial_index_11RW[0, 0], np.arange(12)[:, None])
    assert mask.of_queries.full_index_11RW.shape == (1, 1, 12, 8)
    np.testing.assert_array_equal(
        mask.of_keys.full_count_11R[0, 0], [*range(11, 3, -1), 0, 0, 0, 0]
    )


def _operands(forest: Forest, queries: Span, keys: Span) -> Operands:
    problem = random_problem(
        forest.num_tokens, heads=2, kv_heads=1, head_dim=8, dtype=torch.bfloat16, seed=0
    )
    return Operands(
        q_QNH=problem.q_TNH[queries.start : queries.stop],
        k_SKH=problem.k_TKH[keys.start : keys.stop],
        v_SKH=problem.v_TKH[keys.start : keys.stop],
        end_T=forest.layout().end_T,
        plan=[forest.layout().node_table_M4],
        scale=1.0,
        window=None,
        queries=queries,
        keys=keys,
        is_deterministic=False,
    )


def test_a_plan_is_kept_for_equal_forests_and_made_for_others() -> None:
    grid = BlockGrid(
        key_tile=16, query_tile=16, backward_query_tile=16, padded_queries=64, padded_keys=64,
        is_full_width=True,
    )  # fmt: skip
    block_plan._build.cache_clear()
    tokens, later = Span(0, 60), Span(10, 60)
    forests = (star(20, 4, 10), star(20, 2, 20), star(20, 4, 10))
    with torch.inference_mode():
        first, other, again = (
            block_plan.block_plan(_operands(forest, tokens, tokens), grid) for forest in forests
        )
    part = block_plan.block_plan(_operands(forests[0], later, tokens), grid)
    assert again is first
    for one, two in itertools.combinations((first, other, part), 2):
        assert not torch.equal(one.end_S, two.end_S)
    assert int(part.delta_1) == 10
    assert not first.end_S.is_inference(), "it could not be saved for a backward"


@pytest.mark.parametrize(
    "backend", [TREE_ATTENTION_BACKENDS["flash"], TREE_ATTENTION_BACKENDS["flex"]]
)
def test_a_forest_past_the_limit_is_refused_with_its_size(
    backend: TreeAttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_plan, "MAX_TOKENS", 100)
    layout = star(50, 3, 20).layout()
    for refused in (
        lambda: backend.plan(layout),
        lambda: backend.partial_plan(layout, Span(0, 101), Span(0, 5)),
    ):
        with pytest.raises(BackendUnavailableError, match="at most 100 are served"):
            refused()
    assert backend.partial_plan(layout, Span(0, 100), Span(10, 110)) == [layout.node_table_M4]
