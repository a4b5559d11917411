"""Inputs of a token log-probs backend, checked, and targets sorted by row and token.

Target m is predicted by hidden row `row_of_target_M[m]`; a row may serve many targets or none.
Values are checked only on the CPU, where that costs no synchronisation; sorting waits for no
device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.precision import ACCUMULATION_DTYPES, accumulation_dtype

# Logit of a token outside of a row's sampling mask. Its exponential is 0 beside every logit, at
# temperatures from 1e-10 to 1e16; it is finite, as 0 times infinity in an entropy would be NaN.
OUTSIDE_LOGIT: Final = -1e20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """The tokens that a row's distribution is over, for rows whose sampler truncated it.

    N kept tokens in all, those of a row one after the other, rows ascending. A row without any has
    the whole vocabulary.

    Attributes:
        token_N: int32 token ids in [0, V), distinct within a row.
        row_N: int32; the row of each, on the device of `token_N`.
        first_R1: int64 [R + 1] on the CPU: row r keeps the tokens [first[r], first[r + 1]). Chunks
            of rows are cut by it without waiting for a device.
    """

    token_N: Tensor
    row_N: Tensor
    first_R1: Tensor

    def of_rows(self, rows: slice) -> "SamplingMask | None":
        """The mask of some rows, counted from the first of them; None: they keep all tokens."""
        first, last, _ = rows.indices(len(self.first_R1) - 1)
        first_R1 = self.first_R1[first : last + 1]
        start, stop = int(first_R1[0]), int(first_R1[-1])
        if start == stop:
            return None
        return SamplingMask(
            token_N=self.token_N[start:stop],
            row_N=self.row_N[start:stop] - first,
            first_R1=first_R1 - start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTerm:
    """What an adapter of rank A on the LM head adds to the logits, u b^T; or the gradient of both.

    Attributes:
        u_RA: Factor of each row, in the dtype of the hidden states.
        b_VA: Factor of each token, in the same dtype.
    """

    u_RA: Tensor
    b_VA: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Hidden rows, the LM head, and which targets each row predicts.

    Attributes:
        hidden_RD: Hidden states of the predicting rows.
        lm_head_VD: Weight of the LM head, in the dtype of the hidden states.
        targets_M: int64 token ids in [0, V).
        row_of_target_M: int64 rows in [0, R).
        temperature_R: Positive divisor of each row's logits, in the accumulation dtype.
        mask: The tokens that each row's softmax is over; None: all, of every row.
        term: What is added to the products of hidden states and head; None: nothing.
    """

    hidden_RD: Tensor
    lm_head_VD: Tensor
    targets_M: Tensor
    row_of_target_M: Tensor
    temperature_R: Tensor
    mask: SamplingMask | None = None
    term: LowRankTerm | None = None

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of logits, log-probs and entropies."""
        return accumulation_dtype(self.hidden_RD.dtype)

    def mask_logits(self, rows: slice, logits_CV: Tensor) -> None:
        """Takes what the rows do not keep out of their logits, in place."""
        mask = None if self.mask is None else self.mask.of_rows(rows)
        if mask is None:
            return
        num_rows, (stride, _), row_N = len(logits_CV), logits_CV.stride(), mask.row_N.long()
        # Flat, because torch would copy rows with a gap between them to write single logits.
        flat = logits_CV.as_strided(((num_rows - 1) * stride + logits_CV.shape[1],), (1,))
        place_N = row_N * stride + mask.token_N
        logit_N = flat[place_N]
        is_masked_C = torch.zeros(num_rows, dtype=torch.bool, device=logits_CV.device)
        logits_CV.masked_fill_(is_masked_C.index_fill_(0, row_N, True)[:, None], OUTSIDE_LOGIT)
        flat[place_N] = logit_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Inputs of a backward besides the operands.

    Attributes:
        dlogprob_M: Gradient of the log-probs, or None where it is zero.
        dentropy_R: Gradient of the entropies, or None where it is zero.
        entropy_R: Entropies that the forward gave.
        lse_R: Log-sum-exps of the logits over temperature that the forward gave.
        needs_lm_head: Whether the gradient of the LM head is asked for.
    """

    dlogprob_M: Tensor | None
    dentropy_R: Tensor | None
    entropy_R: Tensor
    lse_R: Tensor
    needs_lm_head: bool


