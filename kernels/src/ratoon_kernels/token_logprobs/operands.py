"""Checked inputs of a token log-probs backend.

Target m is predicted by hidden row `row_of_target_M[m]`; a row may serve many targets or none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.precision import accumulation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Hidden rows, the LM head, and which targets each row predicts.

    Attributes:
        hidden_RD: Hidden states of the predicting rows.
        lm_head_VD: Weight of the LM head, in the dtype of the hidden states.
        targets_M: int64 token ids in [0, V).
        row_of_target_M: int64 rows in [0, R).
        temperature_R: Positive divisor of each row's logits, in the accumulation dtype.
    """

    hidden_RD: Tensor
    lm_head_VD: Tensor
    targets_M: Tensor
    row_of_target_M: Tensor
    temperature_R: Tensor

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of logits, log-probs and entropies."""
        return accumulation_dtype(self.hidden_RD.dtype)


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
    """

    logprob_M: Tensor
    entropy_R: Tensor
    dhidden_RD: Tensor
    dlm_head_VD: Tensor
