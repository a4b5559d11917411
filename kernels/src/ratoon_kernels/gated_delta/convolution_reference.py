"""The reference backend of the causal convolution: eager torch, any device.

Nodes run in packed order, and a row's gradient takes the shares of later nodes in packed order
behind that of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.gated_delta.operands import ConvolutionGradients, ConvolutionOperands
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import ACCUMULATION_DTYPES, accumulation_dtype


def unavailable_reason() -> str | None:
    """Returns None: torch is all that it needs."""
    return None


def unsupported_reason(
    _device: torch.device, dtype: torch.dtype, _num_taps: int, _is_deterministic: bool
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    return None if dtype in ACCUMULATION_DTYPES else f"no support for dtype {dtype}"


def plan(layout: TreeLayout) -> list[Tensor]:
    """Returns what it reads of a layout: the host node table."""
    return [layout.node_table_M4]


def forward(operands: ConvolutionOperands) -> tuple[Tensor, Tensor]:
    """Returns out_TC (dtype of x) and last_ERC, the path's last rows at each handed node's end."""
    x_TC, wide = operands.x_TC, accumulation_dtype(operands.x_TC.dtype)
    num_before = operands.weight_CW.shape[1] - 1
    pool_PC = _pool(operands)
    out_TC = torch.empty_like(x_TC)
    last: list[Tensor] = []
    for node in _nodes(operands):
        rows_LC = torch.cat([pool_PC[node.before], x_TC[node.own]])
        out_TC[node.own] = torch.nn.functional.silu(_sums(rows_LC.to(wide), operands)).to(x_TC)
        if node.is_handed:
            last.append(rows_LC[len(rows_LC) - num_before :])
    none = x_TC.new_empty((0, num_before, x_TC.shape[1]))
    return out_TC, torch.stack(last) if last else none


def backward(
    operands: ConvolutionOperands, dout_TC: Tensor, dlast_ERC: Tensor | None
) -> ConvolutionGradients:
    """Returns the gradients; `dlast_ERC`, of the handed rows, in the accumulation dtype."""
    x_TC, wide = operands.x_TC, accumulation_dtype(operands.x_TC.dtype)
    weight_CW = operands.weight_CW.to(wide)
    num_tokens, num_taps = x_TC.shape[0], weight_CW.shape[1]
    pool_PC = _pool(operands).to(wide)
    dpool_PC = torch.zeros_like(pool_PC)
    dweight_WC = weight_CW.new_zeros((num_taps, x_TC.shape[1]))
    num_handed = 0
    for node in _nodes(operands):
        rows_LC = torch.cat([pool_PC[node.before], pool_PC[node.own]])
        sums_LC = _sums(rows_LC, operands)
        sigmoid_LC = sums_LC.sigmoid()
        slope_LC = sigmoid_LC * (1 + sums_LC * (1 - sigmoid_LC))
        dsums_LC = dout_TC[node.own].to(wide) * slope_LC
        drows_LC = torch.zeros_like(rows_LC)
        num_rows = len(dsums_LC)
        for tap in range(num_taps):
            drows_LC[tap : tap + num_rows] += dsums_LC * weight_CW[:, tap]
            dweight_WC[tap] += (dsums_LC * rows_LC[tap : tap + num_rows]).sum(0)
        if node.is_handed:
            assert dlast_ERC is not None, "a gradient for the rows of each handed node"
            drows_LC[len(drows_LC) - num_taps + 1 :] += dlast_ERC[num_handed]
            num_handed += 1
        dpool_PC[node.own] += drows_LC[num_taps - 1 :]
        # Only the row of zeros, whose gradient nobody reads, may be there twice.
        dpool_PC[node.before] = dpool_PC[node.before] + drows_LC[: num_taps - 1]
    first = operands.first_SRC
    dfirst = None if first is None else dpool_PC[num_tokens:-1].view(first.shape)
    return ConvolutionGradients(
        dx_TC=dpool_PC[:num_tokens].to(x_TC.dtype, copy=True),
        dweight_CW=dweight_WC.T.contiguous(),
        dfirst_SRC=dfirst,
    )


@dataclass(frozen=True, slots=True)
class _Node:
    own: slice
    # The R rows of the pool before the node's first, oldest first.
    before: list[int]
    is_handed: bool


def _pool(operands: ConvolutionOperands) -> Tensor:
    """All rows that taps may read: the tokens', the given ones, and one of zeros."""
    x_TC, first_SRC = operands.x_TC, operands.first_SRC
    given = [] if first_SRC is None else [first_SRC.flatten(0, 1)]
    return torch.cat([x_TC, *given, x_TC.new_zeros((1, x_TC.shape[1]))])


def _nodes(operands: ConvolutionOperands) -> Iterator[_Node]:
    num_before = operands.weight_CW.shape[1] - 1
    num_tokens, first_SRC = operands.x_TC.shape[0], operands.first_SRC
    num_given = 0 if first_SRC is None else first_SRC.shape[0] * num_before
    handover, table = operands.handover, operands.plan[0].tolist()
    firsts = [-1] * len(table) if handover is None else handover.first_M.tolist()
    handed = set[int]() if handover is None else {*handover.handed_E.tolist()}
    tails: list[list[int]] = []
    for index, ((start, stop, _, parent), first) in enumerate(zip(table, firsts, strict=True)):
        if parent >= 0:
            before = tails[parent]
        elif first >= 0:
            row = num_tokens + first * num_before
            before = [*range(row, row + num_before)]
        else:
            before = [num_tokens + num_given] * num_before
        last = [*before, *range(max(start, stop - num_before), stop)]
        tails.append(last[len(last) - num_before :])
        yield _Node(own=slice(start, stop), before=before, is_handed=index in handed)


def _sums(rows_LC: Tensor, operands: ConvolutionOperands) -> Tensor:
    """Sums over taps of the rows behind the first W - 1."""
    weight_CW = operands.weight_CW.to(rows_LC.dtype)
    num_taps = weight_CW.shape[1]
    num_rows = len(rows_LC) - num_taps + 1
    sums_LC = rows_LC[:num_rows] * weight_CW[:, 0]
    for tap in range(1, num_taps):
        sums_LC = sums_LC + rows_LC[tap : tap + num_rows] * weight_CW[:, tap]
    return sums_LC
