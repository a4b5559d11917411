"""The likeliest tokens of each row, by chunks of logits; their log-probs are `token_logprobs`'.

Logits are in the accumulation dtype, as those of the backends. A temperature changes no order.
"""

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.token_logprobs import fused, reference
from ratoon_kernels.token_logprobs.operands import LowRankTerm


@torch.no_grad()
def best_tokens(
    hidden_RD: Tensor, lm_head_VD: Tensor, num_tokens: int, *, term: LowRankTerm | None = None
) -> Tensor:
    """Returns the likeliest tokens under softmax(hidden @ lm_head^T), without [R, V] logits.

    Args:
        hidden_RD: Hidden states of R predicting rows; bf16, fp16, fp32 or fp64.
        lm_head_VD: Weight of the LM head, same dtype and device.
        num_tokens: B, from 1 to V.
        term: What is added to the logits, as `token_logprobs` takes it; None: nothing.

    Returns:
        int64 ids [R, B], the likeliest first.

    Raises:
        KernelArgumentError: `num_tokens` is out of bounds.
    """
    num_rows, vocab_size = len(hidden_RD), len(lm_head_VD)
    if not 1 <= num_tokens <= vocab_size:
        raise KernelArgumentError("num_tokens", f"{num_tokens}, expected 1 to {vocab_size}")
    dtype = accumulation_dtype(hidden_RD.dtype)
    is_wide = hidden_RD.device.type != "cuda" or hidden_RD.dtype == dtype
    size_bytes = fused.LOGIT_BYTES if hidden_RD.device.type == "cuda" else reference.LOGIT_BYTES
    head_DV = (lm_head_VD.to(dtype) if is_wide else lm_head_VD).T
    best_RB = torch.empty((num_rows, num_tokens), dtype=torch.int64, device=hidden_RD.device)
    for rows in fused.spans(0, num_rows, fused.rows_within(size_bytes, vocab_size, dtype)):
        if is_wide:
            logits_CV = torch.mm(hidden_RD[rows].to(dtype), head_DV)
        else:
            logits_CV = torch.mm(hidden_RD[rows], head_DV, out_dtype=dtype)
        if term is not None:
            u_CA, b_VA = (factor.to(dtype) for factor in (term.u_RA[rows], term.b_VA))
            logits_CV.addmm_(u_CA, b_VA.T)
        best_RB[rows] = logits_CV.topk(num_tokens, dim=1).indices
    return best_RB
