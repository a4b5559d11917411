"""The backends of tree attention, best first, and the protocol of their modules."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from torch import Tensor

from ratoon_kernels.backend import Backend
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.span import Span
from ratoon_kernels.tree_attention import block_plan, cuda, flash, flex, reference
from ratoon_kernels.tree_attention.operands import Operands, Upstream

OP: Final = "tree_attention"


class TreeAttentionBackend(Backend, Protocol):
    """A backend module of this op."""

    def plan(self, layout: TreeLayout, /) -> list[Tensor]:
        """Returns the tensors of a layout that the whole form reads beside `end_T`.

        torch.compile traces it: it only picks what the layout holds already.
        """
        ...

    def partial_plan(self, layout: TreeLayout, queries: Span, keys: Span, /) -> list[Tensor]:
        """Returns those of the partial form; never traced, so it may build them."""
        ...

    def forward(self, operands: Operands, /) -> tuple[Tensor, Tensor]:
        """Returns out_TNH (dtype of q) and lse_NT of the whole forest, contiguous."""
        ...

    def backward(self, operands: Operands, upstream: Upstream, /) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq_TNH, dk_TKH and dv_TKH of the whole forest, contiguous."""
        ...

    def partial_forward(self, operands: Operands, /) -> tuple[Tensor, Tensor]:
        """Returns out_QNH and lse_NQ over the keys at hand, in the accumulation dtype."""
        ...

    def partial_backward(
        self, operands: Operands, upstream: Upstream, dk_acc_SKH: Tensor, dv_acc_SKH: Tensor, /
    ) -> Tensor:
        """Adds to the two buffers and returns dq_QNH, all in the accumulation dtype."""
        ...


BACKENDS: Final[Mapping[str, TreeAttentionBackend]] = MappingProxyType(
    {
        "cuda": cuda,
        "flash": flash,
        "flex": flex,
        "reference": reference,
    }
)
# Tokens at a time, queries or keys, of the backends that do not serve any number.
MAX_TOKENS: Final[Mapping[str, int]] = MappingProxyType(
    {"flash": block_plan.MAX_TOKENS, "flex": block_plan.MAX_TOKENS}
)
