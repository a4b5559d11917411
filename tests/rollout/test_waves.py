"""`cut_into_stages`: stages that hold their paths, within the budget; and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.planner.waves import (
    cut_into_stages,
    first_misplaced,
    fits_forest,
    peak_states,
    peak_tokens,
    resident_tokens,
)
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import Forest, Stage
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.rollout.stages import num_ancestors
from tests.rollout.strategies import CHECKED, batches


def _forest(batch: RolloutBatch) -> Forest:
    return build_forest(batch, sort_sequences(batch), None)


def _tree(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Forest:
    raws = [rollout(list(response)) for response in responses]
    return _forest(validate_groups([group(list(prompt), raws)], limits()))


def _triples(stages: Sequence[Stage]) -> list[tuple[int, int, int]]:
    return [(stage.start, stage.stop, stage.parent) for stage in stages]


def _paths(forest: Forest) -> list[list[int]]:
    """Packed indexes from the root to the end of each node."""
    paths: list[list[int]] = []
    for start, stop, parent in zip(
        forest.node_start.tolist(),
        forest.node_stop.tolist(),
        forest.node_parent.tolist(),
        strict=True,
    ):
        above = [] if parent < 0 else paths[parent]
        paths.append([*above, *range(start, stop)])
    return paths


@CHECKED
@given(batch=batches(), budget=st.integers(1, 40), small=st.integers(0, 5))
def test_what_a_stage_attends_is_in_it_or_stays(
    batch: RolloutBatch, budget: int, small: int
) -> None:
    """The budget holds but for a single path, and neighbours that would have fitted together are
    together, unless one has waves."""
    forest = _forest(batch)
    stages = cut_into_stages(forest, budget, small)
    assert [t for stage in stages for t in range(stage.start, stage.stop)] == list(
        range(forest.num_tokens)
    )
    home = {t: i for i, stage in enumerate(stages) for t in range(stage.start, stage.stop)}
    paths = _paths(forest)
    last = [path[-1] for path in paths]
    handed = {
        last[parent]
        for node, parent in enumerate(forest.node_parent.tolist())
        if parent >= 0 and home[last[parent]] != home[last[node]]
    }
    most_states = 0
    for path in paths:
        line: set[int] = set()
        index = home[path[-1]]
        while index >= 0:
            line.add(index)
            index = stages[index].parent
        most_states = max(most_states, sum(home[token] in line for token in handed))
        assert {home[t] for t in path} <= line
    assert peak_states(stages, forest) == most_states
    assert fits_forest(stages, forest)
    assert first_misplaced(stages, forest.num_tokens) is None
    assert peak_tokens(stages) <= max(budget, *map(len, paths), 0)
    resident = resident_tokens(stages)
    parents = {stage.parent for stage in stages}
    for index in range(1, len(stages)):
        before, stage = stages[index - 1 : index + 1]
        if before.parent == stage.parent and not parents & {index - 1, index}:
            assert resident[index] + before.num_tokens + stage.num_tokens > budget


def test_a_prompt_stays_while_pairs_of_responses_run() -> None:
    forest = _tree([1] * 10, [[k] * 5 for k in range(2, 6)])
    stages = cut_into_stages(forest, 20, 0)
    assert _triples(stages) == [(0, 10, -1), (10, 20, 0), (20, 30, 0)]
    assert resident_tokens(stages) == [0, 10, 10]
    assert num_ancestors(stages) == [0, 1, 1]
    assert peak_tokens(stages) == 20


# Two turns below a prompt of 4 tokens: one of 3 with three answers of 5, one of 6.
_TWO_TURNS = ([1] * 4, [[2] * 3 + [k] * 5 for k in (3, 4, 5)] + [[6] * 6])


def test_a_subtree_that_does_not_fit_has_a_prefix_of_its_own() -> None:
    stages = cut_into_stages(_tree(*_TWO_TURNS), 13, 0)
    assert _triples(stages) == [
        (0, 4, -1),
        (4, 7, 0),
        (7, 12, 1),
        (12, 17, 1),
        (17, 22, 1),
        (22, 28, 0),
    ]
    assert resident_tokens(stages) == [0, 4, 7, 7, 7, 4]
    assert num_ancestors(stages) == [0, 1, 2, 2, 2, 1]


def test_a_small_root_joins_the_prefix_above_it() -> None:
    """The last response then runs beside 7 tokens; there is room for 13, not for 12."""
    joined = [(0, 7, -1), (7, 12, 0), (12, 17, 0), (17, 22, 0), (22, 28, 0)]
    assert _triples(cut_into_stages(_tree(*_TWO_TURNS), 13, 3)) == joined
    assert len(cut_into_stages(_tree(*_TWO_TURNS), 12, 3)) == 6
    assert len(cut_into_stages(_tree(*_TWO_TURNS), 13, 2)) == 6


def test_responses_that_go_on_one_another_are_one_stage() -> None:
    """A chain of strict prefixes is a single path, however small the budget."""
    forest = _tree([1] * 3, [[2] * n for n in range(1, 6)])
    assert _triples(cut_into_stages(forest, 1, 0)) == [(0, 8, -1)]


def test_what_fits_is_one_stage() -> None:
    forest = _tree(*_TWO_TURNS)
    assert _triples(cut_into_stages(forest, forest.num_tokens, 0)) == [(0, 28, -1)]


def test_no_tokens_are_no_stages() -> None:
    batch = validate_groups([group([1], [rollout([2])])], limits())
    forest = build_forest(batch, sort_sequences(batch), np.array([], np.int64))
    assert cut_into_stages(forest, 5, 0) == ()
    assert peak_tokens(()) == 0


@pytest.mark.parametrize(
    ("triples", "misplaced"),
    [
        ([(0, 4, -1), (4, 6, 0), (6, 9, 0)], None),
        ([(0, 4, -1), (4, 6, 0), (6, 9, -1)], None),
        ([], None),
        ([(1, 9, -1)], 0),
        ([(0, 4, -1), (5, 9, 0)], 1),
        ([(0, 4, -1), (4, 4, 0), (4, 9, 0)], 1),
        ([(0, 4, -1), (4, 10, 0)], 1),
        ([(0, 4, -1), (4, 6, 0)], 2),
        ([(0, 4, 0), (4, 9, -1)], 0),
        ([(0, 4, -1), (4, 6, 2), (6, 9, 0)], 1),
        # The first stage was run backward when the second was begun.
        ([(0, 2, -1), (2, 4, -1), (4, 9, 0)], 2),
    ],
)
def test_misplaced_stages_are_found(
    triples: list[tuple[int, int, int]], misplaced: int | None
) -> None:
    stages = [Stage(start=start, stop=stop, parent=parent) for start, stop, parent in triples]
    assert first_misplaced(stages, 9) == misplaced


@pytest.mark.parametrize(
    "triples",
    [
        # Cut within a node; the second wave without its prompt; a wave below another wave's turn.
        [(0, 3, -1), (3, 28, 0)],
        [(0, 4, -1), (4, 22, 0), (22, 28, -1)],
        [(0, 4, -1), (4, 7, 0), (7, 12, 1), (12, 28, 0)],
    ],
)
def test_stages_of_another_forest_do_not_fit(triples: list[tuple[int, int, int]]) -> None:
    stages = [Stage(start=start, stop=stop, parent=parent) for start, stop, parent in triples]
    assert first_misplaced(stages, 28) is None
    assert not fits_forest(stages, _tree(*_TWO_TURNS))
