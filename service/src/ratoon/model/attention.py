"""Tree attention as an attention of transformers' interface, given the layout as the argument
`ratoon_tree`; of a whole packed forest, which one rank runs or several together.

No mask is ever built: transformers builds none for an implementation that has no mask function.

With several ranks one operation, `ratoon::sequence_attention`, includes the exchanges. It gives
every token its own result, so that a compiled layer sees nothing of the other ranks, and a
checkpointed layer, which keeps its results, exchanges nothing when it is recomputed. The operation
keeps what one device would for its own tokens: the backward sends queries, keys, values and results
once more instead.

A sink is a logit of each query head, which joins the softmax without a value. A rank has those of
its heads over all tokens in the forward; the gradients of all heads over its own tokens, which add
up over the ranks as those of any other parameter do.
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
from ratoon_kernels import (
    Span,
    TreeLayout,
    sink_gradient,
    tree_attention,
    tree_attention_partial_backward,
)
from ratoon_kernels.precision import accumulation_dtype

ATTENTION_NAME = "ratoon_tree"


class LayerAttention(PathMixing, Protocol):
    """Lets the tokens of one forward attend to their paths."""

    def attend(
        self,
        module: nn.Module,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKV: Tensor,
        scale: float,
        /,
        *,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """out_TNV in the dtype of q, differentiable; `module` is the layer's attention module.

        `window`: last tokens of its path that a token attends to, itself included; None: all.
        """
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
    """Attention of a whole packed forest at once; `backend` is a name of the kernels' registry.

    `windows`: those of the layers that are compiled.
    """

    layout: TreeLayout
    backend: str
    deterministic: bool
    windows: tuple[int, ...] = ()

    def attend(
        self,
        _module: nn.Module,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKV: Tensor,
        scale: float,
        *,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """See `PathAttention.attend`."""
        out_TNV, _lse_NT = tree_attention(
            q_TNH,
            k_TKH,
            v_TKV,
            self.layout,
            scale,
            window=window,
            sink_N=sink_N,
            backend=self.backend,
            deterministic=self.deterministic,
        )
        return out_TNV

    def mix(
        self, module: nn.Module, x_TC: Tensor, weight_CW: Tensor, g_TN: Tensor, beta_TN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        return mix_whole(
            module, x_TC, weight_CW, g_TN, beta_TN, self.layout, deterministic=self.deterministic
        )

    @property
    def per_token(self) -> tuple[Tensor, Tensor]:
        """See `PathAttention.per_token`; of depths, a layer with a window."""
        return self.layout.end_T, self.layout.position_T

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """See `PathAttention.tables`; a backend reads one of them in each layer."""
        # Only this backend reads schedules, which the layout builds where it lacks one.
        windows = self.windows if self.backend == "cuda" else ()
        windowed = [self.layout.windowed_schedule(window).table for window in windows]
        return (self.layout.node_table_M4, self.layout.schedule_table, *windowed)

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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, T, H], key [1, K, T, H], value [1, K, T, V] -> ([1, T, N, V], no weights).

    `sliding_window` and `s_aux` are transformers' names of a layer's window and of its sinks, [N].
    """
    assert attention_mask is None, "the layout is the mask"
    assert dropout == 0.0, "refused by support.read_config"
    q_TNH, k_TKH, v_TKV = (x[0].transpose(0, 1) for x in (query, key, value))
    out_TNV = ratoon_tree.attend(
        module, q_TNH, k_TKH, v_TKV, scaling, window=sliding_window, sink_N=s_aux
    )
    return out_TNV[None], None


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
        self,
        _module: nn.Module,
        q_tNH: Tensor,
        k_tKH: Tensor,
        v_tKV: Tensor,
        scale: float,
        *,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        out_tNV, _lse_tN = _forward(q_tNH, k_tKH, v_tKV, sink_N, self._number_1, scale, window)
        return out_tNV

    def mix(
        self, module: nn.Module, x_tC: Tensor, weight_CW: Tensor, g_tN: Tensor, beta_tN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        return self._mixing.mix(module, x_tC, weight_CW, g_tN, beta_tN)

    def forward(
        self,
        q_tNH: Tensor,
        k_tKH: Tensor,
        v_tKV: Tensor,
        sink_N: Tensor | None,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns output (dtype of q) and log-sum-exp, with the sink, of this rank's tokens."""
        whole, own_heads = self._whole, self._group.own_heads(q_tNH.shape[1])
        num_tokens = whole.layout.num_tokens
        (q_TnH,), (k_TkH, v_TkV) = self._group.to_heads(num_tokens, [q_tNH], [k_tKH, v_tKV])
        out_TnV, lse_nT = tree_attention(
            q_TnH,
            k_TkH,
            v_TkV,
            whole.layout,
            scale,
            window=window,
            sink_N=None if sink_N is None else sink_N[own_heads],
            backend=whole.backend,
            deterministic=whole.deterministic,
        )
        (out_tNV, lse_tN), _ = self._group.to_tokens(k_tKH.shape[1], [out_TnV, lse_nT.T])
        return out_tNV, lse_tN

    def backward(
        self,
        dout_tNV: Tensor,
        q_tNH: Tensor,
        keys: list[Tensor],
        results: list[Tensor],
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dQ, dK and dV of this rank's tokens, in the dtype of q."""
        whole, num_kv_heads = self._whole, keys[0].shape[1]
        num_tokens = whole.layout.num_tokens
        of_queries, (k_TkH, v_TkV) = self._group.to_heads(
            num_tokens, [dout_tNV, q_tNH, *results], keys
        )
        dout_TnV, q_TnH, out_TnV, lse_Tn = of_queries
        dtype = accumulation_dtype(q_TnH.dtype)
        dk_TkH, dv_TkV = (torch.zeros_like(key, dtype=dtype) for key in (k_TkH, v_TkV))
        dq_TnH = tree_attention_partial_backward(
            dout_TnV,
            q_TnH,
            k_TkH,
            v_TkV,
            out_TnV,
            lse_Tn.T.contiguous(),
            whole.layout,
            scale,
            query_start=0,
            key_start=0,
            dk_acc_SKH=dk_TkH,
            dv_acc_SKH=dv_TkV,
            window=window,
            backend=whole.backend,
            deterministic=whole.deterministic,
        )
        dq_TnH, dk_TkH, dv_TkV = (x.to(q_tNH.dtype) for x in (dq_TnH, dk_TkH, dv_TkV))
        (dq_tNH,), sums = self._group.to_tokens(num_kv_heads, [dq_TnH], [dk_TkH, dv_TkV])
        return dq_tNH, sums[0], sums[1]


@torch.library.custom_op("ratoon::sequence_attention", mutates_args=())
def _forward(
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKV: Tensor,
    sink_N: Tensor | None,
    number_1: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    attention = cast("SequenceAttention", find(number_1))
    return attention.forward(q_tNH, k_tKH, v_tKV, sink_N, scale, window)


@_forward.register_fake
def _(q_tNH: Tensor, _k_tKH: Tensor, v_tKV: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    lse_tN = q_tNH.new_empty(q_tNH.shape[:2], dtype=accumulation_dtype(q_tNH.dtype))
    return q_tNH.new_empty((*q_tNH.shape[:2], v_tKV.shape[2])), lse_tN


@torch.library.custom_op("ratoon::sequence_attention_backward", mutates_args=())
def _backward(
    dout_tNV: Tensor,
    q_tNH: Tensor,
    k_tKH: Tensor,
    v_tKV: Tensor,
    out_tNV: Tensor,
    lse_tN: Tensor,
    number_1: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    attention = cast("SequenceAttention", find(number_1))
    return attention.backward(dout_tNV, q_tNH, [k_tKH, v_tKV], [out_tNV, lse_tN], scale, window)


@_backward.register_fake
def _(
    _dout_tNV: Tensor, q_tNH: Tensor, k_tKH: Tensor, v_tKV: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_tNH.new_empty(q_tNH.shape), k_tKH.new_empty(k_tKH.shape), v_tKV.new_empty(v_tKV.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_tNH, k_tKH, v_tKV, sink_N, number_1, scale, window = inputs
    ctx.save_for_backward(q_tNH, k_tKH, v_tKV, *output, number_1, sink_N)
    ctx.mark_non_differentiable(output[1])
    ctx.settings = scale, window


def _differentiate(ctx: Any, dout_tNV: Tensor, _dlse_tN: Any) -> tuple[Any, ...]:
    *tensors, sink_N = ctx.saved_tensors
    gradients = _backward(dout_tNV, *tensors, *ctx.settings)
    return *gradients, sink_part(dout_tNV, tensors[3], tensors[4].T, sink_N), None, None, None


def sink_part(
    dout_tNV: Tensor, out_tNV: Tensor, lse_Nt: Tensor, sink_N: Tensor | None
) -> Tensor | None:
    """Gradient of the sinks of all heads, over a rank's own tokens; None without sinks."""
    if sink_N is None:
        return None
    return sink_gradient(dout_tNV, out_tNV, lse_Nt, sink_N).to(sink_N.dtype)


_forward.register_autograd(_differentiate, setup_context=_setup_context)
