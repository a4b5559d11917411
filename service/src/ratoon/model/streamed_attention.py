"""Attention of a forest that runs in stages, one after the other.

Each layer has one stack of the open stages' keys and values, outermost first, and one of the
gradients that flow back to them, at least in float32. A stage's position in a stack is the number
of tokens before it in its path, so that a path's keys are one run without a gap: a stage attends to
the run that ends with its own, as if its ancestors and itself were a forest. Over all stages, each
backward run once, results and gradients equal those of the whole forest at once.

One operation, `ratoon::stage_attention`, does this, so that a compiled layer has it in its graph
and a checkpointed layer keeps its results. It finds by a number what it keeps for other stages, and
what those left.

If several ranks run the forest together, each has a share of every stage's tokens, and its stacks
have the keys of its heads for all tokens.

A layer with a window keeps, and exchanges, as much as one without: it reads only the keys within
the window, but all stacks have one size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ratoon.model.attention import sink_part
from ratoon.model.delta_parts import DeltaPart, Place
from ratoon.model.numbered import find, numbered
from ratoon.planner.stage_plan import HeldTokens, StreamTokens
from ratoon.shards.sequence_group import ALONE, SequenceGroup
from ratoon_kernels import (
    Span,
    TreeLayout,
    build_layout,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
    with_sink,
)
from ratoon_kernels.precision import accumulation_dtype


def path_layout(layout: TreeLayout, spans: Sequence[Span]) -> TreeLayout:
    """Returns the forest of only the packed tokens in `spans`, ranges of whole nodes in packed
    order.

    Each node's parent must be in them. If `spans` is one range with all tokens, this is the layout
    itself.
    """
    if list(spans) == [Span(0, layout.num_tokens)]:
        return layout
    start, stop, end, parent = layout.node_table_M4.numpy().T
    is_in = np.zeros(len(start), np.bool_)
    tokens_before = np.zeros((3, len(start)), np.int64)
    for span in spans:
        is_in |= (span.start <= start) & (start < span.stop)
        tokens_before += np.clip(np.stack((start, stop, end)) - span.start, 0, len(span))
    starts, stops, ends = tokens_before[:, is_in]
    index = np.cumsum(is_in) - 1
    parents = parent[is_in]
    return build_layout(
        node_start=starts,
        node_stop=stops,
        node_end=ends,
        node_parent=np.where(parents < 0, -1, index[parents]),
        device=layout.device,
    )


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys and values, or the sums of their gradients."""

    k_SKH: Tensor
    v_SKV: Tensor

    def __getitem__(self, tokens: slice) -> KeyPair:
        return KeyPair(self.k_SKH[tokens], self.v_SKV[tokens])


