"""The fused backend of the causal convolution: Triton kernels over all tokens of a forest.

Sums are fp32, each in one order, so that the same inputs give the same bits. Gradients of sums are
rounded to the dtype of x on their way to those of rows. No synchronisation with the host.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels.gated_delta.forest_tables import NUM_KEPT, upload
from ratoon_kernels.gated_delta.fused import MIN_CAPABILITY_MAJOR, unavailable_reason
from ratoon_kernels.gated_delta.operands import (
    ConvolutionGradients,
    ConvolutionOperands,
    Handover,
)
from ratoon_kernels.layout import TreeLayout

__all__ = ["backward", "forward", "plan", "unavailable_reason", "unsupported_reason"]

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
NUM_TAPS: Final = 4
_ROWS: Final = 16
_CHANNELS: Final = 256
# Tokens of a part of the gradient of taps, in steps of the rows above.
_STEPS: Final = 16
_ENTRIES: Final = 16
_WARPS: Final = 4


def unsupported_reason(
    device: torch.device, dtype: torch.dtype, num_taps: int, _is_deterministic: bool
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    if device.type != "cuda":
        return f"no support for {device.type} tensors"
    if dtype not in DTYPES:
        return f"no support for dtype {dtype}"
    if num_taps != NUM_TAPS:
        return f"{num_taps} taps, expected {NUM_TAPS}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < MIN_CAPABILITY_MAJOR:
        return f"compute capability {major}.{minor}, needs {MIN_CAPABILITY_MAJOR}.0 or more"
    return None


def plan(layout: TreeLayout) -> list[Tensor]:
    """Returns what it reads of a layout: the host node table."""
    return [layout.node_table_M4]


def forward(operands: ConvolutionOperands) -> tuple[Tensor, Tensor]:
    """Returns out_TC (dtype of x) and last_ERC, the path's last rows at each handed node's end."""
    from ratoon_kernels.gated_delta import convolution_kernels

    x_TC, weight_CW = operands.x_TC, operands.weight_CW
    (num_tokens, num_channels), num_taps = x_TC.shape, weight_CW.shape[1]
    tables = _tables(operands)
    first = _contiguous(operands.first_SRC)
    out_TC = x_TC.new_empty((num_tokens, num_channels))
    with torch.cuda.device_of(x_TC):
        if num_tokens:
            kernel: Any = convolution_kernels.convolve
            kernel[_grid(num_tokens, _ROWS, num_channels)](
                x_TC,
                weight_CW.contiguous(),
                first,
                tables.before_TR,
                out_TC,
                num_tokens,
                x_TC.stride(0),
                C=num_channels,
                W=num_taps,
                ROWS=_ROWS,
                CHANNELS=_CHANNELS,
                num_warps=_WARPS,
            )
        last = x_TC.new_zeros((tables.num_handed * (num_taps - 1), num_channels))
        for rows, source, places in ((x_TC, 0, 1), (first, 2, 3)):
            if rows is not None and len(tables.last[places]):
                last[tables.last[places]] = rows.flatten(0, -2)[tables.last[source]]
    return out_TC, last.view(tables.num_handed, num_taps - 1, num_channels)


def backward(
    operands: ConvolutionOperands, dout_TC: Tensor, dlast_ERC: Tensor | None
) -> ConvolutionGradients:
    """Returns the gradients; `dlast_ERC`, of the handed rows, in fp32."""
    from ratoon_kernels.gated_delta import convolution_kernels

    x_TC, weight_CW = operands.x_TC, operands.weight_CW.contiguous()
    (num_tokens, num_channels), num_taps = x_TC.shape, weight_CW.shape[1]
    tables = _tables(operands)
    first = _contiguous(operands.first_SRC)
    dx_TC = x_TC.new_empty((num_tokens, num_channels))
    dfirst = None
    if operands.first_SRC is not None:
        dfirst = x_TC.new_zeros(operands.first_SRC.shape, dtype=torch.float32)
    if not num_tokens:
        dweight_CW = x_TC.new_zeros((num_channels, num_taps), dtype=torch.float32)
        return ConvolutionGradients(dx_TC=dx_TC, dweight_CW=dweight_CW, dfirst_SRC=dfirst)
    num_parts = -(-num_tokens // (_ROWS * _STEPS))
    dsum_TC = torch.empty_like(dx_TC)
    dweight_PWC = x_TC.new_empty((num_parts, num_taps, num_channels), dtype=torch.float32)
    sizes = {"C": num_channels, "W": num_taps, "CHANNELS": _CHANNELS, "num_warps": _WARPS}
    with torch.cuda.device_of(x_TC):
        kernel: Any = convolution_kernels.begin_gradients
        kernel[_grid(num_tokens, _ROWS * _STEPS, num_channels)](
            dout_TC,
            x_TC,
            weight_CW,
            first,
            tables.before_TR,
            dsum_TC,
            dweight_PWC,
            num_tokens,
            dout_TC.stride(0),
            x_TC.stride(0),
            ROWS=_ROWS,
            STEPS=_STEPS,
            **sizes,
        )
        kernel = convolution_kernels.spread_gradients
        kernel[_grid(num_tokens, _ROWS, num_channels)](
            dsum_TC, weight_CW, tables.left_T, dx_TC, num_tokens, ROWS=_ROWS, **sizes
        )
        if tables.num_targets:
            kernel = convolution_kernels.collect_gradients
            kernel[_grid(tables.num_targets, 1, num_channels)](
                dsum_TC,
                weight_CW,
                _contiguous(dlast_ERC),
                tables.target_G,
                tables.left_G,
                tables.entry_G1,
                tables.entry_row,
                tables.entry_tap,
                dx_TC,
                dfirst,
                ENTRIES=_ENTRIES,
                **sizes,
            )
    return ConvolutionGradients(
        dx_TC=dx_TC, dweight_CW=dweight_PWC.sum(0).T.contiguous(), dfirst_SRC=dfirst
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Which rows read which, on the device; int32 but for `last`. R rows before a token.

    Attributes:
        before_TR: As `convolution_kernels` says.
        left_T: Tokens that follow each in its node.
        target_G: Rows with readers elsewhere: of x, or of the given rows as -2 - row.
        left_G: `left_T` of each; -1 of given rows.
        entry_G1: Where each row's entries start.
        entry_row: Row of the gradients of sums, or of the handed rows.
        entry_tap: The tap by which it reads; -1 of handed rows.
        last: int64: rows of x and their places in last_ERC; given rows and theirs.
        num_handed: E.
        num_targets: G.
    """

    before_TR: Tensor
    left_T: Tensor
    target_G: Tensor
    left_G: Tensor
    entry_G1: Tensor
    entry_row: Tensor
    entry_tap: Tensor
    last: tuple[Tensor, ...]
    num_handed: int
    num_targets: int


