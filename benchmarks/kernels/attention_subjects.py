"""Subjects of the attention benchmark: our tree attention, and libraries' on replicas.

Forward and backward can be timed apart, and do that attention's work alone: gathering, padding and
building a layout happen before the clock starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.forests import Nodes
from benchmarks.kernels.attention_inputs import (
    Geometry,
    Part,
    Tensors,
    max_part_tokens,
    packed_part,
    replicated_parts,
)
from ratoon_kernels import TreeLayout, tree_attention

DETERMINISTIC = "-deterministic"
FA2 = "fa2-replicated"
SDPA_KERNELS = {
    "cudnn-replicated": [SDPBackend.CUDNN_ATTENTION],
    "sdpa-replicated": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}
GPU_BACKENDS = ("cuda", "cuda-deterministic", "flash", "flex", FA2, "cudnn-replicated")
CPU_BACKENDS = ("reference", "sdpa-replicated")

_varlen_forward = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of one call, T rows each; `lse_NT` is None if the library does not return it."""

    out_TNH: Tensor
    lse_NT: Tensor | None
    dq_TNH: Tensor
    dk_TKH: Tensor
    dv_TKH: Tensor


class Call(Protocol):
    """A forward and its backward on loaded inputs."""

    def forward(self) -> None: ...

    def backward(self) -> None:
        """Runs the backward once, after `forward`."""
        ...

    def results(self) -> Results:
        """Returns the results, after `backward`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One row of the table: a way to run attention over all rollouts of a shape.

    Attributes:
        backend: Its name in the table.
        how: A note for the reader; may be empty.
        parts: Micro-batches, run one after another.
        load: Makes a part's call from its tensors, without copying them.
    """

    backend: str
    how: str
    parts: list[Part]
    load: Callable[[Tensors, Part], Call]

    @property
    def is_packed(self) -> bool:
        """Whether every packed token is computed once."""
        return all(bool(part.is_owner_T.all()) for part in self.parts)


def candidates(backend: str, nodes: Nodes, layout: TreeLayout, geometry: Geometry) -> list[Subject]:
    """The ways to run a backend of the table; the fastest is reported.

    `X-deterministic` is the tree attention backend X in deterministic mode; `*-replicated` runs
    each rollout unshared; any other name is that tree attention backend.
    """
    device = layout.device
    max_tokens = max_part_tokens(geometry)
    if backend == FA2:
        parts = replicated_parts(nodes, max_tokens, device, is_padded=False)
        load = functools.partial(VarlenCall, geometry=geometry)
        return [Subject(backend=backend, how="varlen", parts=parts, load=load)]
    if backend not in SDPA_KERNELS:
        load = functools.partial(
            TreeCall,
            layout=layout,
            geometry=geometry,
            backend=backend.removesuffix(DETERMINISTIC),
            is_deterministic=backend.endswith(DETERMINISTIC),
        )
        return [
            Subject(backend=backend, how="packed", parts=[packed_part(nodes, device)], load=load)
        ]
    ways = []
    for is_batched, how in ((True, "batch, padded to the longest"), (False, "one by one")):
        parts = replicated_parts(nodes, max_tokens, device, is_padded=is_batched)
        load = functools.partial(
            SdpaCall, geometry=geometry, kernels=SDPA_KERNELS[backend], is_batched=is_batched
        )
        ways.append(Subject(backend=backend, how=how, parts=parts, load=load))
    has_equal_lengths = len({length for part in ways[0].parts for length in part.lengths}) == 1
    return ways[:1] if has_equal_lengths else ways


class TreeCall:
    """`tree_attention` over the packed forest."""

    def __init__(
        self,
        tensors: Tensors,
        _part: Part,
        *,
        layout: TreeLayout,
        geometry: Geometry,
        backend: str,
        is_deterministic: bool,
    ) -> None:
        self._inputs = _leaves(tensors.q_TNH, tensors.k_TKH, tensors.v_TKH)
        self._dout = tensors.dout_TNH
        self._layout, self._scale, self._backend = layout, geometry.scale, backend
        self._is_deterministic = is_deterministic
        self._outputs: tuple[Tensor, Tensor] | None = None
        self._grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        q_TNH, k_TKH, v_TKH = self._inputs
        self._outputs = tree_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            self._layout,
            self._scale,
            backend=self._backend,
            deterministic=self._is_deterministic,
        )

    def backward(self) -> None:
        assert self._outputs is not None
        self._grads = torch.autograd.grad(self._outputs[0], self._inputs, self._dout)

    def results(self) -> Results:
        assert self._outputs is not None
        out_TNH, lse_NT = (x.detach() for x in self._outputs)
        dq, dk, dv = self._grads
        return Results(out_TNH=out_TNH, lse_NT=lse_NT, dq_TNH=dq, dk_TKH=dk, dv_TKH=dv)


