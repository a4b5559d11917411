"""Token log-probs as a torch custom op, and in one pass with the gradients of a loss.

No backend sees an argument that was not checked here. Shapes and dtypes are checked before the op,
where torch.compile guards them; values inside it, on the CPU, where looking at them costs no
synchronisation. The one pass gives the bits of the op and its backward; logits are computed once,
where those two compute them twice.
"""

from typing import Any

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.registry import TOKEN_LOGPROBS, TOKEN_LOGPROBS_BACKENDS, select_backend
from ratoon_kernels.token_logprobs.operands import (
    DifferentiatedLogprobs,
    LowRankTerm,
    Operands,
    SamplingMask,
    SeedsOfRows,
    Upstream,
    check_shapes,
    check_values,
)


def token_logprobs(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    *,
    mask: SamplingMask | None = None,
    term: LowRankTerm | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens under softmax(hidden @ lm_head^T / temperature), without [R, V] logits.

    Differentiable in the hidden states, the LM head and the term, through both results. The softmax
    of a row with a sampling mask is over the tokens that it keeps, as are its entropy and its
    gradients.

    Args:
        hidden_RD: Hidden states of R predicting rows; bf16, fp16, fp32 or fp64.
        lm_head_VD: Weight of the LM head, same dtype and device.
        targets_M: int64 token ids in [0, V).
        row_of_target_M: int64; the row in [0, R) that predicts each target. A row may serve many.
        temperature_R: fp32 or fp64; the positive divisor of each row's logits.
        mask: Kept tokens of rows, among them the row's targets; None: every row keeps all.
        term: What is added to hidden @ lm_head^T before the temperature; None: nothing.
        backend: A backend's name, or None for the best one available.

    Returns:
        logprob_M of the targets and entropy_R in nats of each row's distribution, both fp32 (fp64
        for fp64 hidden states).

    Raises:
        KernelArgumentError: An argument is wrong; the message names it. Values are looked at on
            the CPU only; on a GPU a wrong index fails in the device's own check.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    check_shapes(hidden_RD, lm_head_VD, targets_M, row_of_target_M, temperature_R, mask, term)
    name = select_backend(
        TOKEN_LOGPROBS, backend, hidden_RD.device, hidden_RD.dtype, hidden_RD.shape[-1]
    )
    temperature_R = temperature_R.to(accumulation_dtype(hidden_RD.dtype))
    kept = (None,) * 3 if mask is None else (mask.token_N, mask.row_N, mask.first_R1)
    factors = (None,) * 2 if term is None else (term.u_RA, term.b_VA)
    logprob_M, entropy_R, _ = _forward(
        hidden_RD, lm_head_VD, targets_M, row_of_target_M, temperature_R, name, *kept, *factors
    )
    return logprob_M, entropy_R


