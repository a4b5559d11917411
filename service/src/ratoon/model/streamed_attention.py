"""Attention of a forest that is run in stages, one after the other.

Enter the queries, keys and values of one stage, a range of packed tokens, layer by layer; leave its
outputs. Each layer has one stack of keys and values, those of the stages that are open, outermost
first, and one of the gradients that flow back to them, in at least float32: a stage attends a run
of keys that ends with its own, as if what it descends from and itself were a forest. Invariant:
over all stages, each backward run once, results and gradients equal those of the whole forest at
once.

One operation does it, `ratoon::stage_attention`, so that a compiled layer has it in its graph and a
checkpointed one keeps its results. What it keeps for other stages, and what those left, it finds by
a number: an operation is given numbers and tensors alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ratoon.model.attention import HeldTokens
from ratoon_kernels import (
    Span,
    TreeLayout,
    build_layout,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStream:
    """What all stages of one forest share; `backend` is a name of the kernels' registry.

    `held`: of all stages, so that they fit together; a layer's stacks have room for its tokens.
    """

    layout: TreeLayout
    backend: str
    deterministic: bool
    held: HeldTokens
    _paths: dict[int, _Path] = field(init=False, default_factory=dict[int, "_Path"], repr=False)

    def stage(
        self, span: Span, ancestors: tuple[StageAttention, ...], *, is_kept: bool
    ) -> StageAttention:
        """Attention of the packed tokens `span`, whose paths begin in `ancestors`.

        `is_kept`: later stages will name it as an ancestor, so its keys and values stay.
        """
        return StageAttention(self, span, ancestors, is_kept=is_kept)

    def path(self, layer: int) -> _Path:
        """The stacks of one layer."""
        if layer not in self._paths:
            self._paths[layer] = _Path(self.held.tokens)
        return self._paths[layer]


class StageAttention:
    """How the tokens of one stage attend: a `PathAttention` of one forward and its backward.

    States: those of its layers. A stage is run backward after all that name it as an ancestor.
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
        # Among the tokens of its ancestors and its own.
        self.own = Span(start, start + len(span))
        assert self.own.stop <= stream.held.tokens, "stages fit together"
        self.layout = path_layout(stream.layout, [*(each.span for each in ancestors), span])
        self._ancestors = ancestors
        self._layers: dict[int, LayerStage] = {}

    @property
    def held(self) -> HeldTokens:
        """See `PathAttention.held`."""
        return self.stream.held

    def at_layer(self, index: int) -> LayerStage:
        """See `PathAttention.at_layer`."""
        if index not in self._layers:
            above = tuple(ancestor.at_layer(index) for ancestor in self._ancestors)
            self._layers[index] = LayerStage(self, self.stream.path(index), above)
        return self._layers[index]

    def attend(
        self, module: nn.Module, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, scale: float
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        layer = self.at_layer(cast("int", module.layer_idx))
        return layer.attend(module, q_QNH, k_QKH, v_QKH, scale)


def path_layout(layout: TreeLayout, spans: Sequence[Span]) -> TreeLayout:
    """The forest of the packed tokens in `spans` alone, ranges of whole nodes in packed order.

    Each node's parent is in them. Where `spans` is one that is all, that is the layout itself.
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
class _Pair:
    """Keys and values, or the sums of their gradients."""

    k_SKH: Tensor
    v_SKH: Tensor

    def __getitem__(self, tokens: slice) -> _Pair:
        return _Pair(self.k_SKH[tokens], self.v_SKH[tokens])


class _Path:
    """Keys and values of one layer's open stages, and sums of gradients; as views of two stacks."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._keys: _Pair | None = None
        self._sums: _Pair | None = None

    def write(self, own: Span, keys: _Pair) -> None:
        """Put keys and values in their place."""
        if self._keys is None:
            self._keys = self._room(keys, keys.k_SKH.dtype)
        place = self._keys[own.start : own.stop]
        place.k_SKH.copy_(keys.k_SKH)
        place.v_SKH.copy_(keys.v_SKH)

    def keys(self, stop: int) -> _Pair:
        """All that were written before `stop`."""
        assert self._keys is not None, "a prefix is forwarded before, and run backward after"
        return self._keys[:stop]

    def sums(self, stop: int) -> _Pair:
        """Of all before `stop`; what nobody has cleared is of a stage that is over."""
        if self._sums is None:
            keys = self.keys(0)
            self._sums = self._room(keys, _wide(keys.k_SKH.dtype))
        return self._sums[:stop]

    def _room(self, like: _Pair, dtype: torch.dtype) -> _Pair:
        shape = (self._num_tokens, *like.k_SKH.shape[1:])
        return _Pair(*(torch.empty(shape, dtype=dtype, device=like.k_SKH.device) for _ in "kv"))


class LayerStage:
    """One layer of one stage.

    States: new; forwarded; its sums cleared, which is when the first stage below, or else itself,
    is run backward; differentiated.
    """

    def __init__(
        self, stage: StageAttention, path: _Path, ancestors: tuple[LayerStage, ...]
    ) -> None:
        number = next(_NUMBERS)
        _LIVE[number] = self
        # int64 on the CPU, a tensor so that compiled layers do not specialise on its value.
        self.number_1 = torch.tensor([number])
        self._stage = stage
        self._path = path
        self._ancestors = ancestors
        self._has_sums = False

    def attend(
        self, _module: nn.Module, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, scale: float
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        out_QNH, _lse_NQ = _forward(q_QNH, k_QKH, v_QKH, self.number_1, scale)
        return out_QNH

    def forward(self, q_QNH: Tensor, keys: _Pair, scale: float) -> tuple[Tensor, Tensor]:
        """Output (dtype of q) and log-sum-exp over the whole paths."""
        own = self._stage.own
        assert q_QNH.shape[0] == len(own), "one query a token of the stage"
        self._path.write(own, keys)
        above = self._path.keys(own.stop)
        out_QNH, lse_NQ = tree_attention_partial_forward(
            q_QNH, above.k_SKH, above.v_SKH, self._stage.layout, scale, **self._settings()
        )
        return out_QNH.to(q_QNH.dtype), lse_NQ

    def backward(
        self, dout_QNH: Tensor, q_QNH: Tensor, results: tuple[Tensor, Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of this stage in the dtype of q; adds to the sums of its ancestors."""
        own, dtype = self._stage.own, q_QNH.dtype
        for layer in (*self._ancestors, self):
            layer._clear_sums()
        above, sums = self._path.keys(own.stop), self._path.sums(own.stop)
        dq_QNH = tree_attention_partial_backward(
            # The kernels want dense rows, which autograd does not promise.
            dout_QNH if dout_QNH.stride(-1) == 1 else dout_QNH.contiguous(),
            q_QNH,
            above.k_SKH,
            above.v_SKH,
            *results,
            self._stage.layout,
            scale,
            dk_acc_SKH=sums.k_SKH,
            dv_acc_SKH=sums.v_SKH,
            **self._settings(),
        )
        # Nothing below is still to come, so nothing adds to these again.
        self._has_sums = False
        mine = sums[own.start :]
        return dq_QNH.to(dtype), _copy(mine.k_SKH, dtype), _copy(mine.v_SKH, dtype)

    def _clear_sums(self) -> None:
        if self._has_sums:
            return
        own = self._stage.own
        mine = self._path.sums(own.stop)[own.start :]
        mine.k_SKH.zero_()
        mine.v_SKH.zero_()
        self._has_sums = True

    def _settings(self) -> Mapping[str, Any]:
        stream = self._stage.stream
        return {
            "query_start": self._stage.own.start,
            "key_start": 0,
            "backend": stream.backend,
            "deterministic": stream.deterministic,
        }


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In memory of its own, also where it has that dtype."""
    return x.to(dtype, copy=True)


# The only way from an operation to an object; it owns nothing, a stage lives as its run does.
_LIVE: Final[WeakValueDictionary[int, LayerStage]] = WeakValueDictionary()
_NUMBERS: Final = itertools.count()


@torch.library.custom_op("ratoon::stage_attention", mutates_args=())
def _forward(
    q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, number_1: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _LIVE[int(number_1)].forward(q_QNH, _Pair(k_QKH, v_QKH), scale)


@_forward.register_fake
def _(q_QNH: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q_QNH.shape
    return q_QNH.new_empty(q_QNH.shape), q_QNH.new_empty(
        (num_heads, num_tokens), dtype=_wide(q_QNH.dtype)
    )


@torch.library.custom_op("ratoon::stage_attention_backward", mutates_args=())
def _backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    out_QNH: Tensor,
    lse_NQ: Tensor,
    number_1: Tensor,
    num_kv_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    stage = _LIVE[int(number_1)]
    dq_QNH, dk_QKH, dv_QKH = stage.backward(dout_QNH, q_QNH, (out_QNH, lse_NQ), scale)
    assert dk_QKH.shape[1] == num_kv_heads
    return dq_QNH, dk_QKH, dv_QKH


@_backward.register_fake
def _(
    _dout_QNH: Tensor,
    q_QNH: Tensor,
    _out_QNH: Tensor,
    _lse_NQ: Tensor,
    _number_1: Tensor,
    num_kv_heads: int,
    _scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, _, head_dim = q_QNH.shape
    dk_QKH, dv_QKH = (q_QNH.new_empty((num_tokens, num_kv_heads, head_dim)) for _ in "kv")
    return q_QNH.new_empty(q_QNH.shape), dk_QKH, dv_QKH


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_QNH, k_QKH, _v_QKH, number_1, scale = inputs
    ctx.save_for_backward(q_QNH, *output, number_1)
    ctx.mark_non_differentiable(output[1])
    ctx.num_kv_heads, ctx.scale = k_QKH.shape[1], scale


def _differentiate(ctx: Any, dout_QNH: Tensor, _dlse_NQ: Any) -> tuple[Any, ...]:
    gradients = _backward(dout_QNH, *ctx.saved_tensors, ctx.num_kv_heads, ctx.scale)
    return *gradients, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
