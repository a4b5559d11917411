"""Targets sorted by the row that predicts them, on the device they are on.

Nothing here waits for the device, and targets of one row keep the order in which they came.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.token_logprobs.operands import Operands


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedTargets:
    """Targets by row.

    Attributes:
        first_R1: int64 [R + 1]; row r predicts the targets [first[r], first[r + 1]).
        token_M: int64; token of each.
        row_M: int64; row of each.
        order_M: int64; index of each among the targets as given.
    """

    first_R1: Tensor
    token_M: Tensor
    row_M: Tensor
    order_M: Tensor


def sort_targets(operands: Operands) -> SortedTargets:
    """Returns the targets by row."""
    row_M, order_M = operands.row_of_target_M.sort(stable=True)
    rows_R1 = torch.arange(len(operands.hidden_RD) + 1, device=row_M.device)
    return SortedTargets(
        first_R1=torch.searchsorted(row_M, rows_R1),
        token_M=operands.targets_M[order_M],
        row_M=row_M,
        order_M=order_M,
    )


def assert_in_range(targets: SortedTargets, num_rows: int, vocab_size: int) -> None:
    """Stops the device where an index is out of range, before a kernel reads at it."""
    if not len(targets.row_M):
        return
    assert_holds = torch.ops.aten._assert_async.msg
    low, high = targets.token_M.aminmax()
    assert_holds((low >= 0) & (high < vocab_size), "targets_M is out of range")
    first, last = targets.row_M[0], targets.row_M[-1]
    assert_holds((first >= 0) & (last < num_rows), "row_of_target_M is out of range")
