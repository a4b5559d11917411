"""What a token log-probs backend is given: checked tensors.

In: from `op.py`, after all checks. Out: to backends. Invariant: target m is predicted by hidden row
`row_of_target_M[m]`; a row may serve many targets or none.
"""

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
    """What a backward is given beside the operands.

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
