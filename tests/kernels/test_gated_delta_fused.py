"""The fused gated delta backends as far as a CPU goes: their tables, and what they refuse."""

import itertools

import numpy as np
import pytest
import torch

from ratoon_kernels import BackendUnavailableError, Handover, list_backends, select_backend
from ratoon_kernels.gated_delta import convolution_fused, forest_tables, fused
from ratoon_kernels.gated_delta.operands import ConvolutionOperands
from tests.kernels.forests import NAMED, Forest, random_forests

CPU = torch.device("cpu")
FORESTS = [*NAMED.values(), *random_forests(0, 20, 20, 150)]


def _path_rows(forest: Forest, node: int) -> list[int]:
    path = list(range(forest.start[node], forest.stop[node]))
    while forest.parent[node] >= 0:
        node = int(forest.parent[node])
        path = [*range(forest.start[node], forest.stop[node]), *path]
    return path


@pytest.mark.parametrize("forest", FORESTS)
def test_orders_never_wait_for_a_later_task(forest: Forest) -> None:
    tables = forest_tables.forest_tables(forest.layout().node_table_M4, None, CPU)
    num_nodes = len(forest.parent)
    forward, backward = tables.forward_order_M.tolist(), tables.backward_order_M.tolist()
    assert sorted(forward) == sorted(backward) == list(range(num_nodes))
    for node, parent in enumerate(forest.parent.tolist()):
        if parent >= 0:
            assert forward.index(parent) < forward.index(node)
            assert backward.index(node) < backward.index(parent)
            assert tables.end_slot_M[parent] >= 0


@pytest.mark.parametrize("forest", FORESTS)
def test_chunks_cover_each_node_from_its_start(forest: Forest) -> None:
    tables = forest_tables.forest_tables(forest.layout().node_table_M4, None, CPU)
    assert len(tables.start_C) == tables.num_chunks
    covered: list[int] = []
    for node in range(len(forest.parent)):
        first = int(tables.chunk_M[node])
        assert not len(tables.start_C) or int(tables.start_C[first]) == forest.start[node]
    for start, length in zip(tables.start_C.tolist(), tables.length_C.tolist(), strict=True):
        assert 1 <= length <= forest_tables.CHUNK_TOKENS
        covered += range(start, start + length)
    assert covered == list(range(forest.num_tokens))


@pytest.mark.parametrize("forest", FORESTS)
def test_children_are_in_packed_order(forest: Forest) -> None:
    tables = forest_tables.forest_tables(forest.layout().node_table_M4, None, CPU)
    children = tables.children.tolist()
    for node, (start, stop) in enumerate(itertools.pairwise(tables.child_M1.tolist())):
        assert children[start:stop] == np.flatnonzero(forest.parent == node).tolist()


def test_no_given_state_is_twice_in_one_addition() -> None:
    layout = NAMED["sequences"].layout()
    rows = torch.arange(layout.node_table_M4.shape[0]) % 2
    handover = Handover(first_M=rows, handed_E=torch.tensor([0]))
    tables = forest_tables.forest_tables(layout.node_table_M4, handover, CPU)
    pairs = [
        pair for entry in tables.begins for pair in zip(*(x.tolist() for x in entry), strict=True)
    ]
    assert sorted(slot for _, slot in pairs) == list(range(len(rows)))
    assert all(int(rows[slot]) == row for row, slot in pairs)
    assert all(len(set(row.tolist())) == len(row) for row, _ in tables.begins)


@pytest.mark.parametrize("forest", FORESTS)
def test_taps_read_the_path_and_are_read_back(forest: Forest) -> None:
    operands = ConvolutionOperands(
        x_TC=torch.zeros(forest.num_tokens, 1),
        weight_CW=torch.zeros(1, 4),
        plan=[forest.layout().node_table_M4],
    )
    tables = convolution_fused._tables(operands)
    before_TR = tables.before_TR.view(-1, 3).tolist()
    readers: set[tuple[int, int, int]] = set()
    for node in range(len(forest.parent)):
        path = _path_rows(forest, node)
        for token in range(forest.start[node], forest.stop[node]):
            place = path.index(token)
            right = [path[place - d] if place >= d else -1 for d in (1, 2, 3)]
            assert before_TR[token] == right
            readers |= {(row, token, 3 - d) for d, row in enumerate(right, 1) if row >= 0}
    found = set[tuple[int, int, int]]()
    for group, row in enumerate(tables.target_G.tolist()):
        for entry in range(*tables.entry_G1[group : group + 2].tolist()):
            found.add((row, int(tables.entry_row[entry]), int(tables.entry_tap[entry])))
    left = tables.left_T.tolist()
    own = {(row, row + d, 3 - d) for row in range(len(left)) for d in (1, 2, 3) if d <= left[row]}
    assert not found & own
    assert found | own == readers


def test_refusals_name_their_reasons() -> None:
    cuda = torch.device("cuda")
    for backend, arguments, reason in (
        (fused, (CPU, torch.bfloat16, 128), "cpu"),
        (fused, (cuda, torch.float32, 128), "float32"),
        (fused, (cuda, torch.bfloat16, 96), "keys of 96"),
        (convolution_fused, (CPU, torch.bfloat16, 4), "cpu"),
        (convolution_fused, (cuda, torch.float64, 4), "float64"),
        (convolution_fused, (cuda, torch.bfloat16, 3), "3 taps"),
    ):
        assert reason in (backend.unsupported_reason(*arguments, False) or "")
    assert "values of 96" in (
        fused.unsupported_reason(cuda, torch.bfloat16, 128, False, 96, None) or ""
    )
    statuses = {(s.op, s.name): s for s in list_backends()}
    if not statuses["gated_delta", "fused"].is_available:
        assert statuses["causal_convolution", "fused"].reason
        with pytest.raises(BackendUnavailableError):
            select_backend("gated_delta", "fused", CPU, torch.bfloat16, 128)
    assert select_backend("gated_delta", None, CPU, torch.bfloat16, 128) == "reference"
