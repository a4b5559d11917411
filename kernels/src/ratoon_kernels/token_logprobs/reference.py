"""The reference backend of token log-probs: eager torch, any device, the truth for the others.

Logits exist for one chunk of rows at a time, within `LOGIT_BYTES`, in the accumulation dtype; the
backward computes them again. For the same inputs and thread count the CPU's bits are the same on
every call.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.precision import ACCUMULATION_DTYPES
from ratoon_kernels.token_logprobs.operands import (
    DifferentiatedLogprobs,
    LowRankTerm,
    Operands,
    SeedsOfRows,
    Upstream,
)

LOGIT_BYTES: Final = 32 * 2**20


def unavailable_reason() -> str | None:
    """Returns None: torch is all that it needs."""
    return None


def unsupported_reason(
    _device: torch.device, dtype: torch.dtype, _head_dim: int, _is_deterministic: bool
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    return None if dtype in ACCUMULATION_DTYPES else f"no support for dtype {dtype}"


def forward(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprob_M, entropy_R and lse_R in the accumulation dtype."""
    operands, results = _widened(operands), _empty_results(operands)
    for chunk in _chunks(operands):
        _reduce(_scaled_logits(operands, chunk), chunk, results)
    return results


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, LowRankTerm | None]:
    """Returns dhidden_RD, dlm_head_VD and the gradient of the term in the hidden states' dtype.

    The second has no rows where the gradient of the LM head is not asked for.
    """
    operands = _widened(operands)
    sums = _GradientSums.zeros(operands, needs_lm_head=upstream.needs_lm_head)
    for chunk in _chunks(operands):
        sums.add(operands, chunk, _scaled_logits(operands, chunk), upstream)
    return sums.rounded()


def forward_backward(
    operands: Operands, seeds_of: SeedsOfRows, *, needs_lm_head: bool
) -> DifferentiatedLogprobs:
    """Returns what both give, in the same bits; the gradient is made of the forward's logits."""
    logprob_M, entropy_R, lse_R = results = _empty_results(operands)
    operands = _widened(operands)
    sums = _GradientSums.zeros(operands, needs_lm_head=needs_lm_head)
    for chunk in _chunks(operands):
        logits_RV = _scaled_logits(operands, chunk)
        _reduce(logits_RV.clone(), chunk, results)
        dlogprob_M, dentropy_R = seeds_of(chunk.rows, logprob_M, entropy_R)
        upstream = Upstream(
            dlogprob_M=dlogprob_M,
            dentropy_R=dentropy_R,
            entropy_R=entropy_R,
            lse_R=lse_R,
            needs_lm_head=needs_lm_head,
        )
        sums.add(operands, chunk, logits_RV, upstream)
    dhidden_RD, dlm_head_VD, dterm = sums.rounded()
    return DifferentiatedLogprobs(
        logprob_M=logprob_M,
        entropy_R=entropy_R,
        dhidden_RD=dhidden_RD,
        dlm_head_VD=dlm_head_VD,
        dterm=dterm,
    )


def _widened(operands: Operands) -> Operands:
    """Returns them with the factors of tokens in the accumulation dtype."""
    dtype, term = operands.accumulation_dtype, operands.term
    if term is not None:
        term = replace(term, b_VA=term.b_VA.to(dtype))
    return replace(operands, lm_head_VD=operands.lm_head_VD.to(dtype), term=term)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Rows that fit the budget, and the targets that they predict.

    Attributes:
        rows: The rows.
        targets_M: int64; indices of those targets.
        row_in_chunk_M: int64; the row of each, counted from the first of the chunk.
        token_M: int64; the token id of each.
    """

    rows: slice
    targets_M: Tensor
    row_in_chunk_M: Tensor
    token_M: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientSums:
    """Gradients that add up over chunks.

    Attributes:
        dhidden_RD: Gradient of the hidden states, in their dtype.
        dhead_VD: Gradient of the head, in the accumulation dtype; no rows if not requested.
        dterm: Gradient of the term, of its rows in their dtype and of its tokens in the
            accumulation dtype; None where there is no term.
    """

    dhidden_RD: Tensor
    dhead_VD: Tensor
    dterm: LowRankTerm | None

    @classmethod
    def zeros(cls, operands: Operands, *, needs_lm_head: bool) -> "_GradientSums":
        """Returns sums of nothing, for widened operands."""
        head_VD = operands.lm_head_VD if needs_lm_head else operands.lm_head_VD[:0]
        term, dterm = operands.term, None
        if term is not None:
            dterm = LowRankTerm(u_RA=torch.zeros_like(term.u_RA), b_VA=torch.zeros_like(term.b_VA))
        return cls(
            dhidden_RD=torch.zeros_like(operands.hidden_RD),
            dhead_VD=torch.zeros_like(head_VD),
            dterm=dterm,
        )

    def add(
        self,
        operands: Operands,
        chunk: "_Chunk",
        logits_RV: Tensor,
        upstream: Upstream,
    ) -> None:
        """Adds a chunk's, of whose scaled logits nothing is left."""
        logp_RV = logits_RV.sub_(upstream.lse_R[chunk.rows, None])
        dlogits_RV = _logit_gradient(logp_RV, chunk, upstream)
        dlogits_RV.div_(operands.temperature_R[chunk.rows, None])
        dhidden_RD = torch.mm(dlogits_RV, operands.lm_head_VD)
        self.dhidden_RD[chunk.rows] = dhidden_RD.to(self.dhidden_RD.dtype)
        if upstream.needs_lm_head:
            hidden_RD = operands.hidden_RD[chunk.rows].to(self.dhead_VD.dtype)
            self.dhead_VD.addmm_(dlogits_RV.T, hidden_RD)
        if operands.term is not None and self.dterm is not None:
            term, du_RA = operands.term, self.dterm.u_RA
            du_RA[chunk.rows] = torch.mm(dlogits_RV, term.b_VA).to(du_RA.dtype)
            self.dterm.b_VA.addmm_(dlogits_RV.T, term.u_RA[chunk.rows].to(term.b_VA.dtype))

    def rounded(self) -> tuple[Tensor, Tensor, LowRankTerm | None]:
        """Returns all in the dtype of the hidden states."""
        dtype, dterm = self.dhidden_RD.dtype, self.dterm
        if dterm is not None:
            dterm = replace(dterm, b_VA=dterm.b_VA.to(dtype))
        return self.dhidden_RD, self.dhead_VD.to(dtype), dterm


