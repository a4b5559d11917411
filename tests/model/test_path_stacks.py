"""The forest of the stages that are open."""

from __future__ import annotations

import pytest

from ratoon.model.path_stacks import path_layout
from ratoon_kernels import Span
from tests.model.test_streamed_attention import NODES, make_layout


@pytest.mark.parametrize(
    ("spans", "nodes"),
    [
        # The inner prefix with only its second wave: two answers, in what is left of the forest.
        (
            [(0, 7), (7, 11), (15, 20)],
            [(0, 7, 16, -1), (7, 11, 16, 0), (11, 14, 14, 1), (14, 16, 16, 1)],
        ),
        ([(0, 7), (20, 24)], [(0, 7, 11, -1), (7, 11, 11, 0)]),
        # A stage of several nodes whose later tokens another one does not descend from.
        (
            [(0, 20), (20, 24)],
            [*NODES[:-1], (20, 24, 24, 0)],
        ),
        ([(0, 24)], [*NODES]),
    ],
)
def test_a_path_is_a_forest_of_its_own(
    spans: list[tuple[int, int]], nodes: list[tuple[int, int, int, int]]
) -> None:
    layout = path_layout(make_layout(), [Span(*span) for span in spans])
    assert layout.node_table_M4.tolist() == [list(node) for node in nodes]
