from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ratoon_kernels.jit import head_tile_map, tensor_map
from ratoon_kernels.jit.tma import _encode
from tests.kernels.fake_driver import FakeDriver, installed


@pytest.fixture
def encoder() -> Iterator[FakeDriver]:
    _encode.cache_clear()
    with installed() as driver:
        yield driver
    _encode.cache_clear()


def _dims(encoder: FakeDriver) -> tuple[list[int], list[int], list[int]]:
    _, rank, _, dims, strides, box, *_ = encoder.asked[-1]
    assert rank == len(dims)
    return dims, strides, box


def test_a_head_tile_follows_the_strides_of_any_view(encoder: FakeDriver) -> None:
    x_TNH = torch.zeros((20, 6, 128), dtype=torch.bfloat16)
    for view, token_bytes, head_bytes, heads in (
        (x_TNH, 1536, 256, 6),
        (x_TNH[:, 2:4], 1536, 256, 2),
        (x_TNH[::2], 3072, 256, 6),
        (x_TNH.view(6, 20, 128).transpose(0, 1), 256, 5120, 6),
    ):
        head_tile_map(view, 64)
        dims = [64, view.shape[0], 2, heads]
        assert _dims(encoder) == (dims, [token_bytes, 128, head_bytes], [64, 64, 2, 1])
        assert encoder.asked[-1][2] == view.data_ptr()
    assert [asked[0] for asked in encoder.asked] == ["CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"] * 4
    head_tile_map(x_TNH.view(torch.float16)[..., :64], 128)
    assert _dims(encoder) == ([64, 20, 1, 6], [1536, 128, 256], [64, 128, 1, 1])
    assert encoder.asked[-1][0] == "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"
    assert encoder.asked[-1][7:] == (
        "CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_256B", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    )  # fmt: skip


def test_dims_of_one_element_may_have_any_stride(encoder: FakeDriver) -> None:
    """torch gives them 1 or whatever they had before, which the driver refuses."""
    x_TNH = torch.zeros(128, dtype=torch.bfloat16).as_strided((1, 1, 128), (1, 3, 1))
    head_tile_map(x_TNH, 16)
    assert _dims(encoder) == ([64, 1, 2, 1], [256, 128, 256], [64, 16, 2, 1])


def test_maps_are_kept_by_all_that_they_depend_on(encoder: FakeDriver) -> None:
    x_TNH = torch.zeros((20, 6, 128), dtype=torch.bfloat16)
    others = [
        (x_TNH, 64), (x_TNH, 32), (x_TNH[1:], 64), (x_TNH[:19], 64), (x_TNH[:, :5], 64),
        (x_TNH[::2], 64), (x_TNH.view(torch.float16), 64), (x_TNH[..., :64], 64),
    ]  # fmt: skip
    maps = [head_tile_map(x, rows) for x, rows in others]
    assert len(set(maps)) == len(encoder.asked) == len(others)
    assert [head_tile_map(x, rows) for x, rows in others] == maps
    assert len(encoder.asked) == len(others)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dims": (64, 0)}, "are empty"),
        ({"box": (64, 257)}, "not in \\[1, 256\\]"),
        ({"box": (64, 0)}, "not in \\[1, 256\\]"),
        ({"strides_bytes": (136,)}, "not multiples of 16"),
        ({"strides_bytes": ()}, "do not match"),
        ({"box": (64,)}, "do not match"),
        ({"dims": (64,) * 6, "strides_bytes": (128,) * 5, "box": (8,) * 6}, "do not match"),
        ({"swizzle_bytes": 96}, "is none of"),
        ({"swizzle_bytes": 64}, "rows of 128 bytes for swizzle 64"),
        ({"box": (4, 8), "swizzle_bytes": 0}, "rows of 8 bytes"),
    ],
)
def test_what_the_copy_engine_cannot_do_is_named(
    changed: dict[str, Any], message: str, encoder: FakeDriver
) -> None:
    x = torch.zeros((20, 64), dtype=torch.bfloat16)
    wanted: dict[str, Any] = {
        "dims": (64, 20), "strides_bytes": (128,), "box": (64, 8), "swizzle_bytes": 128,
    }  # fmt: skip
    tensor_map(x, **wanted)
    with pytest.raises(ValueError, match=message):
        tensor_map(x, **{**wanted, **changed})
    assert len(encoder.asked) == 1


def test_tensors_of_another_address_dtype_or_width_are_named(encoder: FakeDriver) -> None:
    x_TNH = torch.zeros((20, 6, 128), dtype=torch.bfloat16)
    for bad, message in (
        (x_TNH.flatten()[1 : 1 + 128 * 4].view(2, 2, 128), "are not multiples of 16 bytes"),
        (x_TNH.flatten()[: 2 * 2 * 129].view(2, 2, 129)[..., :128], "are not multiples of 16"),
        (x_TNH.transpose(1, 2), "head_dim 6 of stride 128"),
        (x_TNH[..., :96], "head_dim 96 of stride 1"),
        (x_TNH[..., ::2], "head_dim 64 of stride 2"),
        (x_TNH[:0], "are empty"),
        (x_TNH.view(torch.int16), "dtype torch.int16 is none of"),
    ):
        with pytest.raises(ValueError, match=message):
            head_tile_map(bad, 64)
    assert encoder.asked == []
