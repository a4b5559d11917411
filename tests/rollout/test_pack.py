"""`pack` against loops over sequences, and the packing traps that others fell in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import PackedBatch
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, random_batch, rollout
from tests.rollout import oracle
from tests.rollout.strategies import CHECKED, batches, kept_masks


def _pack(batch: RolloutBatch) -> PackedBatch:
    return pack(batch, build_forest(batch, sort_sequences(batch), None), batch.loss_mask)


def _visible(packed: PackedBatch, row: int) -> list[int]:
    """Packed indexes that `row` attends to, by the mask."""
    k = np.arange(packed.forest.num_tokens)
    return np.flatnonzero((k <= row) & (row < packed.end)).tolist()


def _assert_terms(batch: RolloutBatch, packed: PackedBatch) -> None:
    """What each term's row sees is exactly what comes before the term's token in its sequence."""
    for target, place, j in zip(
        packed.term_target.tolist(),
        packed.term_sequence.tolist(),
        packed.term_token.tolist(),
        strict=True,
    ):
        s = int(packed.forest.sequences[place])
        start = int(batch.response_offsets[s])
        tokens = batch.sequence_tokens(s)
        before = len(tokens) - int(batch.response_offsets[s + 1]) + j
        assert start <= j < batch.response_offsets[s + 1]
        assert packed.target_token[target] == tokens[before] == batch.response_tokens[j]
        row = int(packed.row_index[packed.target_row[target]])
        seen = _visible(packed, row)
        assert packed.forest.tokens[seen].tolist() == tokens[:before].tolist()
        assert packed.position[seen].tolist() == list(range(before))
        assert packed.row_temperature[packed.target_row[target]] == batch.temperature[s]


@CHECKED
@given(data=st.data(), seed=st.integers(0, 99))
def test_every_term_is_predicted_from_what_precedes_it(data: st.DataObject, seed: int) -> None:
    """Columns of some sequences and of some of their tokens; a token's copies are its sequences."""
    batch = data.draw(batches())
    kept = data.draw(kept_masks(batch))
    mask = batch.loss_mask & (np.random.default_rng(seed).random(len(batch.loss_mask)) < 0.7)
    forest = build_forest(batch, sort_sequences(batch), np.flatnonzero(kept))
    packed = pack(batch, forest, mask)
    _assert_terms(batch, packed)
    is_kept = np.repeat(kept, np.diff(batch.response_offsets))
    assert packed.term_token.tolist() == np.flatnonzero(mask & is_kept).tolist()
    count = np.zeros(forest.num_tokens, np.int64)
    for node in forest.sequence_node.tolist():
        while node >= 0:
            count[forest.node_start[node] : forest.node_stop[node]] += 1
            node = int(forest.node_parent[node])
    assert packed.copies.tolist() == count.tolist()
    assert packed.copies.sum() == forest.sequence_length.sum()


@CHECKED
@given(batch=batches())
def test_targets_are_the_distinct_trained_tokens(batch: RolloutBatch) -> None:
    packed = _pack(batch)
    trained = {
        prefix
        for s in range(batch.num_sequences)
        for j, prefix in oracle.response_prefixes(batch, s)
        if batch.loss_mask[j]
    }
    rows = {(temperature, tokens[:-1]) for temperature, tokens in trained}
    assert len(packed.target_token) == len(trained)
    assert len(packed.row_index) == len(rows)
    assert np.all(np.diff(packed.row_index) > 0)
    assert set(packed.term_target.tolist()) == set(range(len(trained)))
    assert set(packed.target_row.tolist()) == set(range(len(rows)))


def test_terms_of_random_conversations() -> None:
    for seed in range(8):
        batch = random_batch(np.random.default_rng(seed), vocab_size=5, temperatures=(1.0, 0.7))
        _assert_terms(batch, _pack(batch))


def test_the_last_prompt_token_predicts_the_first_of_every_response() -> None:
    """Trap 1: the first response token left untrained, or predicted by another row."""
    batch = validate_groups(
        [group([7, 8, 9], [rollout([1, 2]), rollout([3]), rollout([4, 5])])], limits()
    )
    packed = _pack(batch)
    first_terms = np.flatnonzero(np.isin(packed.term_token, batch.response_offsets[:-1]))
    rows = packed.row_index[packed.target_row[packed.term_target[first_terms]]]
    assert rows.tolist() == [2, 2, 2]
    assert packed.forest.tokens[rows].tolist() == [9, 9, 9]
    assert packed.target_token[packed.term_target[first_terms]].tolist() == [1, 3, 4]


def test_tool_tokens_stay_in_the_context() -> None:
    """Trap 5: tool output dropped from the context, the loss mask being taken as the mask."""
    turns = [([1, 2], True), ([50, 51, 52], False), ([3], True)]
    batch = validate_groups([group([9], [rollout(turns)])], limits())
    packed = _pack(batch)
    assert packed.forest.tokens.tolist() == [9, 1, 2, 50, 51, 52, 3]
    assert packed.target_token.tolist() == [1, 2, 3]
    last_row = int(packed.row_index[packed.target_row[2]])
    assert packed.forest.tokens[_visible(packed, last_row)].tolist() == [9, 1, 2, 50, 51, 52]


def test_prompt_rows_but_the_last_predict_nothing() -> None:
    batch = validate_groups([group([1, 2, 3, 4], [rollout([5]), rollout([6])])], limits())
    assert _pack(batch).row_index.tolist() == [3]


def test_positions_are_depths_not_packed_indexes() -> None:
    batch = validate_groups([group([1, 2], [rollout([3, 3]), rollout([4])])], limits())
    packed = _pack(batch)
    assert packed.position.tolist() == [0, 1, 2, 3, 2]
    assert packed.end.tolist() == [5, 5, 4, 4, 5]


def test_dtypes_are_what_the_type_says() -> None:
    packed = _pack(random_batch(np.random.default_rng(0)))
    assert packed.end.dtype == np.int32
    assert packed.copies.dtype == np.int32
    assert packed.row_temperature.dtype == np.float32
    assert packed.forest.tokens.dtype == np.int32
    assert packed.forest.node_parent.dtype == np.int32
    assert packed.forest.sequence_node.dtype == np.int32
    for name in (
        "position",
        "row_index",
        "target_token",
        "target_row",
        "term_target",
        "term_token",
    ):
        assert getattr(packed, name).dtype == np.int64
