"""The backends of token log-probs, best first, and the protocol of their modules."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from torch import Tensor

from ratoon_kernels.backend import Backend
from ratoon_kernels.token_logprobs import fused, reference
from ratoon_kernels.token_logprobs.operands import (
    DifferentiatedLogprobs,
    Operands,
    SeedsOfRows,
    Upstream,
)

OP: Final = "token_logprobs"


class TokenLogprobsBackend(Backend, Protocol):
    """A backend module of this op."""

    def forward(self, operands: Operands, /) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logprob_M, entropy_R and lse_R in the accumulation dtype."""
        ...

    def backward(self, operands: Operands, upstream: Upstream, /) -> tuple[Tensor, Tensor]:
        """Returns dhidden_RD and dlm_head_VD, the latter without rows where not asked for."""
        ...

    def forward_backward(
        self, operands: Operands, seeds_of: SeedsOfRows, /, *, needs_lm_head: bool
    ) -> DifferentiatedLogprobs:
        """Returns both in the bits of `forward` and `backward`; logits are computed once."""
        ...


BACKENDS: Final[Mapping[str, TokenLogprobsBackend]] = MappingProxyType(
    {"fused": fused, "reference": reference}
)
