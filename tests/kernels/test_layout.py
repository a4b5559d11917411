from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from ratoon_kernels import KernelArgumentError, Span, TreeLayout, build_layout, tree_attention
from ratoon_kernels.schedule import ScheduleHeader, build_schedule
from ratoon_kernels.tree_attention import reference
from ratoon_kernels.tree_attention.operands import Operands
from tests.kernels.forests import NAMED, Forest, forest_from, random_forests


def _attended(end_T: torch.Tensor) -> np.ndarray:
    end = end_T.numpy()
    token = np.arange(len(end))
    return (token[None, :] <= token[:, None]) & (token[:, None] < end[None, :])


def _check(forest: Forest) -> None:
    layout = forest.layout()
    mask = forest.mask()
    assert layout.num_tokens == forest.num_tokens
    assert (layout.end_T.dtype, layout.position_T.dtype) == (torch.int32, torch.int64)
    np.testing.assert_array_equal(_attended(layout.end_T), mask)
    # A token attends its whole path and nothing else, so the count of its keys is its depth + 1.
    np.testing.assert_array_equal(layout.position_T.numpy(), mask.sum(axis=1) - 1)
    table = np.stack((forest.start, forest.stop, forest.end, forest.parent), axis=1)
    np.testing.assert_array_equal(layout.node_table_M4.numpy(), table)


@pytest.mark.parametrize("name", NAMED)
def test_end_is_the_mask_and_position_the_depth_of_named_forests(name: str) -> None:
    _check(NAMED[name])


def test_end_is_the_mask_and_position_the_depth_of_random_forests() -> None:
    for forest in random_forests(seed=0, count=100, max_nodes=24, max_length=5):
        _check(forest)


def test_position_is_not_the_packed_index() -> None:
    """Trap: positions counted along the packed row give siblings wrong rotary angles."""
    position = forest_from([-1, 0, 0], [3, 2, 2]).layout().position_T
    assert position.tolist() == [0, 1, 2, 3, 4, 3, 4]


def _arrays() -> dict[str, np.ndarray]:
    forest = forest_from([-1, 0, 1, 0, -1], [3, 2, 4, 1, 2])
    return {
        "node_start": forest.start.copy(),
        "node_stop": forest.stop.copy(),
        "node_end": forest.end.copy(),
        "node_parent": forest.parent.copy(),
    }


@pytest.mark.parametrize(
    ("edited", "node", "value", "blamed"),
    [
        pytest.param("node_start", 0, 1, "node_start", id="first token belongs to no node"),
        pytest.param("node_start", 2, 4, "node_start", id="overlaps the node before"),
        pytest.param("node_stop", 4, 10, "node_stop", id="empty node"),
        pytest.param("node_end", 1, 4, "node_end", id="end before stop"),
        pytest.param("node_end", 0, 11, "node_end", id="end within another node"),
        pytest.param("node_end", 4, 13, "node_end", id="end past the last token"),
        pytest.param("node_end", 1, 10, "node_end", id="subtree takes in a sibling"),
        pytest.param("node_end", 0, 9, "node_parent", id="subtree leaves a child out"),
        pytest.param("node_end", 2, 10, "node_end", id="end past the parent's"),
        pytest.param("node_parent", 0, 1, "node_parent", id="parent comes later"),
        pytest.param("node_parent", 3, -2, "node_parent", id="parent below -1"),
        pytest.param("node_parent", 4, 0, "node_parent", id="parent ended before"),
        pytest.param("node_parent", 2, -1, "node_end", id="root within a subtree"),
        pytest.param("node_parent", 2, 0, "node_end", id="grandparent as parent"),
    ],
)
def test_arrays_that_are_no_packing_are_refused_by_name_and_node(
    edited: str, node: int, value: int, blamed: str
) -> None:
    arrays = _arrays()
    arrays[edited][node] = value
    with pytest.raises(KernelArgumentError, match=r"node [0-9]+ has -?[0-9]+, ") as refusal:
        build_layout(**arrays, device="cpu")
    assert refusal.value.argument == blamed


def test_every_single_wrong_number_is_refused_or_harmless() -> None:
    """Any edit of one number either is refused or leaves a layout that still is the mask."""
    arrays = _arrays()
    for name in arrays:
        for node in range(5):
            for value in range(-2, 15):
                edited = {key: array.copy() for key, array in arrays.items()}
                edited[name][node] = value
                try:
                    layout = build_layout(**edited, device="cpu")
                except KernelArgumentError:
                    continue
                forest = Forest(**{key.removeprefix("node_"): a for key, a in edited.items()})
                np.testing.assert_array_equal(_attended(layout.end_T), forest.mask())


def test_wrong_shapes_and_dtypes_are_refused_by_name() -> None:
    for name in ("node_stop", "node_end", "node_parent"):
        with pytest.raises(KernelArgumentError, match=name):
            build_layout(**{**_arrays(), name: np.zeros(3, np.int64)}, device="cpu")
    with pytest.raises(KernelArgumentError, match="node_start"):
        build_layout(**{**_arrays(), "node_start": np.zeros(5)}, device="cpu")
    with pytest.raises(KernelArgumentError, match="node_start"):
        build_layout(**{**_arrays(), "node_start": np.zeros((5, 1), np.int64)}, device="cpu")


