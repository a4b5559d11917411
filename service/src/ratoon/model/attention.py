"""Tree attention as an attention of transformers' interface.

Enters as the keyword argument `ratoon_tree` of the model's forward, which transformers hands down
to every attention layer; leaves the attention's output. Invariant: the layout is an argument of the
call, never a global, and no mask is ever built (transformers builds none for an implementation that
has no mask function).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import AttentionInterface

from ratoon_kernels import TreeLayout, tree_attention

ATTENTION_NAME = "ratoon_tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttention:
    """How attention is computed in one forward; `backend` is a name of the kernels' registry."""

    layout: TreeLayout
    backend: str
    deterministic: bool


def register_tree_attention() -> None:
    """Make `attn_implementation="ratoon_tree"` known to transformers; once or more often."""
    AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)


def tree_attention_forward(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ratoon_tree: TreeAttention,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, T, H], key and value [1, K, T, H] -> ([1, T, N, H], no attention weights)."""
    assert attention_mask is None, "the layout is the mask"
    assert dropout == 0.0, "refused by support.check_config"
    assert sliding_window is None, "refused by support.check_config"
    out_TNH, _lse_NT = tree_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        ratoon_tree.layout,
        scaling,
        backend=ratoon_tree.backend,
        deterministic=ratoon_tree.deterministic,
    )
    return out_TNH[None], None