@torch.library.custom_op("ratoon::token_logprobs", mutates_args=())
def _forward(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    backend: str,
    kept_token_N: Tensor | None = None,
    kept_row_N: Tensor | None = None,
    kept_first_R1: Tensor | None = None,
    u_RA: Tensor | None = None,
    b_VA: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = Operands(
        hidden_RD=hidden_RD,
        lm_head_VD=lm_head_VD,
        targets_M=targets_M,
        row_of_target_M=row_of_target_M,
        temperature_R=temperature_R,
        mask=_mask(kept_token_N, kept_row_N, kept_first_R1),
        term=_term(u_RA, b_VA),
    )
    check_values(operands)
    return TOKEN_LOGPROBS_BACKENDS[backend].forward(operands)


def _mask(
    token_N: Tensor | None, row_N: Tensor | None, first_R1: Tensor | None
) -> SamplingMask | None:
    """The mask whose tensors a custom op takes one by one."""
    if token_N is None or row_N is None or first_R1 is None:
        return None
    return SamplingMask(token_N=token_N, row_N=row_N, first_R1=first_R1)


def _term(u_RA: Tensor | None, b_VA: Tensor | None) -> LowRankTerm | None:
    """The term whose tensors a custom op takes one by one."""
    return None if u_RA is None or b_VA is None else LowRankTerm(u_RA=u_RA, b_VA=b_VA)


@_forward.register_fake
def _(
    hidden_RD: Tensor, _lm_head_VD: Tensor, targets_M: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(hidden_RD.dtype)
    num_rows, num_targets = hidden_RD.shape[0], targets_M.shape[0]
    sizes = (num_targets, num_rows, num_rows)
    logprob_M, entropy_R, lse_R = (hidden_RD.new_empty((size,), dtype=dtype) for size in sizes)
    return logprob_M, entropy_R, lse_R


@torch.library.custom_op("ratoon::token_logprobs_backward", mutates_args=())
def _backward(
    dlogprob_M: Tensor | None,
    dentropy_R: Tensor | None,
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    entropy_R: Tensor,
    lse_R: Tensor,
    needs_lm_head: bool,
    backend: str,
    kept_token_N: Tensor | None = None,
    kept_row_N: Tensor | None = None,
    kept_first_R1: Tensor | None = None,
    u_RA: Tensor | None = None,
    b_VA: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands = Operands(
        hidden_RD=hidden_RD,
        lm_head_VD=lm_head_VD,
        targets_M=targets_M,
        row_of_target_M=row_of_target_M,
        temperature_R=temperature_R,
        mask=_mask(kept_token_N, kept_row_N, kept_first_R1),
        term=_term(u_RA, b_VA),
    )
    upstream = Upstream(
        dlogprob_M=dlogprob_M,
        dentropy_R=dentropy_R,
        entropy_R=entropy_R,
        lse_R=lse_R,
        needs_lm_head=needs_lm_head,
    )
    dhidden_RD, dlm_head_VD, dterm = TOKEN_LOGPROBS_BACKENDS[backend].backward(operands, upstream)
    if dterm is None:
        # A custom op returns no None.
        return dhidden_RD, dlm_head_VD, hidden_RD.new_empty(0), hidden_RD.new_empty(0)
    return dhidden_RD, dlm_head_VD, dterm.u_RA, dterm.b_VA


@_backward.register_fake
def _(
    _dlogprob_M: Tensor | None,
    _dentropy_R: Tensor | None,
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_lm_head, factors = others[5], (*others[10:], None, None)[:2]
    num_head_rows = lm_head_VD.shape[0] if needs_lm_head else 0
    dlm_head_VD = lm_head_VD.new_empty((num_head_rows, lm_head_VD.shape[1]))
    du_RA, db_VA = (hidden_RD.new_empty(0 if x is None else x.shape) for x in factors)
    return hidden_RD.new_empty(hidden_RD.shape), dlm_head_VD, du_RA, db_VA


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    tensors, backend, others = inputs[:5], inputs[5], inputs[6:]
    _, entropy_R, lse_R = output
    ctx.save_for_backward(*tensors, entropy_R, lse_R, *others)
    ctx.mark_non_differentiable(lse_R)
    ctx.backend = backend
    # A result that nothing reads then has the gradient None, not zeros to be computed with.
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dlogprob_M: Tensor | None, dentropy_R: Tensor | None, _dlse_R: None
) -> tuple[Tensor | None, ...]:
    needs_lm_head = ctx.needs_input_grad[1]
    operands, others = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    dhidden_RD, dlm_head_VD, du_RA, db_VA = _backward(
        dlogprob_M, dentropy_R, *operands, needs_lm_head, ctx.backend, *others
    )
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    gradients[0] = dhidden_RD
    if needs_lm_head:
        gradients[1] = dlm_head_VD
    if any(factor is not None for factor in others[3:]):
        gradients[9:] = du_RA, db_VA
    return tuple(gradients)


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def token_logprobs_forward_backward(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    seeds_of: SeedsOfRows,
    *,
    needs_lm_head: bool,
    mask: SamplingMask | None = None,
    term: LowRankTerm | None = None,
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
        mask: As `token_logprobs` takes it.
        term: As `token_logprobs` takes it; its gradient is returned.
        backend: A backend's name, or None for the best one available.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    check_shapes(hidden_RD, lm_head_VD, targets_M, row_of_target_M, temperature_R, mask, term)
    if hidden_RD.dtype is torch.float16:
        raise KernelArgumentError("hidden_RD", "dtype torch.float16, expected one without scaling")
    name = select_backend(
        TOKEN_LOGPROBS, backend, hidden_RD.device, hidden_RD.dtype, hidden_RD.shape[-1]
    )
    operands = Operands(
        hidden_RD=hidden_RD.detach(),
        lm_head_VD=lm_head_VD.detach(),
        targets_M=targets_M,
        row_of_target_M=row_of_target_M,
        temperature_R=temperature_R.to(accumulation_dtype(hidden_RD.dtype)),
        mask=mask,
        term=None if term is None else _term(term.u_RA.detach(), term.b_VA.detach()),
    )
    check_values(operands)
    return TOKEN_LOGPROBS_BACKENDS[name].forward_backward(
        operands, seeds_of, needs_lm_head=needs_lm_head
    )
