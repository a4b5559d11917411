"""Triton kernels of routed experts: which a token goes to, its rows to them and back, gated rows.

Gated rows are a gate's SiLU times its row times a weight, and back: the compiler's backward reads
everything twice, and computes both halves of a gradient for each element of either: 2.4 ms on an
H200 for 330,000 rows of 768 features, 3 GB to read and write once.

A token is read once for all of its rows. Row by row, in the order of experts, the tokens of one
expert would come from memory again for each of the others: twice as many bytes.

Import it only where there is a GPU: triton comes only with torch's CUDA wheels.

T tokens, E experts, C of a token, S rows (T * C of them where rows are moved), D or F features.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_ROUTED_TILE = 1024
# Elements that one program handles at a time: 16 bytes of bfloat16 per thread.
_MOVED_TILE = 2048
_MOVING_WARPS = 8
_GATED_ROWS = 4
_GATED_FEATURES = 256
_GATING_WARPS = 4


def choose_experts(merit_TE: Tensor, top_k: int) -> Tensor:
    """expert_TC, int64: the first ones of a stable sort by falling merit, which is float32.

    Merits may be -inf; experts of a token always differ.
    """
    num_tokens, num_experts = merit_TE.shape
    expert_TC = merit_TE.new_empty((num_tokens, top_k), dtype=torch.int64)
    block = triton.next_power_of_2(num_experts)
    rows = max(1, _ROUTED_TILE // block)
    kernel: Any = _choose_experts
    with torch.cuda.device_of(merit_TE):
        kernel[(triton.cdiv(num_tokens, rows),)](
            merit_TE.contiguous(),
            expert_TC,
            num_tokens,
            EXPERTS=num_experts,
            TOP_K=top_k,
            ROWS=rows,
            BLOCK=block,
            LOWEST=torch.finfo(torch.float32).min,
            num_warps=4,
        )
    return expert_TC


@triton.jit
def _choose_experts(
    merits,
    experts,
    num_tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    expert = tl.arange(0, BLOCK)
    is_there = is_token[:, None] & (expert < EXPERTS)[None, :]
    left = tl.load(merits + token[:, None] * EXPERTS + expert[None, :], mask=is_there, other=0.0)
    # NaN sorts first, as in torch. Only what is chosen, or not there, is below all others.
    left = tl.where(left == left, tl.maximum(left, LOWEST), float("inf"))
    left = tl.where(is_there, left, float("-inf"))
    for index in range(TOP_K):
        _, chosen = tl.max(left, axis=1, return_indices=True)
        tl.store(experts + token * TOP_K + index, chosen.to(tl.int64), mask=is_token)
        left = tl.where(expert[None, :] == chosen[:, None], float("-inf"), left)


def spread_rows(x_TD: Tensor, place_TC: Tensor) -> Tensor:
    """[S, D]: each token at all of its places."""
    y_SD = x_TD.new_empty((place_TC.numel(), x_TD.shape[1]))
    _launch_moves(x_TD.contiguous(), place_TC, y_SD, gathers=False)
    return y_SD


def add_rows(x_SD: Tensor, place_TC: Tensor) -> Tensor:
    """[T, D]: the sum of each token's rows, one after the other in float32."""
    y_TD = x_SD.new_empty((place_TC.shape[0], x_SD.shape[1]))
    _launch_moves(x_SD.contiguous(), place_TC, y_TD, gathers=True)
    return y_TD


def _launch_moves(x: Tensor, place_TC: Tensor, y: Tensor, *, gathers: bool) -> None:
    num_tokens, count = place_TC.shape
    block = min(_MOVED_TILE, triton.next_power_of_2(x.shape[1]))
    rows = _MOVED_TILE // block
    kernel: Any = _move_rows
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(num_tokens, rows),)](
            x,
            place_TC.contiguous(),
            y,
            num_tokens,
            GATHERS=gathers,
            COUNT=count,
            FEATURES=x.shape[1],
            ROWS=rows,
            BLOCK=block,
            num_warps=_MOVING_WARPS,
        )