class PathStacks:
    """Keys and values of one layer's open stages, and sums of gradients, as views of two stacks."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._keys: KeyPair | None = None
        self._sums: KeyPair | None = None

    def write(self, own: Span, keys: KeyPair) -> None:
        """Write keys and values to their positions."""
        if self._keys is None:
            self._keys = self._room(keys, keys.k_SKH.dtype)
        place = self._keys[own.start : own.stop]
        place.k_SKH.copy_(keys.k_SKH)
        place.v_SKV.copy_(keys.v_SKV)

    def keys(self, stop: int) -> KeyPair:
        """Keys written before `stop`."""
        assert self._keys is not None, "a prefix is forwarded before, and run backward after"
        return self._keys[:stop]

    def sums(self, stop: int) -> KeyPair:
        """Sums of all tokens before `stop`; sums that nobody has cleared belong to a stage that is
        over."""
        if self._sums is None:
            keys = self.keys(0)
            self._sums = self._room(keys, accumulation_dtype(keys.k_SKH.dtype))
        return self._sums[:stop]

    def _room(self, like: KeyPair, dtype: torch.dtype) -> KeyPair:
        both = like.k_SKH, like.v_SKV
        return KeyPair(*(x.new_empty((self._num_tokens, *x.shape[1:]), dtype=dtype) for x in both))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStream:
    """Data that all stages of one forest share; `backend` is a name of the kernels' registry.

    `tokens` counts all stages, so that they fit together; a layer's stacks have room for the held
    ones.
    """

    layout: TreeLayout
    backend: str
    deterministic: bool
    tokens: StreamTokens
    group: SequenceGroup = ALONE
    _paths: dict[int, PathStacks] = field(
        init=False, default_factory=dict[int, "PathStacks"], repr=False
    )

    def stage(
        self, span: Span, ancestors: tuple[StageAttention, ...], *, is_kept: bool
    ) -> StageAttention:
        """Returns attention of the packed tokens `span`, whose paths begin in `ancestors`.

        `is_kept`: later stages will name it as an ancestor, so its keys and values stay.
        """
        return StageAttention(self, span, ancestors, is_kept=is_kept)

    def path(self, layer: int) -> PathStacks:
        """Stacks of one layer."""
        if layer not in self._paths:
            self._paths[layer] = PathStacks(self.tokens.held)
        return self._paths[layer]


class StageAttention:
    """Lets the tokens of one stage attend: a `PathAttention` of one forward and its backward.

    States: those of its layers. A stage runs backward after all stages that name it as an ancestor.
    """

    def __init__(
        self,
        stream: AttentionStream,
        span: Span,
        ancestors: tuple[StageAttention, ...],
        *,
        is_kept: bool,
    ) -> None:
        assert all(ancestor.is_kept for ancestor in ancestors), "what is attended is kept"
        self.stream = stream
        self.span = span
        self.is_kept = is_kept
        start = sum(len(ancestor.span) for ancestor in ancestors)
        self._place = _Place(
            own=Span(start, start + len(span)),
            layout=path_layout(stream.layout, [*(each.span for each in ancestors), span]),
            backend=stream.backend,
            deterministic=stream.deterministic,
            group=stream.group,
        )
        assert self._place.own.stop <= stream.tokens.held, "stages fit together"
        spans = [each.span for each in ancestors]
        self._nodes = Place(
            stream.layout, span, spans, stream.group, deterministic=stream.deterministic
        )
        self._ancestors = ancestors
        self._layers: dict[int, LayerStage] = {}

    @property
    def held(self) -> HeldTokens:
        """See `PathAttention.held`."""
        tokens, most_of, own = self.stream.tokens, self.stream.group.most_of, self._place.own
        # The numbers are rounded like their sum, which fits.
        return HeldTokens(
            tokens=most_of(own.stop) - most_of(own.start),
            above=most_of(own.start),
            waits=self.is_kept,
            stream=replace(tokens, held=most_of(tokens.held), waiting=most_of(tokens.waiting)),
            num_ranks=self.stream.group.size,
        )

    @property
    def per_token(self) -> tuple[()]:
        """See `PathAttention.per_token`."""
        return ()

    @property
    def tables(self) -> tuple[()]:
        """See `PathAttention.tables`."""
        return ()

    def at_layer(self, index: int) -> LayerStage:
        """See `PathAttention.at_layer`."""
        if index not in self._layers:
            above = tuple(ancestor.at_layer(index) for ancestor in self._ancestors)
            delta = DeltaPart(self._nodes, [each.delta for each in above])
            self._layers[index] = LayerStage(self._place, self.stream.path(index), above, delta)
        return self._layers[index]

    def attend(
        self,
        module: nn.Module,
        q_QNH: Tensor,
        k_QKH: Tensor,
        v_QKV: Tensor,
        scale: float,
        *,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        layer = self.at_layer(cast("int", module.layer_idx))
        return layer.attend(module, q_QNH, k_QKH, v_QKV, scale, window=window, sink_N=sink_N)

    def mix(
        self, module: nn.Module, x_QC: Tensor, weight_CW: Tensor, g_QN: Tensor, beta_QN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        layer = self.at_layer(cast("int", module.layer_idx))
        return layer.mix(module, x_QC, weight_CW, g_QN, beta_QN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Position of a stage in the forest of its ancestors and itself, and how it runs."""

    own: Span
    layout: TreeLayout
    backend: str
    deterministic: bool
    group: SequenceGroup

    def settings(self) -> Mapping[str, Any]:
        """Arguments of the kernels' calls."""
        return {
            "query_start": self.own.start,
            "key_start": 0,
            "backend": self.backend,
            "deterministic": self.deterministic,
        }


