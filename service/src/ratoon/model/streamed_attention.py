"""Attention of a forest that is run in stages, one after the other.

Enter the queries, keys and values of one stage, a range of packed tokens, layer by layer; leave its
outputs. Keys and values of the stages that its tokens descend from are kept, and the gradients that
flow back to them add up in buffers of at least float32. Invariant: over all stages, each backward
run once, results and gradients equal those of the whole forest at once.

One operation does it, `ratoon::stage_attention`, so that a compiled layer has it in its graph and a
checkpointed one keeps its results. What it keeps for other stages, and what those left, it finds by
a number: an operation is given numbers and tensors alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ratoon.model.attention import HeldTokens
from ratoon_kernels import (
    Span,
    TreeLayout,
    merge_partials,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStream:
    """What all stages of one forest share; `backend` is a name of the kernels' registry."""

    layout: TreeLayout
    backend: str
    deterministic: bool

    def stage(
        self,
        span: Span,
        ancestors: tuple[StageAttention, ...],
        *,
        is_kept: bool,
        held: HeldTokens,
    ) -> StageAttention:
        """Attention of the packed tokens `span`, whose paths begin in `ancestors`.

        `is_kept`: later stages will name it as an ancestor, so its keys and values stay. `held`: of
        all stages of the stream, so that they fit together.
        """
        return StageAttention(self, span, ancestors, is_kept=is_kept, held=held)


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
        held: HeldTokens,
    ) -> None:
        assert all(ancestor.is_kept for ancestor in ancestors), "what is attended is kept"
        self.stream = stream
        self.span = span
        self.is_kept = is_kept
        self.held = held
        self._ancestors = ancestors
        self._layers: dict[int, LayerStage] = {}

    def at_layer(self, index: int) -> LayerStage:
        """See `PathAttention.at_layer`."""
        if index not in self._layers:
            above = tuple(ancestor.at_layer(index) for ancestor in self._ancestors)
            self._layers[index] = LayerStage(self.stream, self.span, above, is_kept=self.is_kept)
        return self._layers[index]

    def attend(
        self, module: nn.Module, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, scale: float
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        layer = self.at_layer(cast("int", module.layer_idx))
        return layer.attend(module, q_QNH, k_QKH, v_QKH, scale)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Keys and values, or the sums of their gradients."""

    k_SKH: Tensor
    v_SKH: Tensor


class LayerStage:
    """One layer of one stage.

    States: new; forwarded; differentiated. While forwarded, a kept one holds its keys and values,
    and the sums of the gradients that stages below have left, with which its own begin.
    """

    def __init__(
        self,
        stream: AttentionStream,
        span: Span,
        ancestors: tuple[LayerStage, ...],
        *,
        is_kept: bool,
    ) -> None:
        number = next(_NUMBERS)
        _LIVE[number] = self
        # int64 on the CPU, a tensor so that compiled layers do not specialise on its value.
        self.number_1 = torch.tensor([number])
        self._stream = stream
        self._span = span
        self._ancestors = ancestors
        self._is_kept = is_kept
        self._kept: _Pair | None = None
        self._sums: _Pair | None = None

    def attend(
        self, _module: nn.Module, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, scale: float
    ) -> Tensor:
        """See `LayerAttention.attend`."""
        out_QNH, _lse_NQ = _forward(q_QNH, k_QKH, v_QKH, self.number_1, scale)
        return out_QNH

    def forward(self, q_QNH: Tensor, own: _Pair, scale: float) -> tuple[Tensor, Tensor]:
        """Output (dtype of q) and log-sum-exp over the whole paths."""
        assert q_QNH.shape[0] == len(self._span), "one query a token of the stage"
        if self._is_kept and self._kept is None:
            # Copies: compiled code uses the memory of an operation's arguments again.
            self._kept = _Pair(
                *(x.clone(memory_format=torch.contiguous_format) for x in (own.k_SKH, own.v_SKH))
            )
        out_QNH, lse_NQ = self._forward_part(q_QNH, own, self._span, scale)
        for ancestor in self._ancestors:
            keys = ancestor._held_keys()
            part_QNH, part_NQ = self._forward_part(q_QNH, keys, ancestor._span, scale)
            out_QNH, lse_NQ = merge_partials(out_QNH, lse_NQ, part_QNH, part_NQ)
        return out_QNH.to(q_QNH.dtype), lse_NQ

    def backward(
        self,
        dout_QNH: Tensor,
        q_QNH: Tensor,
        own: _Pair,
        results: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of this stage in the dtype of q; adds to the sums of its ancestors."""
        # The kernels want dense rows, which autograd does not promise.
        dout_QNH = dout_QNH if dout_QNH.stride(-1) == 1 else dout_QNH.contiguous()
        upstream = (dout_QNH, q_QNH, results)
        sums = _zeros(own, results[1].dtype) if self._sums is None else self._sums
        # Nothing below is still to come, so nothing asks for these again.
        self._sums = self._kept = None
        dq_QNH = self._backward_part(upstream, own, sums, self._span, scale)
        for ancestor in self._ancestors:
            keys = ancestor._held_keys()
            if ancestor._sums is None:
                ancestor._sums = _zeros(keys, results[1].dtype)
            dq_QNH += self._backward_part(upstream, keys, ancestor._sums, ancestor._span, scale)
        dtype = q_QNH.dtype
        return dq_QNH.to(dtype), sums.k_SKH.to(dtype), sums.v_SKH.to(dtype)

    def _held_keys(self) -> _Pair:
        assert self._kept is not None, "a prefix is forwarded before, and run backward after"
        return self._kept

    def _forward_part(
        self, q_QNH: Tensor, keys: _Pair, span: Span, scale: float
    ) -> tuple[Tensor, Tensor]:
        return tree_attention_partial_forward(
            q_QNH, keys.k_SKH, keys.v_SKH, self._stream.layout, scale, **self._settings(span)
        )

    def _backward_part(
        self,
        upstream: tuple[Tensor, Tensor, tuple[Tensor, Tensor]],
        keys: _Pair,
        sums: _Pair,
        span: Span,
        scale: float,
    ) -> Tensor:
        dout_QNH, q_QNH, (out_QNH, lse_NQ) = upstream
        return tree_attention_partial_backward(
            dout_QNH,
            q_QNH,
            keys.k_SKH,
            keys.v_SKH,
            out_QNH,
            lse_NQ,
            self._stream.layout,
            scale,
            dk_acc_SKH=sums.k_SKH,
            dv_acc_SKH=sums.v_SKH,
            **self._settings(span),
        )

    def _settings(self, keys: Span) -> Mapping[str, Any]:
        return {
            "query_start": self._span.start,
            "key_start": keys.start,
            "backend": self._stream.backend,
            "deterministic": self._stream.deterministic,
        }


def _zeros(like: _Pair, dtype: torch.dtype) -> _Pair:
    return _Pair(
        *(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (like.k_SKH, like.v_SKH))
    )


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
    k_QKH: Tensor,
    v_QKH: Tensor,
    out_QNH: Tensor,
    lse_NQ: Tensor,
    number_1: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    stage = _LIVE[int(number_1)]
    return stage.backward(dout_QNH, q_QNH, _Pair(k_QKH, v_QKH), (out_QNH, lse_NQ), scale)


@_backward.register_fake
def _(
    _dout_QNH: Tensor, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_QNH.new_empty(q_QNH.shape), k_QKH.new_empty(k_QKH.shape), v_QKH.new_empty(v_QKH.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale = inputs
    q_QNH, k_QKH, v_QKH, number_1 = tensors
    ctx.save_for_backward(q_QNH, k_QKH, v_QKH, *output, number_1)
    ctx.mark_non_differentiable(output[1])
    ctx.scale = scale


def _differentiate(ctx: Any, dout_QNH: Tensor, _dlse_NQ: Any) -> tuple[Any, ...]:
    return *_backward(dout_QNH, *ctx.saved_tensors, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
