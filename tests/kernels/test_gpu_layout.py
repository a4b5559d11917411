"""A layout on a GPU: what arrives there, and in how many copies."""

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ratoon_kernels import Span, TreeLayout
from tests.kernels.forests import NAMED, Forest, random_forest

pytestmark = pytest.mark.gpu


def _assert_same(got: TreeLayout, expected: TreeLayout) -> None:
    for name in ("end_T", "position_T", "schedule_table"):
        on_device = getattr(got, name)
        assert on_device.device.type == "cuda"
        torch.testing.assert_close(on_device.cpu(), getattr(expected, name), rtol=0, atol=0)
    for name in ("node_table_M4", "schedule_header"):
        on_host = getattr(got, name)
        assert on_host.device.type == "cpu"
        torch.testing.assert_close(on_host, getattr(expected, name), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMED)
def test_a_layout_on_a_gpu_holds_what_one_on_the_host_holds(name: str) -> None:
    got, expected = NAMED[name].layout("cuda"), NAMED[name].layout()
    _assert_same(got, expected)
    queries = Span(got.num_tokens // 3, got.num_tokens)
    keys = Span(0, got.num_tokens // 2)
    part, on_host = (layout.partial_schedule(queries, keys) for layout in (got, expected))
    torch.testing.assert_close(part.table.cpu(), on_host.table, rtol=0, atol=0)
    torch.testing.assert_close(part.header, on_host.header, rtol=0, atol=0)
    assert (part.table.device.type, part.header.device.type) == ("cuda", "cpu")


def test_uploads_that_wait_for_a_busy_gpu_are_not_overwritten() -> None:
    """Trap: a host buffer that is given to the next layout before the copy from it was made."""
    rng = np.random.default_rng(0)
    forests: list[Forest] = [random_forest(rng, 30, 90) for _ in range(40)]
    torch.cuda._sleep(200_000_000)
    on_device = [forest.layout("cuda") for forest in forests]
    for forest, got in zip(forests, on_device, strict=True):
        _assert_same(got, forest.layout())


def test_a_layout_is_one_copy_to_the_gpu() -> None:
    forest = NAMED["two_trees"]
    forest.layout("cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        forest.layout("cuda")
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() or ()]
    copies = [name for name in names if name.startswith("Memcpy")]
    assert len(copies) == 1
    assert "Pinned" in copies[0]