def _chunks(operands: Operands) -> Iterator[_Chunk]:
    num_rows, vocab_size = len(operands.hidden_RD), len(operands.lm_head_VD)
    row_bytes = vocab_size * operands.accumulation_dtype.itemsize
    chunk_rows = max(1, LOGIT_BYTES // row_bytes)
    sorted_rows, by_row = operands.row_of_target_M.sort(stable=True)
    starts = torch.arange(0, num_rows + chunk_rows, chunk_rows, device=sorted_rows.device)
    bounds = torch.searchsorted(sorted_rows, starts).tolist()
    for chunk, start in enumerate(range(0, num_rows, chunk_rows)):
        targets_M = by_row[bounds[chunk] : bounds[chunk + 1]]
        yield _Chunk(
            rows=slice(start, min(start + chunk_rows, num_rows)),
            targets_M=targets_M,
            row_in_chunk_M=operands.row_of_target_M[targets_M] - start,
            token_M=operands.targets_M[targets_M],
        )


def _empty_results(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprob_M, entropy_R and lse_R, to be filled."""
    dtype, device = operands.accumulation_dtype, operands.hidden_RD.device
    logprob_M = torch.empty(len(operands.targets_M), dtype=dtype, device=device)
    entropy_R = torch.empty(len(operands.hidden_RD), dtype=dtype, device=device)
    return logprob_M, entropy_R, torch.empty_like(entropy_R)


def _reduce(logits_RV: Tensor, chunk: _Chunk, results: tuple[Tensor, Tensor, Tensor]) -> None:
    """Writes the results of a chunk; overwrites logits_RV."""
    logprob_M, entropy_R, lse_R = results
    # The log-sum-exp is written by hand: torch.logsumexp took three times as long as the product
    # that makes the logits.
    max_R = logits_RV.amax(dim=-1)
    exp_RV = logits_RV.sub_(max_R[:, None]).exp()
    sum_R = exp_RV.sum(dim=-1)
    log_sum_R = sum_R.log()
    lse_R[chunk.rows] = max_R + log_sum_R
    target_M = logits_RV[chunk.row_in_chunk_M, chunk.token_M]
    logprob_M[chunk.targets_M] = target_M - log_sum_R[chunk.row_in_chunk_M]
    entropy_R[chunk.rows] = log_sum_R - exp_RV.mul_(logits_RV).sum(dim=-1) / sum_R


def _scaled_logits(operands: Operands, chunk: _Chunk) -> Tensor:
    """Returns logits over temperature of widened operands."""
    head_VD, term = operands.lm_head_VD, operands.term
    logits_RV = torch.mm(operands.hidden_RD[chunk.rows].to(head_VD.dtype), head_VD.T)
    if term is not None:
        logits_RV.addmm_(term.u_RA[chunk.rows].to(head_VD.dtype), term.b_VA.T)
    logits_RV.div_(operands.temperature_R[chunk.rows, None])
    operands.mask_logits(chunk.rows, logits_RV)
    return logits_RV


def _logit_gradient(logp_RV: Tensor, chunk: _Chunk, upstream: Upstream) -> Tensor:
    """Returns the gradient of the scaled logits; overwrites logp_RV.

    d logp_t / dz_j = [j = t] - p_j, and dH / dz_j = -p_j (logp_j + H).
    """
    num_rows, vocab_size = logp_RV.shape
    p_RV = logp_RV.exp()
    if upstream.dlogprob_M is None:
        dlogprob_M = p_RV.new_zeros(len(chunk.targets_M))
    else:
        dlogprob_M = upstream.dlogprob_M[chunk.targets_M]
    weight_R = p_RV.new_zeros(num_rows).index_add_(0, chunk.row_in_chunk_M, dlogprob_M)
    if upstream.dentropy_R is None:
        dlogits_RV = p_RV.mul_(-weight_R[:, None])
    else:
        dentropy_R1 = upstream.dentropy_R[chunk.rows, None]
        logp_RV.add_(upstream.entropy_R[chunk.rows, None]).mul_(dentropy_R1)
        dlogits_RV = p_RV.mul_(logp_RV.add_(weight_R[:, None]).neg_())
    # Flat, because index_add_ over one dimension adds in order on the CPU: the same bits where two
    # targets are the same token of the same row.
    flat_M = chunk.row_in_chunk_M * vocab_size + chunk.token_M
    dlogits_RV.view(-1).index_add_(0, flat_M, dlogprob_M)
    return dlogits_RV