class VarlenCall:
    """torch's own varlen FlashAttention (FlashAttention-2) over replicated sequences."""

    def __init__(self, tensors: Tensors, part: Part, *, geometry: Geometry) -> None:
        device = tensors.q_TNH.device
        self._tensors, self._scale = tensors, geometry.scale
        offsets = torch.tensor(part.offsets, dtype=torch.int32, device=device)
        longest = max(part.lengths)
        self._sequences = (offsets, offsets, longest, longest, 0.0, True)
        self._saved: tuple[Tensor, ...] = ()
        self._grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        t = self._tensors
        out, lse, rng_state, unused, _ = _varlen_forward(
            t.q_TNH, t.k_TKH, t.v_TKH, *self._sequences, False, scale=self._scale
        )
        self._saved = (out, lse, rng_state, unused)

    def backward(self) -> None:
        t = self._tensors
        out, lse, rng_state, unused = self._saved
        self._grads = _varlen_backward(
            *(t.dout_TNH, t.q_TNH, t.k_TKH, t.v_TKH, out, lse),
            *self._sequences,
            rng_state,
            unused,
            scale=self._scale,
        )

    def results(self) -> Results:
        dq, dk, dv = self._grads
        out_TNH, lse_NT = self._saved[:2]
        return Results(out_TNH=out_TNH, lse_NT=lse_NT, dq_TNH=dq, dk_TKH=dk, dv_TKH=dv)


class SdpaCall:
    """`scaled_dot_product_attention` over replicated sequences, in blocks of equal lengths.

    Either one block of all sequences, padded to the longest, or one block per sequence.
    """

    def __init__(
        self,
        tensors: Tensors,
        part: Part,
        *,
        geometry: Geometry,
        kernels: list[SDPBackend],
        is_batched: bool,
    ) -> None:
        self._part, self._scale, self._kernels = part, geometry.scale, kernels
        self._is_batched = is_batched
        heads_first = [
            self._blocks(x) for x in (tensors.q_TNH, tensors.k_TKH, tensors.v_TKH, tensors.dout_TNH)
        ]
        self._blocks_of = [
            (_leaves(q, k, v), dout) for q, k, v, dout in zip(*heads_first, strict=True)
        ]
        self._outputs: list[Tensor] = []
        self._grads: list[tuple[Tensor, ...]] = []

    def forward(self) -> None:
        with sdpa_kernel(self._kernels):
            self._outputs = [
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
                )
                for (q, k, v), _ in self._blocks_of
            ]

    def backward(self) -> None:
        self._grads = [
            torch.autograd.grad(out, inputs, dout)
            for out, (inputs, dout) in zip(self._outputs, self._blocks_of, strict=True)
        ]

    def results(self) -> Results:
        dq, dk, dv = (self._rows(list(grads)) for grads in zip(*self._grads, strict=True))
        out_TNH = self._rows([out.detach() for out in self._outputs])
        return Results(out_TNH=out_TNH, lse_NT=None, dq_TNH=dq, dk_TKH=dk, dv_TKH=dv)

    def _blocks(self, x_TNH: Tensor) -> list[Tensor]:
        """Views or padded copies [sequences, heads, tokens, head_dim]."""
        rows = list(x_TNH.split(self._part.lengths))
        if not self._is_batched:
            return [x.unsqueeze(0).transpose(1, 2) for x in rows]
        if len(set(self._part.lengths)) == 1:
            return [x_TNH.unflatten(0, (len(rows), -1)).transpose(1, 2)]
        return [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)]

    def _rows(self, blocks: list[Tensor]) -> Tensor:
        """The inverse of `_blocks`."""
        sequences = [x for block in blocks for x in block.transpose(1, 2)]
        lengths = self._part.lengths
        return torch.cat([x[:length] for x, length in zip(sequences, lengths, strict=True)])


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)
