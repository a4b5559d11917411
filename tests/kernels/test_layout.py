import numpy as np
import pytest
import torch

from ratoon_kernels import KernelArgumentError, build_layout
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
    for forest in random_forests(seed=0, count=300, max_nodes=24, max_length=5):
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


def test_tiles_are_computed_once_and_of_the_layout() -> None:
    layout = NAMED["two_trees"].layout()
    assert layout.tiles is layout.tiles
    assert layout.tiles.tile_size == 128
    end = layout.end_T.numpy()
    bounds = [(int(tile.min()), int(tile.max())) for tile in np.split(end, [128])]
    assert list(zip(layout.tiles.min_end_B, layout.tiles.max_end_B, strict=True)) == bounds