# Rows; logprob_M and entropy_R, of which those of the rows and of all before them are there ->
# their gradients, [M] and [R], None where zero, of which those of the rows and their targets are
# read. Called once for each run of rows, in order; what it returned before may be returned again.
SeedsOfRows = Callable[[slice, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentiatedLogprobs:
    """Results of one pass over the rows.

    Attributes:
        logprob_M: Log-probs of the targets, in the accumulation dtype.
        entropy_R: Entropies of the rows, in the accumulation dtype.
        dhidden_RD: Gradient of the hidden states, in their dtype.
        dlm_head_VD: Gradient of the LM head, in its dtype; no rows where not asked for.
        dterm: Gradient of the low-rank term, in its dtype; None where there is no term.
    """

    logprob_M: Tensor
    entropy_R: Tensor
    dhidden_RD: Tensor
    dlm_head_VD: Tensor
    dterm: LowRankTerm | None = None


def check_shapes(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    mask: SamplingMask | None = None,
    term: LowRankTerm | None = None,
) -> None:
    """Raises `KernelArgumentError` for a wrong shape, dtype or device."""
    num_rows = hidden_RD.shape[0] if hidden_RD.ndim else 0
    num_targets = targets_M.shape[0] if targets_M.ndim else 0
    expected_dims = (
        ("hidden_RD", hidden_RD, 2),
        ("lm_head_VD", lm_head_VD, 2),
        ("targets_M", targets_M, 1),
        ("row_of_target_M", row_of_target_M, 1),
        ("temperature_R", temperature_R, 1),
    )
    for name, tensor, num_dims in expected_dims:
        if tensor.ndim != num_dims:
            raise KernelArgumentError(name, f"{tensor.ndim} dimensions, expected {num_dims}")
        if tensor.device != hidden_RD.device:
            got = f"on {tensor.device}, expected {hidden_RD.device} as hidden_RD"
            raise KernelArgumentError(name, got)
    expected_dtypes = (
        ("hidden_RD", hidden_RD, tuple(ACCUMULATION_DTYPES)),
        ("lm_head_VD", lm_head_VD, (hidden_RD.dtype,)),
        ("targets_M", targets_M, (torch.int64,)),
        ("row_of_target_M", row_of_target_M, (torch.int64,)),
        ("temperature_R", temperature_R, (torch.float32, torch.float64)),
    )
    for name, tensor, dtypes in expected_dtypes:
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise KernelArgumentError(name, f"dtype {tensor.dtype}, expected {expected}")
    if lm_head_VD.shape[0] == 0 or lm_head_VD.shape[1] != hidden_RD.shape[1]:
        got = f"shape {tuple(lm_head_VD.shape)}, expected [1 or more, {hidden_RD.shape[1]}]"
        raise KernelArgumentError("lm_head_VD", got)
    if row_of_target_M.shape[0] != num_targets:
        got = f"{row_of_target_M.shape[0]} values, expected {num_targets} as targets_M"
        raise KernelArgumentError("row_of_target_M", got)
    if temperature_R.shape[0] != num_rows:
        got = f"{temperature_R.shape[0]} values, expected {num_rows} as hidden_RD"
        raise KernelArgumentError("temperature_R", got)
    if mask is not None:
        _check_mask(mask, num_rows, hidden_RD.device)
    if term is not None:
        _check_term(term, hidden_RD, lm_head_VD)


def _check_term(term: LowRankTerm, hidden_RD: Tensor, lm_head_VD: Tensor) -> None:
    rank = term.u_RA.shape[1] if term.u_RA.ndim == 2 else 0
    expected_shapes = (
        ("term.u_RA", term.u_RA, (len(hidden_RD), max(rank, 1))),
        ("term.b_VA", term.b_VA, (len(lm_head_VD), max(rank, 1))),
    )
    for name, tensor, shape in expected_shapes:
        got = tensor.dtype, tuple(tensor.shape), tensor.device
        expected = hidden_RD.dtype, shape, hidden_RD.device
        if got != expected:
            raise _misfit(name, got, expected)


def _misfit(name: str, got: tuple[object, ...], expected: tuple[object, ...]) -> Exception:
    form = "{} of shape {} on {}"
    return KernelArgumentError(name, f"{form.format(*got)}, expected {form.format(*expected)}")


def _check_mask(mask: SamplingMask, num_rows: int, device: torch.device) -> None:
    num_kept = mask.token_N.shape[0] if mask.token_N.ndim else 0
    expected_forms = (
        ("mask.token_N", mask.token_N, (torch.int32, (num_kept,), device)),
        ("mask.row_N", mask.row_N, (torch.int32, (num_kept,), device)),
        ("mask.first_R1", mask.first_R1, (torch.int64, (num_rows + 1,), torch.device("cpu"))),
    )
    for name, tensor, expected in expected_forms:
        got = tensor.dtype, tuple(tensor.shape), tensor.device
        if got != expected:
            raise _misfit(name, got, expected)


def check_values(operands: Operands) -> None:
    """Checks indices and temperatures where that costs no synchronisation.

    The device itself is stopped where a mask has a token out of range: it would mask another row's.
    """
    mask, vocab_size = operands.mask, len(operands.lm_head_VD)
    if operands.hidden_RD.device.type != "cpu":
        if mask is not None and len(mask.token_N):
            low, high = mask.token_N.aminmax()
            is_held = (low >= 0) & (high < vocab_size)
            torch.ops.aten._assert_async.msg(is_held, "mask.token_N is out of range")
        return
    indices = (
        ("targets_M", operands.targets_M, vocab_size),
        ("row_of_target_M", operands.row_of_target_M, len(operands.hidden_RD)),
    )
    for name, index_M, size in indices:
        _require_all((index_M >= 0) & (index_M < size), name, index_M, f"in [0, {size})")
    temperature_R = operands.temperature_R
    is_positive = (temperature_R > 0) & temperature_R.isfinite()
    _require_all(is_positive, "temperature_R", temperature_R, "a positive finite number")
    if mask is not None:
        _check_mask_values(mask, vocab_size)


def _check_mask_values(mask: SamplingMask, vocab_size: int) -> None:
    token_N, first_R1 = mask.token_N, mask.first_R1
    is_token = (token_N >= 0) & (token_N < vocab_size)
    _require_all(is_token, "mask.token_N", token_N, f"in [0, {vocab_size})")
    bounds = torch.tensor([0, len(token_N)])
    if not torch.equal(first_R1[[0, -1]], bounds) or (first_R1.diff() < 0).any():
        got = f"from {int(first_R1[0])} to {int(first_R1[-1])}"
        raise KernelArgumentError("mask.first_R1", f"{got}, expected 0 to {len(token_N)} ascending")
    row_N = torch.arange(len(first_R1) - 1).repeat_interleave(first_R1.diff())
    _require_all(mask.row_N == row_N, "mask.row_N", mask.row_N, "the row that first_R1 says")


def _require_all(holds: Tensor, name: str, values: Tensor, rule: str) -> None:
    if not holds.all():
        first = int(holds.logical_not().nonzero()[0])
        raise KernelArgumentError(name, f"value {values[first].item()} at {first}, expected {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedTargets:
    """Targets by row, those of a row by token.

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
    """Returns the targets by row and token; equal ones keep their order."""
    key_M = operands.row_of_target_M * len(operands.lm_head_VD) + operands.targets_M
    order_M = key_M.argsort(stable=True)
    row_M = operands.row_of_target_M[order_M]
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