def _tables(operands: ConvolutionOperands) -> _Tables:
    handover: Handover | None = operands.handover
    first = handed = None
    if handover is not None:
        first, handed = (each.numpy().tobytes() for each in (handover.first_M, handover.handed_E))
    table = operands.plan[0].contiguous().numpy().tobytes()
    return _build(table, first, handed, operands.weight_CW.shape[1], operands.x_TC.device)


@functools.lru_cache(maxsize=NUM_KEPT)
def _build(
    table: bytes, first: bytes | None, handed: bytes | None, num_taps: int, device: torch.device
) -> _Tables:
    nodes = np.frombuffer(table, np.int64).reshape(-1, 4)
    start, stop = nodes[:, 0], nodes[:, 1]
    num_tokens, num_before = int(stop[-1]) if len(stop) else 0, num_taps - 1
    begins = [-1] * len(nodes) if first is None else np.frombuffer(first, np.int64).tolist()
    handed_nodes = [] if handed is None else np.frombuffer(handed, np.int64).tolist()
    before_TR = np.arange(num_tokens)[:, None] - np.arange(1, num_taps)[None, :]
    # Rows before each node's end, the last first; and who reads a row from elsewhere.
    tails: list[list[int]] = []
    entries: dict[int, list[tuple[int, int]]] = {}
    for (begin, end, _, parent), given in zip(nodes.tolist(), begins, strict=True):
        path = [-1] * num_before
        if parent >= 0:
            path = tails[parent]
        elif given >= 0:
            path = [-2 - (given * num_before + row) for row in reversed(range(num_before))]
        for token in range(begin, min(end, begin + num_before)):
            num_own = token - begin
            before_TR[token, num_own:] = path[: num_before - num_own]
            for distance in range(num_own + 1, num_taps):
                row = path[distance - num_own - 1]
                if row != -1:
                    entries.setdefault(row, []).append((token, num_taps - 1 - distance))
        own = [*range(end - 1, max(begin, end - num_before) - 1, -1)]
        tails.append([*own, *path][:num_before])
    last = np.array([tails[node][::-1] for node in handed_nodes], np.int64).reshape(-1)
    for place, row in enumerate(last.tolist()):
        if row != -1:
            entries.setdefault(row, []).append((place, -1))
    left_T = np.repeat(stop, stop - start) - 1 - np.arange(num_tokens)
    targets = list(entries)
    flat = [entry for row in targets for entry in entries[row]]
    sections = {
        "before_TR": before_TR.reshape(-1),
        "left_T": left_T,
        "target_G": np.array(targets, np.int64),
        "left_G": np.array([left_T[row] if row >= 0 else -1 for row in targets], np.int64),
        "entry_G1": np.cumsum([0, *(len(entries[row]) for row in targets)]),
        "entry_row": np.array([row for row, _ in flat], np.int64),
        "entry_tap": np.array([tap for _, tap in flat], np.int64),
    }
    is_own, is_given = np.flatnonzero(last >= 0), np.flatnonzero(last < -1)
    parts = (last[is_own], is_own, -2 - last[is_given], is_given)
    return _Tables(
        **upload(sections, device),
        last=tuple(torch.from_numpy(part).to(device) for part in parts),
        num_handed=len(handed_nodes),
        num_targets=len(targets),
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or not len(tensor) else tensor.contiguous()


def _grid(num_rows: int, rows: int, num_channels: int) -> tuple[int]:
    return (-(-num_rows // rows) * -(-num_channels // _CHANNELS),)
