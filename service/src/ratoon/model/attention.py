"""Tree attention as an attention of transformers' interface, given the layout as the argument
`ratoon_tree`; of a whole packed forest, which one rank runs or several together.

No mask is ever built: transformers builds none for an implementation that has no mask function.

With several ranks one operation, `ratoon::sequence_attention`, includes the exchanges. It gives
every token its own result, so that a compiled layer sees nothing of the other ranks, and a
checkpointed layer, which keeps its results, exchanges nothing when it is recomputed. The operation
keeps what one device would for its own tokens: the backward sends queries, keys, values and results
once more instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ratoon.model.delta_parts import DeltaPart, Place
from ratoon.model.linear_attention import PathMixing, mix_whole
from ratoon.model.numbered import find, numbered
from ratoon.planner.stage_plan import HeldTokens
from ratoon.shards.sequence_group import SequenceGroup
from ratoon_kernels import Span, TreeLayout, tree_attention, tree_attention_partial_backward
from ratoon_kernels.precision import accumulation_dtype

ATTENTION_NAME = "ratoon_tree"


class LayerAttention(PathMixing, Protocol):
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

    def mix(
        self, module: nn.Module, x_TC: Tensor, weight_CW: Tensor, g_TN: Tensor, beta_TN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        return mix_whole(
            module, x_TC, weight_CW, g_TN, beta_TN, self.layout, deterministic=self.deterministic
        )

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


class SequenceAttention:
    """`PathAttention` of one forward and its backward; `whole` is the layout of all tokens."""

    def __init__(self, whole: TreeAttention, group: SequenceGroup) -> None:
        self._whole = whole
        self._group = group
        self._number_1 = numbered(self)
        everything, is_same = Span(0, whole.layout.num_tokens), whole.deterministic
        place = Place(whole.layout, everything, (), group, deterministic=is_same)
        self._mixing = DeltaPart(place, ())

    @property
    def held(self) -> HeldTokens:
        """See `PathAttention.held`; the numbers are those of the rank with most tokens, so that all
        ranks keep the same."""
        tokens = self._group.most_of(self._whole.layout.num_tokens)
        ranks = self._group.size
        return HeldTokens(tokens=tokens, above=0, waits=False, stream=None, num_ranks=ranks)

    @property
    def per_token(self) -> tuple[()]:
        """See `PathAttention.per_token`."""
        return ()

    @property
    def tables(self) -> tuple[()]:
        """See `PathAttention.tables`."""
        return ()

    def at_layer(self, _index: int) -> SequenceAttention:
        """See `PathAttention.at_layer`."""
        return self

    def attend(
        self, _module: nn.Module, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, scale: float
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        out_tNH, _lse_tN = _forward(q_tNH, k_tKH, v_tKH, self._number_1, scale)
        return out_tNH

    def mix(
        self, module: nn.Module, x_tC: Tensor, weight_CW: Tensor, g_tN: Tensor, beta_tN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        return self._mixing.mix(module, x_tC, weight_CW, g_tN, beta_tN)

    def forward(
        self, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns output (dtype of q) and log-sum-exp of this rank's tokens."""
        whole = self._whole
        num_tokens = whole.layout.num_tokens
        (q_TnH,), (k_TkH, v_TkH) = self._group.to_heads(num_tokens, [q_tNH], [k_tKH, v_tKH])
        out_TnH, lse_nT = tree_attention(
            q_TnH,
            k_TkH,
            v_TkH,
            whole.layout,
            scale,
            backend=whole.backend,
            deterministic=whole.deterministic,
        )
        (out_tNH, lse_tN), _ = self._group.to_tokens(k_tKH.shape[1], [out_TnH, lse_nT.T])
        return out_tNH, lse_tN

    def backward(
        self,
        dout_tNH: Tensor,
        q_tNH: Tensor,
        keys: list[Tensor],
        results: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dQ, dK and dV of this rank's tokens, in the dtype of q."""
        whole, num_kv_heads = self._whole, keys[0].shape[1]
        num_tokens = whole.layout.num_tokens
        of_queries, (k_TkH, v_TkH) = self._group.to_heads(
            num_tokens, [dout_tNH, q_tNH, *results], keys
        )
        dout_TnH, q_TnH, out_TnH, lse_Tn = of_queries
        dtype = accumulation_dtype(q_TnH.dtype)
        dk_TkH, dv_TkH = (torch.zeros_like(key, dtype=dtype) for key in (k_TkH, v_TkH))
        dq_TnH = tree_attention_partial_backward(
            dout_TnH,
            q_TnH,
            k_TkH,
            v_TkH,
            out_TnH,
            lse_Tn.T.contiguous(),
            whole.layout,
            scale,
            query_start=0,
            key_start=0,
            dk_acc_SKH=dk_TkH,
            dv_acc_SKH=dv_TkH,
            backend=whole.backend,
            deterministic=whole.deterministic,
        )
        dq_TnH, dk_TkH, dv_TkH = (x.to(q_tNH.dtype) for x in (dq_TnH, dk_TkH, dv_TkH))
        (dq_tNH,), sums = self._group.to_tokens(num_kv_heads, [dq_TnH], [dk_TkH, dv_TkH])
        return dq_tNH, sums[0], sums[1]


@torch.library.custom_op("ratoon::sequence_attention", mutates_args=())
def _forward(
    q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, number_1: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return cast("SequenceAttention", find(number_1)).forward(q_tNH, k_tKH, v_tKH, scale)


@_forward.register_fake
def _(q_tNH: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    lse_tN = q_tNH.new_empty(q_tNH.shape[:2], dtype=accumulation_dtype(q_tNH.dtype))
    return q_tNH.new_empty(q_tNH.shape), lse_tN


@torch.library.custom_op("ratoon::sequence_attention_backward", mutates_args=())
def _backward(
    dout_tNH: Tensor,
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKH: Tensor,
    out_tNH: Tensor,
    lse_tN: Tensor,
    number_1: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    attention = cast("SequenceAttention", find(number_1))
    return attention.backward(dout_tNH, q_tNH, [k_tKH, v_tKH], [out_tNH, lse_tN], scale)


@_backward.register_fake
def _(
    _dout_tNH: Tensor, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_tNH.new_empty(q_tNH.shape), k_tKH.new_empty(k_tKH.shape), v_tKH.new_empty(v_tKH.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, number_1, scale = inputs
    ctx.save_for_backward(*tensors, *output, number_1)
    ctx.mark_non_differentiable(output[1])
    ctx.scale = scale


def _differentiate(ctx: Any, dout_tNH: Tensor, _dlse_tN: Any) -> tuple[Any, ...]:
    return *_backward(dout_tNH, *ctx.saved_tensors, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
