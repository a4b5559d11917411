"""The fused backend of token log-probs: matrix products of torch, Triton between them.

Logits and all that is made of them are fp32 and exist for one chunk of rows at a time; they are
rounded once, as gradients of logits, to the dtype of the inputs. No atomic additions, no
synchronisation with the host.

In shape suffixes C is the rows of a chunk of logits, G those of a group of chunks: the logits need
few rows, but the product that adds to the gradient of the head reads and writes all of it, and
needs many to pay for that.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from ratoon_kernels.token_logprobs.operands import (
    DifferentiatedLogprobs,
    LowRankTerm,
    Operands,
    SeedsOfRows,
    SortedTargets,
    Upstream,
    assert_in_range,
    sort_targets,
)

# fp32 logits of one chunk, and their gradients of one group: 1,024 and 4,096 rows of a vocabulary
# of 152K in 16 bits.
LOGIT_BYTES: Final = 640 * 2**20
DLOGIT_BYTES: Final = 1280 * 2**20

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_MIN_CAPABILITY_MAJOR: Final = 8
# Rows of both buffers start at multiples of this many values, which cuBLAS' fast kernels ask for.
_ROW_ALIGNMENT: Final = 64
# Gradients of logits are scaled to at most this in fp16, whose greatest value is 65,504.
_LOG2_FP16_PEAK: Final = 15
_MAX_LOG2_SCALE: Final = 100

# Rows, room for their logits, and where the gradient of these is to be written.
_WriteGradient = Callable[[slice, Tensor, Tensor], None]


def unavailable_reason() -> str | None:
    """Returns what this machine lacks, or None."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not _has_triton():
        return "the package triton is not installed"
    return None if torch.cuda.is_available() else "no NVIDIA GPU is visible"