def test_the_schedule_is_that_of_all_queries_and_keys() -> None:
    layout = NAMED["two_trees"].layout()
    whole = Span(0, layout.num_tokens)
    table, header = build_schedule(layout.end_T.numpy(), whole, whole).pack()
    assert layout.schedule_table.dtype == torch.int32
    np.testing.assert_array_equal(layout.schedule_table.numpy(), table)
    assert ScheduleHeader.from_tensor(layout.schedule_header) == header
    held = layout.partial_schedule(whole, whole)
    assert held.table is layout.schedule_table
    assert held.header is layout.schedule_header


def test_a_partial_schedule_is_built_once_for_its_ranges() -> None:
    layout = NAMED["two_trees"].layout()
    queries, keys = Span(150, 230), Span(3, 160)
    held = layout.partial_schedule(queries, keys)
    assert layout.partial_schedule(Span(150, 230), Span(3, 160)) is held
    assert layout.partial_schedule(Span(150, 231), keys) is not held
    table, header = build_schedule(layout.end_T.numpy(), queries, keys).pack()
    np.testing.assert_array_equal(held.table.numpy(), table)
    assert ScheduleHeader.from_tensor(held.header) == header


@pytest.mark.parametrize("name", ["empty", "single_token", "two_trees"])
def test_all_that_is_uploaded_is_one_buffer(name: str) -> None:
    layout = NAMED[name].layout()
    on_device = (layout.end_T, layout.position_T, layout.schedule_table)
    assert len({tensor.untyped_storage().data_ptr() for tensor in on_device}) == 1
    assert layout.position_T.data_ptr() % 8 == 0


def test_a_plan_that_picks_the_schedule_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all forests, whose op is given each forest's own work lists."""
    given: list[torch.Tensor] = []

    def plan(layout: TreeLayout, _window: int | None) -> list[torch.Tensor]:
        return [layout.node_table_M4, layout.schedule_table, layout.schedule_header]

    def forward(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        given.extend(operands.plan[1:])
        return reference_forward(operands)

    reference_forward = reference.forward
    monkeypatch.setattr(reference, "plan", plan)
    monkeypatch.setattr(reference, "forward", forward)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(tree_attention, fullgraph=True, backend=counter)
    for name in ("two_trees", "star", "comb", "binary"):
        layout = NAMED[name].layout()
        q_TNH = torch.ones((layout.num_tokens, 2, 8))
        compiled(q_TNH, q_TNH, q_TNH, layout, 1.0)
        table, header = given[-2:]
        np.testing.assert_array_equal(table.numpy(), layout.schedule.pack()[0])
        assert ScheduleHeader.from_tensor(header).num_keys == layout.num_tokens
    assert counter.frame_count <= 2


def test_a_plan_of_a_window_is_traced_where_the_layout_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the cuda backend's: built before the call, or the trace stops there."""
    given: list[torch.Tensor] = []

    def plan(layout: TreeLayout, window: int) -> list[torch.Tensor]:
        tensors = layout.windowed_schedule(window)
        return [layout.node_table_M4, layout.position_T, tensors.table, tensors.header]

    def forward(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        given.extend(operands.plan)
        return reference_forward(replace(operands, plan=operands.plan[:2]))

    reference_forward = reference.forward
    monkeypatch.setattr(reference, "plan", plan)
    monkeypatch.setattr(reference, "forward", forward)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(tree_attention, fullgraph=True, backend=counter)
    for name in ("two_trees", "star", "comb", "binary"):
        layout = NAMED[name].layout()
        held = layout.windowed_schedule(9)
        assert layout.windowed_schedule(9) is held
        q_TNH = torch.ones((layout.num_tokens, 2, 8))
        compiled(q_TNH, q_TNH, q_TNH, layout, 1.0, window=9)
        assert torch.equal(given[-2], held.table)
        header = ScheduleHeader.from_tensor(given[-1])
        assert header.start.count >= layout.num_tokens
    assert counter.frame_count <= 2
    q_TNH = torch.ones((131, 2, 8))
    with pytest.raises(Unsupported, match=r"KernelArgumentError\(\"layout\""):
        compiled(q_TNH, q_TNH, q_TNH, NAMED["one_sequence"].layout(), 1.0, window=9)


def test_a_window_as_long_as_all_paths_has_the_work_lists_of_none() -> None:
    layout = NAMED["star"].layout()
    whole = Span(0, layout.num_tokens)
    for window in (80, 1000):
        assert layout.window(window) is None
        assert layout.windowed_schedule(window).table is layout.schedule_table
        assert layout.partial_schedule(whole, whole, window).table is layout.schedule_table
    assert layout.partial_schedule(whole, whole, 79) is layout.windowed_schedule(79)
    assert layout.windowed_schedule(79).table is not layout.schedule_table
