"""`build_forest` against a trie of Python tuples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import Forest
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.raw import RawGroup
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, random_batch, random_groups, rollout
from tests.rollout import oracle
from tests.rollout.oracle import Prefix
from tests.rollout.strategies import CHECKED, batches, kept_masks


def _forest(batch: RolloutBatch) -> Forest:
    return build_forest(batch, sort_sequences(batch), None)


def _path(forest: Forest, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(forest.node_parent[node])
    return path[::-1]


def _packed_path(forest: Forest, node: int) -> list[int]:
    """Packed indexes from the root to the last token of `node`."""
    return [
        k
        for part in _path(forest, node)
        for k in range(forest.node_start[part], forest.node_stop[part])
    ]


def _prefix_of_packed(batch: RolloutBatch, forest: Forest) -> dict[int, Prefix]:
    """The prefix that each packed token stands for, found along the paths of the sequences."""
    found: dict[int, Prefix] = {}
    for place, s in enumerate(forest.sequences.tolist()):
        path = _packed_path(forest, int(forest.sequence_node[place]))
        for k, prefix in zip(path, oracle.prefixes(batch, s), strict=True):
            assert found.setdefault(k, prefix) == prefix
    return found


@CHECKED
@given(batch=batches())
def test_a_forest_is_the_trie_of_its_sequences(batch: RolloutBatch) -> None:
    forest = _forest(batch)
    found = _prefix_of_packed(batch, forest)
    _every_sequence_is_readable_along_its_path(batch, forest)
    _packed_tokens_are_the_distinct_prefixes(batch, forest, found)
    _nodes_are_maximal_runs_of_the_same_sequences(batch, forest, found)
    _the_mask_is_the_ancestor_relation(forest, found)
    _depth_is_the_position_on_the_path(forest, found)
    _siblings_are_heaviest_first_with_ties_in_request_order(forest)
    _nodes_nest_in_packed_order(forest)


def _every_sequence_is_readable_along_its_path(batch: RolloutBatch, forest: Forest) -> None:
    for s, tokens in enumerate(oracle.sequences(batch)):
        path = _packed_path(forest, int(forest.sequence_node[s]))
        assert tuple(forest.tokens[path].tolist()) == tokens
        assert forest.sequence_length[s] == len(tokens)


def _packed_tokens_are_the_distinct_prefixes(
    batch: RolloutBatch, forest: Forest, found: dict[int, Prefix]
) -> None:
    """Minimal packing: no prefix twice, none missing, none that no sequence has."""
    assert sorted(found) == list(range(forest.num_tokens))
    assert len(set(found.values())) == len(found)
    assert set(found.values()) == set(oracle.holders(batch, range(batch.num_sequences)))


def _nodes_are_maximal_runs_of_the_same_sequences(
    batch: RolloutBatch, forest: Forest, found: dict[int, Prefix]
) -> None:
    held = oracle.holders(batch, range(batch.num_sequences))
    sets = [frozenset(held[found[k]]) for k in range(forest.num_tokens)]
    for node, parent in enumerate(forest.node_parent.tolist()):
        own = range(forest.node_start[node], forest.node_stop[node])
        assert len(own) > 0
        assert len({sets[k] for k in own}) == 1
        if parent >= 0:
            assert sets[forest.node_stop[parent] - 1] > sets[own[0]]


def _the_mask_is_the_ancestor_relation(forest: Forest, found: dict[int, Prefix]) -> None:
    """q attends k exactly where k's prefix is a prefix of q's: k <= q < end[k]."""
    end = np.repeat(forest.node_end, forest.node_stop - forest.node_start)
    q, k = np.indices((forest.num_tokens, forest.num_tokens))
    mask = (k <= q) & (q < end[None, :])
    for row in range(forest.num_tokens):
        temperature, tokens = found[row]
        expected = [
            found[column] == (temperature, tokens[: len(found[column][1])])
            for column in range(forest.num_tokens)
        ]
        assert mask[row].tolist() == expected


def _depth_is_the_position_on_the_path(forest: Forest, found: dict[int, Prefix]) -> None:
    for k, (_, tokens) in found.items():
        node = int(np.searchsorted(forest.node_start, k, side="right")) - 1
        assert forest.node_depth[node] + k - forest.node_start[node] == len(tokens) - 1


def _siblings_are_heaviest_first_with_ties_in_request_order(forest: Forest) -> None:
    weight = forest.node_end - forest.node_start
    first: dict[int, int] = {}
    for s, node in enumerate(forest.sequence_node.tolist()):
        for above in _path(forest, node):
            first[above] = min(first.get(above, s), s)
    last_key: dict[int, tuple[int, int]] = {}
    for node, parent in enumerate(forest.node_parent.tolist()):
        key = (-int(weight[node]), first[node])
        assert last_key.get(parent, key) <= key
        last_key[parent] = key


def _nodes_nest_in_packed_order(forest: Forest) -> None:
    assert forest.node_start.tolist() == [0, *forest.node_stop.tolist()][: len(forest.node_start)]
    for node, parent in enumerate(forest.node_parent.tolist()):
        inside = [m for m in range(len(forest.node_start)) if node in _path(forest, m)]
        assert forest.node_end[node] == forest.node_stop[max(inside)]
        assert parent < node


def test_equal_prefix_and_empty_sequences_end_where_they_should() -> None:
    batch = validate_groups(
        [
            group([7, 8], [rollout([1, 2, 3]), rollout([1, 2, 3]), rollout([1]), rollout([])]),
            group([], [rollout([])], "empty"),
        ],
        limits(),
    )
    forest = _forest(batch)
    assert forest.tokens.tolist() == [7, 8, 1, 2, 3]
    assert forest.node_start.tolist() == [0, 2, 3]
    assert forest.sequence_node.tolist() == [2, 2, 1, 0, -1]
    assert forest.node_end.tolist() == [5, 5, 5]


def test_the_heaviest_child_comes_first_whatever_the_request_order() -> None:
    responses = [[1], [2, 2], [3, 3, 3], [4, 4]]
    batch = validate_groups([group([9], [rollout(r) for r in responses])], limits())
    assert _forest(batch).tokens.tolist() == [9, 3, 3, 3, 2, 2, 4, 4, 1]


def test_a_system_prompt_is_shared_between_groups() -> None:
    batch = validate_groups(
        [
            group([5, 5, 5, 1], [rollout([1, 1])], "a"),
            group([5, 5, 5, 2], [rollout([2])], "b"),
        ],
        limits(),
    )
    forest = _forest(batch)
    assert forest.tokens.tolist() == [5, 5, 5, 1, 1, 1, 2, 2]
    assert forest.node_parent.tolist() == [-1, 0, 0]


def test_different_temperatures_never_share() -> None:
    batch = validate_groups(
        [group([1, 2], [rollout([3]), rollout([3], temperature=0.5)])], limits()
    )
    forest = _forest(batch)
    assert forest.num_tokens == 6
    assert forest.node_parent.tolist() == [-1, -1]


@CHECKED
@given(data=st.data())
def test_a_subset_is_the_forest_of_a_batch_of_that_subset(data: st.DataObject) -> None:
    batch = data.draw(batches())
    chosen = np.flatnonzero(data.draw(kept_masks(batch)))
    part = build_forest(batch, sort_sequences(batch), chosen)
    assert part.sequences.tolist() == chosen.tolist()
    if not len(chosen):
        assert (part.num_tokens, len(part.node_start)) == (0, 0)
        return
    alone = _forest(_bare_batch(batch, chosen.tolist()))
    for name in set(Forest.__slots__) - {"sequences"}:
        np.testing.assert_array_equal(getattr(part, name), getattr(alone, name), err_msg=name)


def _bare_batch(batch: RolloutBatch, chosen: list[int]) -> RolloutBatch:
    """The chosen sequences in the given order, each a group of one without a prompt."""
    offsets = np.cumsum([0, *(len(batch.sequence_tokens(s)) for s in chosen)])
    values = {name: getattr(batch, name) for name in RolloutBatch.__slots__}
    values |= {
        "group_ids": tuple(map(str, chosen)),
        "group_offsets": np.arange(len(chosen) + 1),
        "prompt_tokens": np.empty(0, np.int32),
        "prompt_offsets": np.zeros(len(chosen) + 1, np.int64),
        "response_tokens": np.concatenate([batch.sequence_tokens(s) for s in chosen]),
        "response_offsets": offsets,
        "temperature": batch.temperature[chosen],
    }
    return RolloutBatch(**values)


@CHECKED
@given(batch=batches(), seed=st.integers(0, 99))
def test_another_request_order_moves_equally_heavy_siblings_only(
    batch: RolloutBatch, seed: int
) -> None:
    forest = _forest(batch)
    shuffled = np.random.default_rng(seed).permutation(batch.num_sequences).tolist()
    other = _forest(_bare_batch(batch, shuffled))
    assert _shape(forest) == _shape(other)
    # Each sequence still ends at a node of the same depth and weight.
    for place, s in enumerate(shuffled):
        a, b = int(forest.sequence_node[s]), int(other.sequence_node[place])
        if a >= 0:
            assert forest.node_depth[a] == other.node_depth[b]
            assert forest.node_end[a] - forest.node_start[a] == (
                other.node_end[b] - other.node_start[b]
            )


def _shape(forest: Forest) -> list[object]:
    """The trees as nested values, siblings sorted: what does not depend on the request order."""
    nodes = range(len(forest.node_start))
    below: dict[int, list[object]] = {node: [] for node in [-1, *nodes]}
    for node in reversed(nodes):
        tokens = tuple(forest.tokens[forest.node_start[node] : forest.node_stop[node]].tolist())
        below[int(forest.node_parent[node])].append((tokens, sorted(below[node], key=repr)))
    return sorted(below[-1], key=repr)


def test_conversations_branch_at_depth_three() -> None:
    """The builder's trees are trees: a path of at least 3 forks, and every rollout on it."""
    groups: list[RawGroup] = random_groups(
        np.random.default_rng(5), num_groups=1, kinds=["tree"], vocab_size=1000
    )
    forest = _forest(validate_groups(groups, limits(vocab_size=1000)))
    depths = [len(_path(forest, int(node))) for node in forest.sequence_node]
    assert max(depths) >= 4
    assert forest.num_tokens < forest.sequence_length.sum()


def test_random_batches_pack_minimally() -> None:
    for seed in range(10):
        batch = random_batch(np.random.default_rng(seed), vocab_size=4)
        assert _forest(batch).num_tokens == oracle.num_packed(batch, range(batch.num_sequences))
