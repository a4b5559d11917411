"""Log-probs of tokens and gradients of a loss of them, in one pass over the LM head's logits.

The bits are those of `token_logprobs` and its backward; logits are computed once, where those two
compute them twice.
"""

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.registry import select_backend
from ratoon_kernels.token_logprobs.backends import BACKENDS, OP
from ratoon_kernels.token_logprobs.checks import check_shapes, check_values
from ratoon_kernels.token_logprobs.operands import (
    DifferentiatedLogprobs,
    Operands,
    SeedsOfRows,
)


def token_logprobs_forward_backward(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    seeds_of: SeedsOfRows,
    *,
    needs_lm_head: bool,
    backend: str | None = None,
) -> DifferentiatedLogprobs:
    """`token_logprobs` and the gradients of a loss whose terms are each of one row.

    Nothing of it is recorded for autograd, and nothing waits for the device.

    Args:
        hidden_RD: As `token_logprobs` takes it, and so are the four that follow; not fp16, whose
            gradients are scaled by the greatest of all rows.
        lm_head_VD: Weight of the LM head.
        targets_M: Token ids.
        row_of_target_M: The row that predicts each.
        temperature_R: The divisor of each row's logits.
        seeds_of: Called with a slice of rows, logprob_M and entropy_R (those of the slice are
            final), for consecutive slices; returns the loss's gradients with respect to both, in
            their dtype and shape, or None where one is zero. Only those of the slice are read.
        needs_lm_head: Whether the gradient of the LM head is asked for.
        backend: A backend's name, or None for the best one available.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    check_shapes(hidden_RD, lm_head_VD, targets_M, row_of_target_M, temperature_R)
    if hidden_RD.dtype is torch.float16:
        raise KernelArgumentError("hidden_RD", "dtype torch.float16, expected one without scaling")
    name = select_backend(OP, backend, hidden_RD.device, hidden_RD.dtype, hidden_RD.shape[-1])
    operands = Operands(
        hidden_RD=hidden_RD.detach(),
        lm_head_VD=lm_head_VD.detach(),
        targets_M=targets_M,
        row_of_target_M=row_of_target_M,
        temperature_R=temperature_R.to(accumulation_dtype(hidden_RD.dtype)),
    )
    check_values(operands)
    return BACKENDS[name].forward_backward(operands, seeds_of, needs_lm_head=needs_lm_head)
