"""Attention of a forest that is run in stages, one after the other.

Enter the queries, keys and values of one stage, a range of packed tokens, layer by layer; leave
its outputs. Keys and values of the stages that its tokens descend from are kept, and the
gradients that flow back to them add up in buffers of at least float32. Invariant: over all
stages, each backward run once, results and gradients equal those of the whole forest at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

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
        self, span: Span, ancestors: tuple[StageAttention, ...], *, is_kept: bool
    ) -> StageAttention:
        """Attention of the packed tokens `span`, whose paths begin in `ancestors`.

        `is_kept`: later stages will name it as an ancestor, so its keys and values stay.
        """
        return StageAttention(self, span, ancestors, is_kept=is_kept)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Keys and values of a layer, or the sums of their gradients."""

    k_SKH: Tensor
    v_SKH: Tensor


class StageAttention:
    """How the tokens of one stage attend: a `PathAttention` of one forward and its backward.

    States, layer by layer: new; forwarded (output and log-sum-exp are held where a backward may
    follow, so that a checkpointed layer that is run again does not attend again); differentiated.
    A stage is differentiated after all that name it as an ancestor: its layers' gradients begin
    with the sums that those left here.
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
        self.span = span
        self.is_kept = is_kept
        self._stream = stream
        self._ancestors = ancestors
        self._kept: dict[int, _Pair] = {}
        self._sums: dict[int, _Pair] = {}
        # Merged output [Q, N, H] and log-sum-exp [N, Q] of layers whose backward is to come.
        self._results: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, module: nn.Module, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, scale: float
    ) -> Tensor:
        """out_QNH in the dtype of q; see `PathAttention.attend`."""
        return cast("Any", _attend)(self, module, q_QNH, k_QKH, v_QKH, scale)

    def attend_layer(
        self, layer: int, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor, scale: float
    ) -> Tensor:
        """The same by the layer's index."""
        assert q_QNH.shape[0] == len(self.span), "one query a token of the stage"
        if self.is_kept and layer not in self._kept:
            self._kept[layer] = _Pair(k_QKH.detach(), v_QKH.detach())
        return cast("Tensor", _Attend.apply(q_QNH, k_QKH, v_QKH, self, layer, scale))

    def results(
        self, layer: int, q_QNH: Tensor, own: _Pair, scale: float, *, is_held: bool
    ) -> tuple[Tensor, Tensor]:
        """Output (dtype of q) and log-sum-exp over the whole paths, of this run or one before."""
        held = self._results.get(layer)
        if held is None:
            out_QNH, lse_NQ = self._forward_part(q_QNH, own, self.span, scale)
            for ancestor in self._ancestors:
                pair = ancestor._kept[layer]
                part_QNH, part_NQ = self._forward_part(q_QNH, pair, ancestor.span, scale)
                out_QNH, lse_NQ = merge_partials(out_QNH, lse_NQ, part_QNH, part_NQ)
            held = out_QNH.to(q_QNH.dtype), lse_NQ
            if is_held:
                self._results[layer] = held
        # Autograd marks what a Function returns, so each run gets a tensor of its own.
        return held[0].detach(), held[1]

    def gradients(
        self,
        layer: int,
        dout_QNH: Tensor,
        q_QNH: Tensor,
        own: _Pair,
        results: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of this stage in the dtype of q; adds to the sums of its ancestors."""
        self._results.pop(layer, None)
        # The copy engine and the checks want dense rows, which autograd does not promise.
        dout_QNH = dout_QNH if dout_QNH.stride(-1) == 1 else dout_QNH.contiguous()
        upstream = (dout_QNH, q_QNH, results)
        sums = self._take_sums(layer, own, results[1].dtype)
        dq_QNH = self._backward_part(upstream, own, sums, self.span, scale)
        for ancestor in self._ancestors:
            pair = ancestor._kept[layer]
            above = ancestor._held_sums(layer, pair, results[1].dtype)
            dq_QNH += self._backward_part(upstream, pair, above, ancestor.span, scale)
        dtype = q_QNH.dtype
        return dq_QNH.to(dtype), sums.k_SKH.to(dtype), sums.v_SKH.to(dtype)

    def _held_sums(self, layer: int, like: _Pair, dtype: torch.dtype) -> _Pair:
        """What descendants' gradients are added to."""
        if layer not in self._sums:
            self._sums[layer] = _zeros(like, dtype)
        return self._sums[layer]

    def _take_sums(self, layer: int, like: _Pair, dtype: torch.dtype) -> _Pair:
        """What descendants left, to which this stage's own share is added; no longer held."""
        # Its own backward comes last, so nothing will ask for these keys again.
        self._kept.pop(layer, None)
        return self._sums.pop(layer) if layer in self._sums else _zeros(like, dtype)

    def _forward_part(
        self, q_QNH: Tensor, keys: _Pair, span: Span, scale: float
    ) -> tuple[Tensor, Tensor]:
        return tree_attention_partial_forward(
            q_QNH,
            keys.k_SKH,
            keys.v_SKH,
            self._stream.layout,
            scale,
            **self._settings(span),
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
        stream = self._stream
        return {
            "query_start": self.span.start,
            "key_start": keys.start,
            "backend": stream.backend,
            "deterministic": stream.deterministic,
        }


def _zeros(like: _Pair, dtype: torch.dtype) -> _Pair:
    return _Pair(
        *(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (like.k_SKH, like.v_SKH))
    )


# Keys that are kept for other forwards are a side effect: a compiled layer breaks its graph here,
# and does not see the layer's index, on which it would specialise.
@torch.compiler.disable
def _attend(
    stage: StageAttention,
    module: nn.Module,
    q_QNH: Tensor,
    k_QKH: Tensor,
    v_QKH: Tensor,
    scale: float,
) -> Tensor:
    return stage.attend_layer(cast("int", module.layer_idx), q_QNH, k_QKH, v_QKH, scale)


class _Attend(torch.autograd.Function):
    """One layer of one stage; gradients of ancestors' keys go past autograd, in their sums."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_QNH: Tensor,
        k_QKH: Tensor,
        v_QKH: Tensor,
        stage: StageAttention,
        layer: int,
        scale: float,
    ) -> Tensor:
        is_held = any(ctx.needs_input_grad[:3])
        out_QNH, lse_NQ = stage.results(layer, q_QNH, _Pair(k_QKH, v_QKH), scale, is_held=is_held)
        ctx.save_for_backward(q_QNH, k_QKH, v_QKH, out_QNH, lse_NQ)
        ctx.call = (stage, layer, scale)
        return out_QNH

    @staticmethod
    def backward(ctx: Any, dout_QNH: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q_QNH, k_QKH, v_QKH, out_QNH, lse_NQ = ctx.saved_tensors
        stage, layer, scale = ctx.call
        grads = stage.gradients(
            layer, dout_QNH, q_QNH, _Pair(k_QKH, v_QKH), (out_QNH, lse_NQ), scale
        )
        return *grads, None, None, None
