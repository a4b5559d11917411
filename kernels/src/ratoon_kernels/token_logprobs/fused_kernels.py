"""The Triton kernels of the fused backend, and their launchers.

Logits are read once; every sum has one fixed order, so that the same inputs give the same bits. In
shape suffixes C is the rows of the chunk and M all targets of a call.

Imported by `fused.py` inside its functions: triton comes with torch's CUDA wheels alone.
"""

from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Below every logit, and finite: its distance to a logit is finite too, so that lanes past the end
# of a row add 0 x finite, which is 0.
_LOWEST = tl.constexpr(-1e30)
_LOG2_E = tl.constexpr(1.4426950408889634)

# 128 threads of 8 lanes, 4 loads of 16 bytes in flight a lane: 16 KB a program, of which an SM
# holds several. More lanes spill, fewer leave the memory idle.
_REDUCE_LANES = 1024
_REDUCE_WARPS = 4
# Targets of a row that are read at once.
_TARGETS = 32
# Columns of one program of the gradient: enough loads in flight, and few enough programs.
_GRADIENT_COLUMNS = 2048
_GRADIENT_WARPS = 4


def reduce_rows(
    logits_CV: Tensor,
    temperature_C: Tensor,
    first_target_C1: Tensor,
    token_M: Tensor,
    order_M: Tensor,
    logprob_M: Tensor,
    entropy_C: Tensor,
    lse_C: Tensor,
) -> None:
    """Writes entropy and log-sum-exp of each row, and the log-probs of its targets.

    Args:
        logits_CV: fp32 products of hidden states and head, rows of unit inner stride.
        temperature_C: fp32 [C]; the logits are divided by it.
        first_target_C1: int64 [C + 1]; row c predicts the sorted targets [first[c], first[c + 1]).
        token_M: int64 [M]; token of each target, targets sorted by row, those of a row by token.
        order_M: int64 [M]; where each sorted target stood, and its log-prob goes.
        logprob_M: fp32 [M], written at the targets of these rows.
        entropy_C: fp32 [C], in nats.
        lse_C: fp32 [C]; log-sum-exp of logits over temperature.
    """
    kernel: Any = _reduce_rows
    kernel[(len(logits_CV),)](
        logits_CV,
        temperature_C,
        first_target_C1,
        token_M,
        order_M,
        logprob_M,
        entropy_C,
        lse_C,
        logits_CV.shape[1],
        logits_CV.stride(0),
        LANES=_REDUCE_LANES,
        TARGETS=_TARGETS,
        num_warps=_REDUCE_WARPS,
    )