@triton.jit
def _move_rows(
    x,
    places,
    y,
    num_tokens,
    GATHERS: tl.constexpr,
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    for start in range(0, FEATURES, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = is_token[:, None] & (column < FEATURES)[None, :]
        of_token = token[:, None] * FEATURES + column[None, :]
        if GATHERS:
            value = tl.zeros([ROWS, BLOCK], tl.float32)
        else:
            value = tl.load(x + of_token, mask=is_there)
        for index in tl.static_range(COUNT):
            place = tl.load(places + token * COUNT + index, mask=is_token, other=0).to(tl.int64)
            of_row = place[:, None] * FEATURES + column[None, :]
            if GATHERS:
                value += tl.load(x + of_row, mask=is_there, other=0).to(tl.float32)
            else:
                tl.store(y + of_row, value, mask=is_there)
        if GATHERS:
            tl.store(y + of_token, value.to(y.dtype.element_ty), mask=is_there)


def gate_rows(gate_up_SG: Tensor, weight_S1: Tensor) -> Tensor:
    """[S, F], computed in float32: for each row of [S, 2 F], the SiLU of its first half times the
    other half times its weight; all contiguous."""
    product_SF = gate_up_SG.new_empty((gate_up_SG.shape[0], gate_up_SG.shape[1] // 2))
    _launch_gates(gate_up_SG, weight_S1, product_SF, None, None, None)
    return product_SF


def differentiate_rows(
    dproduct_SF: Tensor, gate_up_SG: Tensor, weight_S1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputes the product, and returns it with the gradients of both inputs, given its own,
    `dproduct_SF`."""
    product_SF, dgate_up_SG = torch.empty_like(dproduct_SF), torch.empty_like(gate_up_SG)
    dweight_S1 = torch.empty_like(weight_S1)
    _launch_gates(gate_up_SG, weight_S1, product_SF, dproduct_SF, dgate_up_SG, dweight_S1)
    return product_SF, dgate_up_SG, dweight_S1


def _launch_gates(
    gate_up_SG: Tensor,
    weight_S1: Tensor,
    product_SF: Tensor,
    dproduct_SF: Tensor | None,
    dgate_up_SG: Tensor | None,
    dweight_S1: Tensor | None,
) -> None:
    num_rows, features = product_SF.shape
    kernel: Any = _gate_rows
    with torch.cuda.device_of(gate_up_SG):
        kernel[(triton.cdiv(num_rows, _GATED_ROWS),)](
            gate_up_SG,
            weight_S1,
            product_SF,
            dproduct_SF,
            dgate_up_SG,
            dweight_S1,
            num_rows,
            FEATURES=features,
            ROWS=_GATED_ROWS,
            BLOCK=_GATED_FEATURES,
            num_warps=_GATING_WARPS,
        )


@triton.jit
def _read(values, index, is_there):
    return tl.load(values + index, mask=is_there, other=0).to(tl.float32)


@triton.jit
def _write(values, index, is_there, value):
    tl.store(values + index, value.to(values.dtype.element_ty), mask=is_there)


@triton.jit
def _gate_rows(
    gate_up,
    weights,
    products,
    dproducts,
    dgate_up,
    dweights,
    num_rows,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    weight = _read(weights, row, is_row)[:, None]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, FEATURES, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = is_row[:, None] & (column < FEATURES)[None, :]
        place = row[:, None] * FEATURES + column[None, :]
        of_gate = place + row[:, None] * FEATURES
        gate = _read(gate_up, of_gate, is_there)
        up = _read(gate_up, of_gate + FEATURES, is_there)
        sigmoid = 1 / (1 + tl.exp(-gate))
        silu = gate * sigmoid
        _write(products, place, is_there, silu * up * weight)
        if dproducts is not None:
            dproduct = _read(dproducts, place, is_there)
            dweight += dproduct * silu * up
            drow = dproduct * weight
            dsilu = sigmoid * (1 + gate * (1 - sigmoid))
            _write(dgate_up, of_gate, is_there, drow * up * dsilu)
            _write(dgate_up, of_gate + FEATURES, is_there, drow * silu)
    if dproducts is not None:
        _write(dweights, row, is_row, tl.sum(dweight, axis=1))
