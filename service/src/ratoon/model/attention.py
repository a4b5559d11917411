"""Tree attention as an attention of transformers' interface, given the layout as the argument
`ratoon_tree`.

No mask is ever built: transformers builds none for an implementation that has no mask function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from ratoon.model.stage_plan import HeldTokens
from ratoon_kernels import TreeLayout, tree_attention

ATTENTION_NAME = "ratoon_tree"


class LayerAttention(Protocol):
    """Lets the tokens of one forward attend to their paths."""

    def attend(
        self, module: nn.Module, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float, /
    ) -> Tensor:
        """out_TNH in the dtype of q, differentiable; `module` is the layer's attention module."""
        ...


class PathAttention(LayerAttention, Protocol):
    """Attention for all layers; `attend` asks the module which layer it is."""

    @property
    def held(self) -> HeldTokens:
        """Held tokens, from which the layers' activations are planned."""
        ...

    @property
    def per_token(self) -> tuple[Tensor, ...]:
        """Its tensors of T elements, one per token of the forward, that compiled code sees."""
        ...

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Its other tensors that compiled code sees. They have any number of rows, even one, and
        the number decides nothing."""
        ...

    def at_layer(self, index: int, /) -> LayerAttention:
        """Attention of one layer, for code compiled once for all: it does not ask for the index."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttention:
    """Attention of a whole packed forest at once; `backend` is a name of the kernels' registry."""

    layout: TreeLayout
    backend: str
    deterministic: bool

    def attend(
        self, _module: nn.Module, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float
    ) -> Tensor:
        """See `PathAttention.attend`."""
        out_TNH, _lse_NT = tree_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            self.layout,
            scale,
            backend=self.backend,
            deterministic=self.deterministic,
        )
        return out_TNH

    @property
    def per_token(self) -> tuple[Tensor]:
        """See `PathAttention.per_token`."""
        return (self.layout.end_T,)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """See `PathAttention.tables`; a backend reads one of them."""
        return (self.layout.node_table_M4, self.layout.schedule_table)

    @property
    def held(self) -> HeldTokens:
        """All tokens at once."""
        return HeldTokens(tokens=self.layout.num_tokens, above=0, waits=False, stream=None)

    def at_layer(self, _index: int) -> TreeAttention:
        """See `PathAttention.at_layer`."""
        return self


def register_tree_attention() -> None:
    """Make `attn_implementation="ratoon_tree"` known to transformers; may be called repeatedly."""
    AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ratoon_tree: LayerAttention,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, T, H], key and value [1, K, T, H] -> ([1, T, N, H], no attention weights).

    A layer's sliding window is ignored: no path is longer (`support.longest_sequence`).
    """
    assert attention_mask is None, "the layout is the mask"
    assert dropout == 0.0, "refused by support.read_config"
    q_TNH, k_TKH, v_TKH = (x[0].transpose(0, 1) for x in (query, key, value))
    return ratoon_tree.attend(module, q_TNH, k_TKH, v_TKH, scaling)[None], None