def differentiate_logits(
    logits_CV: Tensor,
    dlogits_CV: Tensor,
    temperature_C: Tensor,
    scale_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    dentropy_C: Tensor | None,
    first_target_C1: Tensor,
    token_M: Tensor,
    dlogprob_M: Tensor | None,
) -> None:
    """Writes the gradient of the scaled logits times `scale_C`, rounded once, to `dlogits_CV`.

    Args:
        logits_CV: As `reduce_rows` takes them.
        dlogits_CV: 16 or 32 bits a value, rows of unit inner stride; no memory of the logits.
        temperature_C: fp32 [C].
        scale_C: fp32 [C].
        lse_C: fp32 [C], as `reduce_rows` writes it.
        entropy_C: fp32 [C], as `reduce_rows` writes it.
        dentropy_C: fp32 [C]; gradient of the entropies, or None where it is zero.
        first_target_C1: int64 [C + 1], as `reduce_rows` takes it.
        token_M: int64 [M], as `reduce_rows` takes it.
        dlogprob_M: fp32 [M]; gradient of the log-probs of the sorted targets, or None where it is
            zero.
    """
    num_rows, num_columns = logits_CV.shape
    kernel: Any = _differentiate_logits
    # One dimension of programs, since the others of a grid end at 65,535.
    kernel[(num_rows * triton.cdiv(num_columns, _GRADIENT_COLUMNS),)](
        logits_CV,
        dlogits_CV,
        temperature_C,
        scale_C,
        lse_C,
        entropy_C,
        dentropy_C,
        first_target_C1,
        token_M,
        dlogprob_M,
        num_columns,
        logits_CV.stride(0),
        dlogits_CV.stride(0),
        COLUMNS=_GRADIENT_COLUMNS,
        TARGETS=_TARGETS,
        num_warps=_GRADIENT_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _accumulate(total, moment, logit, top, to_log2):
    distance = logit - top
    exp = tl.exp2(distance * to_log2)
    return total + exp, moment + exp * distance


@triton.jit
def _reduce_rows(
    logits_CV,
    temperature_C,
    first_target_C1,
    token_M,
    order_M,
    logprob_M,
    entropy_C,
    lse_C,
    num_columns,
    row_stride,
    LANES: tl.constexpr,
    TARGETS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_CV + row * row_stride
    temperature = tl.load(temperature_C + row)
    to_log2 = _LOG2_E / temperature
    lane = tl.arange(0, LANES)
    # Each lane has a maximum of its own, and against it sum(exp) and sum(exp x distance): no lane
    # waits for another before the end of the row.
    top = tl.full([LANES], _LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    for start in range(0, num_columns, 4 * LANES):
        column = start + lane
        logit_0 = tl.load(logits_V + column, mask=column < num_columns, other=_LOWEST)
        column += LANES
        logit_1 = tl.load(logits_V + column, mask=column < num_columns, other=_LOWEST)
        column += LANES
        logit_2 = tl.load(logits_V + column, mask=column < num_columns, other=_LOWEST)
        column += LANES
        logit_3 = tl.load(logits_V + column, mask=column < num_columns, other=_LOWEST)
        highest = tl.maximum(tl.maximum(logit_0, logit_1), tl.maximum(logit_2, logit_3))
        highest = tl.maximum(top, highest)
        shift = top - highest
        shrink = tl.exp2(shift * to_log2)
        moment = (moment + total * shift) * shrink
        total = total * shrink
        top = highest
        total, moment = _accumulate(total, moment, logit_0, top, to_log2)
        total, moment = _accumulate(total, moment, logit_1, top, to_log2)
        total, moment = _accumulate(total, moment, logit_2, top, to_log2)
        total, moment = _accumulate(total, moment, logit_3, top, to_log2)
    row_top = tl.max(top, axis=0)
    shift = top - row_top
    shrink = tl.exp2(shift * to_log2)
    row_moment = tl.sum((moment + total * shift) * shrink, axis=0)
    row_total = tl.sum(total * shrink, axis=0)
    log_total = tl.log(row_total)
    tl.store(lse_C + row, row_top * tl.div_rn(1.0, temperature) + log_total)
    mean_distance = tl.div_rn(tl.div_rn(row_moment, row_total), temperature)
    tl.store(entropy_C + row, log_total - mean_distance)
    stop = tl.load(first_target_C1 + row + 1)
    for start in range(tl.load(first_target_C1 + row), stop, TARGETS):
        target = start + tl.arange(0, TARGETS)
        mask = target < stop
        token = tl.load(token_M + target, mask=mask, other=0)
        logit = tl.load(logits_V + token, mask=mask, other=0.0)
        logprob = tl.div_rn(logit - row_top, temperature) - log_total
        tl.store(logprob_M + tl.load(order_M + target, mask=mask, other=0), logprob, mask=mask)


@triton.jit
def _differentiate_logits(
    logits_CV,
    dlogits_CV,
    temperature_C,
    scale_C,
    lse_C,
    entropy_C,
    dentropy_C,
    first_target_C1,
    token_M,
    dlogprob_M,
    num_columns,
    logits_stride,
    dlogits_stride,
    COLUMNS: tl.constexpr,
    TARGETS: tl.constexpr,
):
    programs_a_row = tl.cdiv(num_columns, COLUMNS)
    row = (tl.program_id(0) // programs_a_row).to(tl.int64)
    first_column = tl.program_id(0) % programs_a_row * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    mask = column < num_columns
    logit = tl.load(logits_CV + row * logits_stride + column, mask=mask, other=0.0)
    # Rounded as `_reduce_rows` rounded the greatest, so that a row of one likely token has logp = 0
    # there: hence no fused multiply-add.
    inverse_temperature = tl.div_rn(1.0, tl.load(temperature_C + row))
    logp = logit * inverse_temperature - tl.load(lse_C + row)
    # d logprob_t / dz_j = [j = t] - p_j, and dH / dz_j = -p_j (log p_j + H).
    one_hot = tl.zeros([COLUMNS], tl.float32)
    weight = 0.0
    if dlogprob_M is not None:
        # Targets of a row ascend by token: those of these columns are [low, high).
        low = tl.load(first_target_C1 + row)
        high = low
        stop = tl.load(first_target_C1 + row + 1)
        for start in range(low, stop, TARGETS):
            target = start + tl.arange(0, TARGETS)
            is_target = target < stop
            token = tl.load(token_M + target, mask=is_target, other=0)
            weight += tl.sum(tl.load(dlogprob_M + target, mask=is_target, other=0.0), axis=0)
            is_below = is_target & (token < first_column)
            is_below_end = is_target & (token < first_column + COLUMNS)
            low += tl.sum(is_below.to(tl.int32), axis=0)
            high += tl.sum(is_below_end.to(tl.int32), axis=0)
        for target in range(low, high):
            dlogprob = tl.load(dlogprob_M + target)
            one_hot += tl.where(column == tl.load(token_M + target), dlogprob, 0.0)
    if dentropy_C is not None:
        weight += tl.load(dentropy_C + row) * (logp + tl.load(entropy_C + row))
    dlogits = (one_hot - tl.exp(logp) * weight) * tl.load(scale_C + row)
    dlogits = dlogits.to(dlogits_CV.dtype.element_ty)
    tl.store(dlogits_CV + row * dlogits_stride + column, dlogits, mask=mask)