class LayerStage:
    """One layer of one stage.

    States: new; forwarded; sums cleared, when the first stage below, or else itself, runs backward;
    differentiated.
    """

    def __init__(
        self,
        place: _Place,
        path: PathStacks,
        ancestors: tuple[LayerStage, ...],
        delta: DeltaPart,
    ) -> None:
        self.number_1 = numbered(self)
        self.delta = delta
        self._place = place
        self._path = path
        self._ancestors = ancestors
        self._has_sums = False

    def attend(
        self,
        _module: nn.Module,
        q_QNH: Tensor,
        k_QKH: Tensor,
        v_QKV: Tensor,
        scale: float,
        *,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        out_QNV, _lse_NQ = _forward(q_QNH, k_QKH, v_QKV, sink_N, self.number_1, scale, window)
        return out_QNV

    def mix(
        self, module: nn.Module, x_QC: Tensor, weight_CW: Tensor, g_QN: Tensor, beta_QN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        return self.delta.mix(module, x_QC, weight_CW, g_QN, beta_QN)

    def forward(
        self,
        q_QNH: Tensor,
        keys: KeyPair,
        sink_N: Tensor | None,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns output (dtype of q) and log-sum-exp over the whole paths and the sink."""
        own, group, num_kv_heads = self._place.own, self._place.group, keys.k_SKH.shape[1]
        own_heads = group.own_heads(q_QNH.shape[1])
        (q_QNH,), of_keys = group.to_heads(len(own), [q_QNH], [keys.k_SKH, keys.v_SKV])
        assert q_QNH.shape[0] == len(own), "one query a token of the stage"
        self._path.write(own, KeyPair(*of_keys))
        above = self._path.keys(own.stop)
        out_QNV, lse_NQ = tree_attention_partial_forward(
            q_QNH,
            above.k_SKH,
            above.v_SKV,
            self._place.layout,
            scale,
            window=window,
            **self._place.settings(),
        )
        if sink_N is not None:
            out_QNV, lse_NQ = with_sink(out_QNV, lse_NQ, sink_N[own_heads])
        results, _ = group.to_tokens(num_kv_heads, [out_QNV.to(q_QNH.dtype), lse_NQ.T])
        return results[0], results[1].T.contiguous()

    def backward(
        self,
        dout_QNV: Tensor,
        q_QNH: Tensor,
        results: tuple[Tensor, Tensor],
        num_kv_heads: int,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dQ, dK and dV of this stage in the dtype of q; adds to the sums of its
        ancestors."""
        own, group, dtype = self._place.own, self._place.group, q_QNH.dtype
        of_queries = [dout_QNV, q_QNH, results[0], results[1].T]
        (dout_QNV, q_QNH, out_QNV, lse_QN), _ = group.to_heads(len(own), of_queries)
        for layer in (*self._ancestors, self):
            layer._clear_sums()
        above, sums = self._path.keys(own.stop), self._path.sums(own.stop)
        dq_QNH = tree_attention_partial_backward(
            # The kernels need dense rows, which autograd does not promise.
            dout_QNV if dout_QNV.stride(-1) == 1 else dout_QNV.contiguous(),
            q_QNH,
            above.k_SKH,
            above.v_SKV,
            out_QNV,
            lse_QN.T.contiguous(),
            self._place.layout,
            scale,
            dk_acc_SKH=sums.k_SKH,
            dv_acc_SKH=sums.v_SKV,
            window=window,
            **self._place.settings(),
        )
        # No later stage follows, so nothing adds to these sums again.
        self._has_sums = False
        mine = sums[own.start :]
        of_keys = [_copy(mine.k_SKH, dtype), _copy(mine.v_SKV, dtype)]
        (dq_QNH,), of_keys = group.to_tokens(num_kv_heads, [dq_QNH.to(dtype)], of_keys)
        return dq_QNH, of_keys[0], of_keys[1]

    def _clear_sums(self) -> None:
        if self._has_sums:
            return
        own = self._place.own
        mine = self._path.sums(own.stop)[own.start :]
        mine.k_SKH.zero_()
        mine.v_SKV.zero_()
        self._has_sums = True


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies `x` to its own memory, even if it has that dtype already."""
    return x.to(dtype, copy=True)


@torch.library.custom_op("ratoon::stage_attention", mutates_args=())
def _forward(
    q_QNH: Tensor,
    k_QKH: Tensor,
    v_QKV: Tensor,
    sink_N: Tensor | None,
    number_1: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    stage = cast("LayerStage", find(number_1))
    return stage.forward(q_QNH, KeyPair(k_QKH, v_QKV), sink_N, scale, window)


@_forward.register_fake
def _(q_QNH: Tensor, _k_QKH: Tensor, v_QKV: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q_QNH.shape
    return q_QNH.new_empty((num_tokens, num_heads, v_QKV.shape[2])), q_QNH.new_empty(
        (num_heads, num_tokens), dtype=accumulation_dtype(q_QNH.dtype)
    )


@torch.library.custom_op("ratoon::stage_attention_backward", mutates_args=())
def _backward(
    dout_QNV: Tensor,
    q_QNH: Tensor,
    out_QNV: Tensor,
    lse_NQ: Tensor,
    number_1: Tensor,
    num_kv_heads: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    stage = cast("LayerStage", find(number_1))
    return stage.backward(dout_QNV, q_QNH, (out_QNV, lse_NQ), num_kv_heads, scale, window)


@_backward.register_fake
def _(
    dout_QNV: Tensor,
    q_QNH: Tensor,
    _out_QNV: Tensor,
    _lse_NQ: Tensor,
    _number_1: Tensor,
    num_kv_heads: int,
    *_others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, head_dims = q_QNH.shape[0], (q_QNH.shape[2], dout_QNV.shape[2])
    dk_QKH, dv_QKV = (q_QNH.new_empty((num_tokens, num_kv_heads, size)) for size in head_dims)
    return q_QNH.new_empty(q_QNH.shape), dk_QKH, dv_QKV


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_QNH, k_QKH, _v_QKV, sink_N, number_1, scale, window = inputs
    ctx.save_for_backward(q_QNH, *output, number_1, sink_N)
    ctx.mark_non_differentiable(output[1])
    ctx.settings = k_QKH.shape[1], scale, window


def _differentiate(ctx: Any, dout_QNV: Tensor, _dlse_NQ: Any) -> tuple[Any, ...]:
    *tensors, sink_N = ctx.saved_tensors
    gradients = _backward(dout_QNV, *tensors, *ctx.settings)
    return *gradients, sink_part(dout_QNV, tensors[1], tensors[2], sink_N), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
