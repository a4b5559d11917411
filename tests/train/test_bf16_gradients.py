"""bfloat16: the packed run's gradients are as near to float32's as those of replicated runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon_kernels.tree_attention import block_flash
from ratoon_kernels.tree_attention.blocks import BlockMask
from ratoon_kernels.tree_attention.operands import Operands
from tests.train.bf16_runs import (
    FORESTS,
    LONGEST,
    MAX_PARAMETER_RATIO,
    MAX_RATIO,
    SEEDS,
    Forest,
    Pair,
    assert_as_near_as_replicated,
    compare,
    make_pair,
    several_groups,
    tree,
)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return [make_pair("tiny", seed, device="cpu", backend="reference") for seed in SEEDS]


@pytest.mark.parametrize(
    "forest",
    [pytest.param(each, marks=[] if each is tree else pytest.mark.more) for each in FORESTS],
)
def test_packed_error_is_that_of_replicated_runs(pairs: list[Pair], forest: Forest) -> None:
    found = [compare(pair, forest, seed) for seed, pair in zip(SEEDS, pairs, strict=True)]
    assert_as_near_as_replicated(found)


@pytest.mark.more
def test_a_loss_of_precision_is_seen(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of more than one rollout rounds its output to 4 bits: far over the bound."""
    forward = block_flash.block_forward

    def coarse(block: Operands, mask: BlockMask) -> tuple[Tensor, Tensor]:
        out_QNH, lse_NQ = forward(block, mask)
        if len(block.end_T) > LONGEST:
            out_QNH = out_QNH.to(torch.float8_e4m3fn).to(out_QNH.dtype)
        return out_QNH, lse_NQ

    monkeypatch.setattr(block_flash, "block_forward", coarse)
    found = compare(pairs[0], several_groups, 0)
    assert found.ratio > 2 * MAX_RATIO
    assert found.worst_ratio > 2 * MAX_PARAMETER_RATIO