def unsupported_reason(
    device: torch.device, dtype: torch.dtype, _head_dim: int, _is_deterministic: bool
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    if device.type != "cuda":
        return f"no support for {device.type} tensors"
    if dtype not in DTYPES:
        return f"no support for dtype {dtype}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _MIN_CAPABILITY_MAJOR:
        return f"compute capability {major}.{minor}, needs {_MIN_CAPABILITY_MAJOR}.0 or more"
    return None


def forward(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprob_M, entropy_R and lse_R in fp32."""
    hidden_RD, head_VD = operands.hidden_RD, operands.lm_head_VD
    num_rows, vocab_size = len(hidden_RD), len(head_VD)
    with torch.cuda.device_of(hidden_RD):
        reduction = _Reduction.of(operands, sort_targets(operands))
        chunk_rows = rows_within(LOGIT_BYTES, vocab_size, torch.float32)
        buffer_CV = _row_buffer(hidden_RD, min(chunk_rows, num_rows), vocab_size, torch.float32)
        for rows in spans(0, num_rows, chunk_rows):
            logits_CV = buffer_CV[: rows.stop - rows.start]
            _write_logits(operands, rows, logits_CV)
            reduction.add(rows, logits_CV)
    return reduction.logprob_M, reduction.entropy_R, reduction.lse_R


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, LowRankTerm | None]:
    """Returns dhidden_RD, dlm_head_VD and the gradient of the term in the hidden states' dtype.

    The second has no rows where the gradient of the LM head is not asked for. Where it is, it is
    accumulated in fp32 over all rows and rounded once, as that of the term's tokens is.
    """
    hidden_RD = operands.hidden_RD
    dlogprob_M, dentropy_R = upstream.dlogprob_M, upstream.dentropy_R
    with torch.cuda.device_of(hidden_RD):
        targets = sort_targets(operands)
        scale = dlogit_scale(hidden_RD.dtype, dlogprob_M, dentropy_R, operands, targets)
        gradient = _LogitGradient.of(operands, targets, scale, upstream.entropy_R, upstream.lse_R)
        seeds = _sort_seeds(targets, dlogprob_M, dentropy_R)

        def write(rows: slice, logits_CV: Tensor, dlogits_CV: Tensor) -> None:
            _write_logits(operands, rows, logits_CV)
            gradient.write(rows, seeds, logits_CV, dlogits_CV)

        return _add_groups(operands, write, scale, needs_lm_head=upstream.needs_lm_head)


def forward_backward(
    operands: Operands, seeds_of: SeedsOfRows, *, needs_lm_head: bool
) -> DifferentiatedLogprobs:
    """Returns what both give, in the same bits; the gradient is made of the forward's logits."""
    hidden_RD = operands.hidden_RD
    with torch.cuda.device_of(hidden_RD):
        targets = sort_targets(operands)
        reduction = _Reduction.of(operands, targets)
        scale = torch.ones((), dtype=torch.float32, device=hidden_RD.device)
        gradient = _LogitGradient.of(operands, targets, scale, reduction.entropy_R, reduction.lse_R)

        def write(rows: slice, logits_CV: Tensor, dlogits_CV: Tensor) -> None:
            _write_logits(operands, rows, logits_CV)
            reduction.add(rows, logits_CV)
            seeds = _sort_seeds(targets, *seeds_of(rows, reduction.logprob_M, reduction.entropy_R))
            gradient.write(rows, seeds, logits_CV, dlogits_CV)

        dhidden_RD, dlm_head_VD, dterm = _add_groups(
            operands, write, scale, needs_lm_head=needs_lm_head
        )
    return DifferentiatedLogprobs(
        logprob_M=reduction.logprob_M,
        entropy_R=reduction.entropy_R,
        dhidden_RD=dhidden_RD,
        dlm_head_VD=dlm_head_VD,
        dterm=dterm,
    )


def rows_within(size_bytes: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Returns how many rows of a vocabulary fit: a power of two, which tiles of products divide."""
    num_rows = max(1, size_bytes // (vocab_size * dtype.itemsize))
    return 1 << (num_rows.bit_length() - 1)


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yields [start, stop) in order, `size` at a time; the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def dlogit_scale(
    dtype: torch.dtype,
    dlogprob_M: Tensor | None,
    dentropy_R: Tensor | None,
    operands: Operands,
    targets: SortedTargets,
) -> Tensor:
    """Returns the fp32 scalar by which gradients of logits are multiplied before they are rounded.

    1 but for fp16, where gradients of probabilities are mostly below its least value. There it
    takes a bound of all of them close to the greatest value; the sums made of them are fp32, and
    are divided by it. It is a power of two and depends on maxima alone, so it has no order to
    depend on. Of scaled values, those below the greatest by 2^-29 and more lose bits, 2^-40 all.

    Args:
        dtype: Dtype of the gradients of logits.
        dlogprob_M: Gradient of the log-probs, or None where it is zero.
        dentropy_R: Gradient of the entropies, or None where it is zero.
        operands: What the call is given.
        targets: Its sorted targets.
    """
    bound = torch.zeros((), dtype=torch.float32, device=operands.hidden_RD.device)
    if dtype != torch.float16 or not len(operands.hidden_RD):
        return torch.ones_like(bound)
    if dlogprob_M is not None and len(dlogprob_M):
        targets_of_a_row = targets.first_R1.diff().amax()
        bound = bound + 2 * targets_of_a_row * dlogprob_M.abs().amax()
    if dentropy_R is not None:
        # |p log p| <= 1 / e, and H <= log V.
        vocab_size = torch.full_like(bound, len(operands.lm_head_VD))
        bound = bound + dentropy_R.abs().amax() * (vocab_size.log() + 1)
    bound = bound / operands.temperature_R.amin()
    return (_LOG2_FP16_PEAK - bound.log2()).floor().clamp(max=_MAX_LOG2_SCALE).exp2()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """Results of reducing logits, filled chunk by chunk.

    Attributes:
        targets: The sorted targets, in range.
        temperature_R: Temperatures, contiguous.
        logprob_M: Log-probs of the targets, in the order in which they were given.
        entropy_R: Entropies.
        lse_R: Log-sum-exps of the logits over temperature.
    """

    targets: SortedTargets
    temperature_R: Tensor
    logprob_M: Tensor
    entropy_R: Tensor
    lse_R: Tensor

    @classmethod
    def of(cls, operands: Operands, targets: SortedTargets) -> "_Reduction":
        """Returns one that is empty yet."""
        hidden_RD, num_rows = operands.hidden_RD, len(operands.hidden_RD)
        assert_in_range(targets, num_rows, len(operands.lm_head_VD))
        sizes = (len(operands.targets_M), num_rows, num_rows)
        logprob_M, entropy_R, lse_R = (
            hidden_RD.new_empty(size, dtype=torch.float32) for size in sizes
        )
        return cls(
            targets=targets,
            temperature_R=operands.temperature_R.contiguous(),
            logprob_M=logprob_M,
            entropy_R=entropy_R,
            lse_R=lse_R,
        )

    def add(self, rows: slice, logits_CV: Tensor) -> None:
        """Reads the logits of some rows."""
        from ratoon_kernels.token_logprobs import fused_kernels

        fused_kernels.reduce_rows(
            logits_CV,
            self.temperature_R[rows],
            self.targets.first_R1[rows.start : rows.stop + 1],
            self.targets.token_M,
            self.targets.order_M,
            self.logprob_M,
            self.entropy_R[rows],
            self.lse_R[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seeds:
    """Gradients of results.

    Attributes:
        dlogprob_M: Gradient of the log-probs in the sorted targets' order, or None where zero.
        dentropy_R: Gradient of the entropies, contiguous, or None where it is zero.
    """

    dlogprob_M: Tensor | None
    dentropy_R: Tensor | None


def _sort_seeds(
    targets: SortedTargets, dlogprob_M: Tensor | None, dentropy_R: Tensor | None
) -> _Seeds:
    return _Seeds(
        dlogprob_M=None if dlogprob_M is None else dlogprob_M[targets.order_M],
        dentropy_R=None if dentropy_R is None else dentropy_R.contiguous(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitGradient:
    """Inputs that the gradients of all chunks of logits share.

    Attributes:
        targets: The sorted targets.
        temperature_R: Temperatures, contiguous.
        scale_R: What the gradient of a row's scaled logits is multiplied by before rounding.
        entropy_R: Entropies.
        lse_R: Log-sum-exps of the logits over temperature.
    """

    targets: SortedTargets
    temperature_R: Tensor
    scale_R: Tensor
    entropy_R: Tensor
    lse_R: Tensor

    @classmethod
    def of(
        cls,
        operands: Operands,
        targets: SortedTargets,
        scale: Tensor,
        entropy_R: Tensor,
        lse_R: Tensor,
    ) -> "_LogitGradient":
        """Returns it for gradients that are to be multiplied by `scale`."""
        return cls(
            targets=targets,
            temperature_R=operands.temperature_R.contiguous(),
            scale_R=scale / operands.temperature_R,
            entropy_R=entropy_R,
            lse_R=lse_R,
        )

    def write(self, rows: slice, seeds: _Seeds, logits_CV: Tensor, dlogits_CV: Tensor) -> None:
        """Reads the logits of some rows, writes their gradient."""
        from ratoon_kernels.token_logprobs import fused_kernels

        fused_kernels.differentiate_logits(
            logits_CV,
            dlogits_CV,
            self.temperature_R[rows],
            self.scale_R[rows],
            self.lse_R[rows],
            self.entropy_R[rows],
            None if seeds.dentropy_R is None else seeds.dentropy_R[rows],
            self.targets.first_R1[rows.start : rows.stop + 1],
            self.targets.token_M,
            seeds.dlogprob_M,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FactorGradients:
    """Gradients of the factors of one product x w^T in the logits: of K features.

    Attributes:
        x_RK: Factor of the rows.
        w_VK: Factor of the tokens, in the same dtype.
        dx_GK: Room for the gradient of a group's rows, in fp32.
        dx_RK: Gradient of the rows, in their dtype.
        dw_VK: fp32 sum over rows, still scaled; without rows where it is not asked for.
    """

    x_RK: Tensor
    w_VK: Tensor
    dx_GK: Tensor
    dx_RK: Tensor
    dw_VK: Tensor

    @classmethod
    def of(cls, x_RK: Tensor, w_VK: Tensor, group_size: int, *, needs_w: bool) -> Self:
        """Returns them empty, or zero where there are no rows."""
        num_features = x_RK.shape[1]
        dw_VK = w_VK.new_empty((len(w_VK) if needs_w else 0, num_features), dtype=torch.float32)
        return cls(
            x_RK=x_RK,
            w_VK=w_VK,
            dx_GK=x_RK.new_empty((group_size, num_features), dtype=torch.float32),
            dx_RK=x_RK.new_empty(x_RK.shape),
            dw_VK=dw_VK if len(x_RK) else dw_VK.zero_(),
        )

    def add(self, group: slice, dlogits_GV: Tensor, scale: Tensor) -> None:
        """Adds those of a group's rows, groups in order."""
        # Through fp32, because products rounded to 16 bits may be made of partial sums that are.
        dx_GK = self.dx_GK[: len(dlogits_GV)]
        _multiply(dlogits_GV, self.w_VK, dx_GK)
        _round(dx_GK, scale, self.dx_RK[group])
        if len(self.dw_VK):
            _multiply(dlogits_GV.T, self.x_RK[group], self.dw_VK, adds=group.start > 0)


def _add_groups(
    operands: Operands, write: _WriteGradient, scale: Tensor, *, needs_lm_head: bool
) -> tuple[Tensor, Tensor, LowRankTerm | None]:
    """Returns dhidden_RD, dlm_head_VD and the gradient of the term."""
    sums = _sum_groups(operands, write, scale, needs_lm_head=needs_lm_head)
    # The buffers of all rows are gone by now.
    gradients = [(dx_RK, _rounded(dw_VK, dx_RK, scale)) for dx_RK, dw_VK in sums]
    terms = [LowRankTerm(u_RA=du_RA, b_VA=db_VA) for du_RA, db_VA in gradients[1:]]
    return *gradients[0], terms[0] if terms else None


def _sum_groups(
    operands: Operands, write: _WriteGradient, scale: Tensor, *, needs_lm_head: bool
) -> list[tuple[Tensor, Tensor]]:
    """Returns the gradients of each product's factors, of the head and of the term, if any: that of
    the rows, and in fp32 that of the tokens, still multiplied by `scale`."""
    hidden_RD, head_VD, term = operands.hidden_RD, operands.lm_head_VD, operands.term
    num_rows, vocab_size = len(hidden_RD), len(head_VD)
    chunk_rows = rows_within(LOGIT_BYTES, vocab_size, torch.float32)
    group_rows = rows_within(DLOGIT_BYTES, vocab_size, hidden_RD.dtype)
    if not needs_lm_head:
        group_rows = chunk_rows
    group_size, chunk_size = min(group_rows, num_rows), min(chunk_rows, group_rows, num_rows)
    logits_CV = _row_buffer(hidden_RD, chunk_size, vocab_size, torch.float32)
    dlogits_GV = _row_buffer(hidden_RD, group_size, vocab_size, hidden_RD.dtype)
    factors = [_FactorGradients.of(hidden_RD, head_VD, group_size, needs_w=needs_lm_head)]
    if term is not None:
        factors.append(_FactorGradients.of(term.u_RA, term.b_VA, group_size, needs_w=True))
    for group in spans(0, num_rows, group_rows):
        size = group.stop - group.start
        for rows in spans(group.start, group.stop, chunk_rows):
            dlogits_CV = dlogits_GV[rows.start - group.start : rows.stop - group.start]
            write(rows, logits_CV[: rows.stop - rows.start], dlogits_CV)
        for each in factors:
            each.add(group, dlogits_GV[:size], scale)
    return [(each.dx_RK, each.dw_VK) for each in factors]


def _rounded(dw_VK: Tensor, like: Tensor, scale: Tensor) -> Tensor:
    """Returns a gradient without its scale, in the dtype of `like`."""
    rounded_VK = dw_VK.new_empty(dw_VK.shape, dtype=like.dtype)
    _round(dw_VK, scale, rounded_VK)
    return rounded_VK


def _round(gradient: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes an fp32 gradient, without its scale, to `out` in the dtype of that."""
    if out.dtype is torch.float16:
        torch.mul(gradient, scale.reciprocal(), out=out)
    else:
        # The scale is 1, and a copy is several times faster than a product that changes the dtype.
        out.copy_(gradient)


def _write_logits(operands: Operands, rows: slice, logits_CV: Tensor) -> None:
    """Writes the logits of some rows, of the tokens that they keep."""
    term = operands.term
    if term is not None:
        # First, so that the large product adds while it computes, and nothing else reads the term.
        _multiply(term.u_RA[rows], term.b_VA.T, logits_CV)
    hidden_CD, head_VD = operands.hidden_RD[rows], operands.lm_head_VD
    _multiply(hidden_CD, head_VD.T, logits_CV, adds=term is not None)
    operands.mask_logits(rows, logits_CV)


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Writes the product of two matrices to `out` in fp32, or adds it.

    Of fp32 operands the product is as exact as torch's setting for fp32 products says.
    """
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if adds else torch.mm(a, b, out=out)
    elif adds:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _row_buffer(like: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised matrix whose rows are aligned."""
    stride = -(-num_columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return like.new_empty((num_rows, stride), dtype=dtype)[:, :num_columns]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
