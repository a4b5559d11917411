"""Gated DeltaNet of a part of a packed forest, or of a whole one that several ranks run.

One operation, `ratoon::part_gated_delta`, has the convolution, the recurrence and what is exchanged
and handed on: a compiled layer sees nothing of other stages and ranks, and a checkpointed layer
keeps its result. It finds its part by a number. Inputs are all that is kept: the backward exchanges
and convolves them once more.

A part hands on, for each of its nodes that later parts continue, the state and the convolution's
last rows at the node's end; those parts add the gradients of them, in the order in which they run
backward. Several ranks each have a share of the part's tokens outside the operation, and within it
a share of the heads over all tokens of the part.

t of T tokens, C channels, N heads of values, K of keys. Lower-case n, k, c: this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ratoon.model.linear_attention import LinearAttention, split_rows
from ratoon.model.numbered import find, numbered
from ratoon.shards.sequence_group import SequenceGroup, own_keys
from ratoon_kernels import (
    Handover,
    Span,
    TreeLayout,
    build_layout,
    causal_convolution_partial_backward,
    causal_convolution_partial_forward,
    gated_delta_partial_backward,
    gated_delta_partial_forward,
)
from ratoon_kernels.precision import accumulation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """A part's own nodes, what they continue and what they hand on.

    `taken`: nodes of other parts that roots of this one continue, by the index of the part among
    those above it and the place among what that part hands on.
    """

    layout: TreeLayout
    handover: Handover
    taken: tuple[tuple[int, int], ...]


class Place:
    """The packed tokens `span` of a forest, whole nodes, for all layers; parents elsewhere are in
    `above`, which are parts as well."""

    def __init__(
        self,
        whole: TreeLayout,
        span: Span,
        above: Sequence[Span],
        group: SequenceGroup,
        *,
        deterministic: bool,
    ) -> None:
        self._whole = whole
        self._above = above
        self.span = span
        self.group = group
        self.deterministic = deterministic

    @cached_property
    def nodes(self) -> _Nodes:
        """Found when first asked for, as most models have no linear attention."""
        whole, span = self._whole, self.span
        start, stop, end, parent = whole.node_table_M4.numpy().T
        first, last = np.searchsorted(start, [span.start, span.stop])
        parents = parent[first:last]
        outside = np.unique(parents[(parents >= 0) & (parents < first)]).tolist()
        row = {node: index for index, node in enumerate(outside)}
        own = whole
        if len(span) != whole.num_tokens:
            own = build_layout(
                node_start=start[first:last] - span.start,
                node_stop=stop[first:last] - span.start,
                node_end=np.minimum(end[first:last], span.stop) - span.start,
                node_parent=np.where(parents >= first, parents - first, -1),
                device=whole.device,
            )
        handed = [node - first for node in _handed(whole, span)]
        handover = Handover(
            first_M=torch.tensor([row.get(node, -1) for node in parents.tolist()]).long(),
            handed_E=torch.tensor(handed).long(),
        )
        taken = tuple(self._taken(node, int(start[node])) for node in outside)
        return _Nodes(layout=own, handover=handover, taken=taken)

    def _taken(self, node: int, start: int) -> tuple[int, int]:
        (home,) = (i for i, each in enumerate(self._above) if each.start <= start < each.stop)
        return home, _handed(self._whole, self._above[home]).index(node)


def _handed(layout: TreeLayout, span: Span) -> list[int]:
    """Nodes in `span` with children behind it, ascending."""
    start, _, _, parent = layout.node_table_M4.numpy().T
    first, last = np.searchsorted(start, [span.start, span.stop])
    behind = parent[last:]
    return np.unique(behind[(behind >= first) & (behind < last)]).tolist()


@dataclass(slots=True)
class _Ends:
    """States and last rows that a part hands on, or their gradients."""

    state_ENDV: Tensor
    rows_ERC: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Inputs of the mixing, of all heads of this rank's tokens or of all tokens' own heads."""

    v_TNV: Tensor
    g_TN: Tensor
    beta_TN: Tensor
    q_TKD: Tensor
    k_TKD: Tensor

    def joined(self) -> Tensor:
        """Rows of the convolution, x_TC."""
        return torch.cat([x.flatten(1) for x in (self.q_TKD, self.k_TKD, self.v_TNV)], dim=1)

    def split(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in such rows, as views."""
        _, num_key_heads, key_dim = self.q_TKD.shape
        return split_rows(x_TC, num_key_heads, key_dim, self.v_TNV.shape[1])

    def convolved(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the recurrence, of rows behind the convolution."""
        return *self.split(x_TC), self.g_TN, self.beta_TN


class DeltaPart:
    """One layer of one part.

    States: new; forwarded, with ends that later parts read; differentiated.
    """

    def __init__(self, place: Place, above: Sequence[DeltaPart]) -> None:
        self._place = place
        self._above = above
        self._number_1 = numbered(self)
        self._ends: _Ends | None = None
        self._sums: _Ends | None = None

    def mix(
        self, module: nn.Module, x_tC: Tensor, weight_CW: Tensor, g_tN: Tensor, beta_tN: Tensor
    ) -> Tensor:
        """See `PathMixing.mix`."""
        own = cast("LinearAttention", module)
        return _forward(
            x_tC, weight_CW, g_tN, beta_tN, self._number_1, own.num_k_heads, own.head_k_dim
        )

    def forward(self, inputs: _Inputs, weight_CW: Tensor) -> Tensor:
        """Returns out_tNV in the dtype of the inputs; keeps the handed ends."""
        own, weight_cW = self._to_heads(inputs), self._own_taps(weight_CW, inputs)
        first = self._first(own, weight_cW.shape[1])
        rows_Tc, last_ERc = causal_convolution_partial_forward(
            own.joined(), weight_cW, first_SRC=first.rows_ERC, **self._settings()
        )
        out_TnV, end_EnDV = gated_delta_partial_forward(
            *own.convolved(rows_Tc),
            scale=own.q_TKD.shape[2] ** -0.5,
            first_SNDV=first.state_ENDV,
            **self._settings(),
        )
        self._ends, self._sums = _Ends(end_EnDV, last_ERc), None
        (out_tNV,), _ = self._place.group.to_tokens(inputs.q_TKD.shape[1], [out_TnV])
        return out_tNV

    def backward(
        self, dout_tNV: Tensor, inputs: _Inputs, weight_CW: Tensor
    ) -> tuple[_Inputs, Tensor]:
        """Returns the gradients of the inputs and of the weight; adds to those of the ends that
        the part continues."""
        group, num_key_heads = self._place.group, inputs.q_TKD.shape[1]
        own, weight_cW = self._to_heads(inputs), self._own_taps(weight_CW, inputs)
        (dout_TnV,), _ = group.to_heads(len(self._place.span), [dout_tNV])
        first = self._first(own, weight_cW.shape[1])
        rows_Tc, _ = causal_convolution_partial_forward(
            own.joined(), weight_cW, first_SRC=first.rows_ERC, **self._settings()
        )
        sums = self._ended()
        grads = gated_delta_partial_backward(
            dout_TnV,
            sums.state_ENDV,
            *own.convolved(rows_Tc),
            scale=own.q_TKD.shape[2] ** -0.5,
            first_SNDV=first.state_ENDV,
            **self._settings(),
        )
        drows_Tc = torch.cat(
            [x.flatten(1) for x in (grads.dq_TKD, grads.dk_TKD, grads.dv_TNV)], dim=1
        )
        by_rows = causal_convolution_partial_backward(
            drows_Tc,
            sums.rows_ERC,
            own.joined(),
            weight_cW,
            first_SRC=first.rows_ERC,
            **self._settings(),
        )
        assert grads.dfirst_SNDV is not None
        assert by_rows.dfirst_SRC is not None
        self._sums = None
        for row, (home, index) in enumerate(self._place.nodes.taken):
            above = self._above[home]._ended()
            above.state_ENDV[index] += grads.dfirst_SNDV[row]
            above.rows_ERC[index] += by_rows.dfirst_SRC[row]
        parts = own.split(by_rows.dx_TC)
        dq_TkD, dk_TkD, dv_TnV = (x.contiguous() for x in parts)
        of_heads, of_keys = group.to_tokens(
            num_key_heads, [dv_TnV, grads.dg_TN, grads.dbeta_TN], [dq_TkD, dk_TkD]
        )
        dinputs = _inputs(of_heads, of_keys)
        return dinputs, self._all_taps(by_rows.dweight_CW, weight_CW, inputs)

    def _settings(self) -> dict[str, Any]:
        nodes = self._place.nodes
        return {
            "layout": nodes.layout,
            "handover": nodes.handover,
            "deterministic": self._place.deterministic,
        }

    def _to_heads(self, inputs: _Inputs) -> _Inputs:
        of_heads, of_keys = self._place.group.to_heads(
            len(self._place.span),
            [inputs.v_TNV, inputs.g_TN, inputs.beta_TN],
            [inputs.q_TKD, inputs.k_TKD],
        )
        return _inputs(of_heads, of_keys)

    def _first(self, own: _Inputs, num_taps: int) -> _Ends:
        """Ends that roots of this part continue."""
        if self._place.nodes.taken:
            found = [(self._above[home]._ends, index) for home, index in self._place.nodes.taken]
            ends = [(ends, index) for ends, index in found if ends is not None]
            assert len(ends) == len(found), "a part is forwarded before, and run backward after"
            states = torch.stack([each.state_ENDV[index] for each, index in ends])
            return _Ends(states, torch.stack([each.rows_ERC[index] for each, index in ends]))
        num_heads, value_dim = own.v_TNV.shape[1:]
        wide = accumulation_dtype(own.v_TNV.dtype)
        states = own.v_TNV.new_empty((0, num_heads, own.q_TKD.shape[2], value_dim), dtype=wide)
        num_channels = sum(x.shape[1] * x.shape[2] for x in (own.q_TKD, own.k_TKD, own.v_TNV))
        return _Ends(states, own.v_TNV.new_empty((0, num_taps - 1, num_channels)))

    def _ended(self) -> _Ends:
        """Sums of the gradients of the handed ends, zeros at first."""
        assert self._ends is not None, "a part is forwarded before, and run backward after"
        if self._sums is None:
            states, rows = self._ends.state_ENDV, self._ends.rows_ERC
            self._sums = _Ends(torch.zeros_like(states), torch.zeros_like(rows, dtype=states.dtype))
        return self._sums

    def _own_taps(self, weight_CW: Tensor, inputs: _Inputs) -> Tensor:
        """Taps of this rank's channels."""
        if self._place.group.link is None:
            return weight_CW
        return torch.cat([weight_CW[start:stop] for start, stop in self._channels(inputs)])

    def _all_taps(self, dweight_cW: Tensor, weight_CW: Tensor, inputs: _Inputs) -> Tensor:
        """Gradients of all channels: zeros for those of other ranks, which add theirs."""
        if self._place.group.link is None:
            return dweight_cW.to(weight_CW.dtype)
        dweight_CW = torch.zeros_like(weight_CW, dtype=dweight_cW.dtype)
        place = 0
        # A key head may be there twice.
        for start, stop in self._channels(inputs):
            dweight_CW[start:stop] += dweight_cW[place : place + stop - start]
            place += stop - start
        return dweight_CW.to(weight_CW.dtype)

    def _channels(self, inputs: _Inputs) -> list[tuple[int, int]]:
        """This rank's channels, as runs: of queries, keys and values, head by head."""
        group = self._place.group
        (num_keys, key_dim), (num_heads, value_dim) = (
            x.shape[1:] for x in (inputs.q_TKD, inputs.v_TNV)
        )
        keys = own_keys(num_heads, num_keys, group.index, group.size)
        runs = [
            (first + key * key_dim, first + (key + 1) * key_dim)
            for first in (0, num_keys * key_dim)
            for key in keys
        ]
        first, own = 2 * num_keys * key_dim, num_heads // group.size * value_dim
        return [*runs, (first + group.index * own, first + (group.index + 1) * own)]


def _inputs(of_heads: Sequence[Tensor], of_keys: Sequence[Tensor]) -> _Inputs:
    v_TNV, g_TN, beta_TN = of_heads
    q_TKD, k_TKD = of_keys
    return _Inputs(v_TNV=v_TNV, g_TN=g_TN, beta_TN=beta_TN, q_TKD=q_TKD, k_TKD=k_TKD)


def _unpacked(
    x_tC: Tensor, g_tN: Tensor, beta_tN: Tensor, num_key_heads: int, key_dim: int
) -> _Inputs:
    q_tKD, k_tKD, v_tNV = split_rows(x_tC, num_key_heads, key_dim, g_tN.shape[1])
    return _inputs([v_tNV, g_tN, beta_tN], [q_tKD, k_tKD])


@torch.library.custom_op("ratoon::part_gated_delta", mutates_args=())
def _forward(
    x_tC: Tensor,
    weight_CW: Tensor,
    g_tN: Tensor,
    beta_tN: Tensor,
    number_1: Tensor,
    num_key_heads: int,
    key_dim: int,
) -> Tensor:
    inputs = _unpacked(x_tC, g_tN, beta_tN, num_key_heads, key_dim)
    return cast("DeltaPart", find(number_1)).forward(inputs, weight_CW)


@_forward.register_fake
def _(
    x_tC: Tensor,
    _weight_CW: Tensor,
    g_tN: Tensor,
    _beta_tN: Tensor,
    _number_1: Tensor,
    num_key_heads: int,
    key_dim: int,
) -> Tensor:
    value_dim = (x_tC.shape[1] - 2 * num_key_heads * key_dim) // g_tN.shape[1]
    return x_tC.new_empty((x_tC.shape[0], g_tN.shape[1], value_dim))


@torch.library.custom_op("ratoon::part_gated_delta_backward", mutates_args=())
def _backward(
    dout_tNV: Tensor,
    x_tC: Tensor,
    weight_CW: Tensor,
    g_tN: Tensor,
    beta_tN: Tensor,
    number_1: Tensor,
    num_key_heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = _unpacked(x_tC, g_tN, beta_tN, num_key_heads, key_dim)
    part = cast("DeltaPart", find(number_1))
    dinputs, dweight_CW = part.backward(dout_tNV, inputs, weight_CW)
    return dinputs.joined(), dweight_CW, dinputs.g_TN, dinputs.beta_TN


@_backward.register_fake
def _(
    _dout_tNV: Tensor, x_tC: Tensor, weight_CW: Tensor, g_tN: Tensor, beta_tN: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x_tC.new_empty(x_tC.shape),
        weight_CW.new_empty(weight_CW.shape),
        g_tN.new_empty(g_tN.shape),
        beta_tN.new_empty(beta_tN.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.num_key_heads, ctx.key_dim = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout_tNV: Tensor) -> tuple[Any, ...]:
    grads = _backward(dout_tNV, *ctx.saved_tensors, ctx.num_key_heads, ctx.key_dim)
    return *grads, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
