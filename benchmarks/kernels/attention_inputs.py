"""Inputs of the attention benchmark: random tensors over a packed forest, and their replicas.

The sequences of a part are whole root-to-leaf paths. Over all parts, each packed token has exactly
one replica that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.common.forests import Nodes
from ratoon_kernels import TreeLayout, build_layout

Int64Array = npt.NDArray[np.int64]

# torch's varlen attention and cuDNN index a batch's tensors with 32 bits in places.
MAX_PART_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Factor of q k^T before the softmax."""
        return self.head_dim**-0.5

    def forward_flops(self, num_pairs: int) -> int:
        """Two products, each 2 * head_dim operations per pair and query head."""
        return 4 * self.num_heads * self.head_dim * num_pairs

    def backward_flops(self, num_pairs: int) -> float:
        """Five products to the forward's two."""
        return 2.5 * self.forward_flops(num_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Inputs of one call, packed or replicated: T rows each."""

    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    dout_TNH: Tensor

    def gather(self, source_T: Tensor) -> Tensors:
        """The rows of some tokens."""
        return Tensors(
            q_TNH=self.q_TNH[source_T],
            k_TKH=self.k_TKH[source_T],
            v_TKH=self.v_TKH[source_T],
            dout_TNH=self.dout_TNH[source_T],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sequences that run in one micro-batch.

    Attributes:
        source_T: int64 on the device; packed index of each token.
        is_owner_T: bool on the device; this is the first replica of its packed token.
        offsets: First token of each sequence, and one past the last.
    """

    source_T: Tensor
    is_owner_T: Tensor
    offsets: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return np.diff(self.offsets).tolist()

    @property
    def num_pairs(self) -> int:
        """Attended pairs of query and key of causal attention in each sequence."""
        return sum(length * (length + 1) // 2 for length in self.lengths)


def random_tensors(num_tokens: int, geometry: Geometry, device: torch.device, seed: int) -> Tensors:
    """Normally distributed: on constants the chip would run faster than on real data."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(num_heads: int) -> Tensor:
        shape = (num_tokens, num_heads, geometry.head_dim)
        return torch.randn(shape, generator=generator, dtype=geometry.dtype, device=device)

    return Tensors(
        q_TNH=draw(geometry.num_heads),
        k_TKH=draw(geometry.num_kv_heads),
        v_TKH=draw(geometry.num_kv_heads),
        dout_TNH=draw(geometry.num_heads),
    )


def layout_of(nodes: Nodes, device: torch.device) -> TreeLayout:
    """The forest's layout on the device."""
    return build_layout(**nodes.arrays(), device=device)


def packed_part(nodes: Nodes, device: torch.device) -> Part:
    """All packed tokens as a single part, whose sequences are the trees."""
    num_tokens = nodes.num_tokens
    roots = np.flatnonzero(nodes.parent < 0)
    return Part(
        source_T=torch.arange(num_tokens, device=device),
        is_owner_T=torch.ones(num_tokens, dtype=torch.bool, device=device),
        offsets=(*nodes.start[roots].tolist(), num_tokens),
    )


def replicated_parts(
    nodes: Nodes, max_tokens: int, device: torch.device, *, is_padded: bool
) -> list[Part]:
    """One sequence per leaf, in packed order, in parts of at most `max_tokens` tokens.

    With `is_padded`, each sequence counts as many tokens as the longest one.
    """
    is_owned = np.zeros(nodes.num_tokens, np.bool_)
    paths = _paths(nodes)
    longest = max(map(len, paths))
    parts: list[list[Int64Array]] = [[]]
    num_tokens = 0
    for path in paths:
        num_more = longest if is_padded else len(path)
        if parts[-1] and num_tokens + num_more > max_tokens:
            parts.append([])
            num_tokens = 0
        parts[-1].append(path)
        num_tokens += num_more
    return [_part(paths, is_owned, device) for paths in parts]


def max_part_tokens(geometry: Geometry) -> int:
    """The most tokens that a replicated micro-batch may have."""
    return MAX_PART_ELEMENTS // (geometry.num_heads * geometry.head_dim)


def _paths(nodes: Nodes) -> list[Int64Array]:
    """Packed indices of each root-to-leaf path."""
    is_leaf = np.ones(len(nodes.parent), np.bool_)
    is_leaf[nodes.parent[nodes.parent >= 0]] = False
    paths: list[Int64Array] = []
    for leaf in np.flatnonzero(is_leaf):
        segments: list[Int64Array] = []
        node = int(leaf)
        while node >= 0:
            segments.append(np.arange(nodes.start[node], nodes.stop[node]))
            node = int(nodes.parent[node])
        paths.append(np.concatenate(segments[::-1]))
    return paths


def _part(paths: list[Int64Array], is_owned: npt.NDArray[np.bool_], device: torch.device) -> Part:
    """Marks the tokens of the part as owned."""
    is_owner: list[npt.NDArray[np.bool_]] = []
    for path in paths:
        is_owner.append(~is_owned[path])
        is_owned[path] = True
    return Part(
        source_T=torch.from_numpy(np.concatenate(paths)).to(device),
        is_owner_T=torch.from_numpy(np.concatenate(is_owner)).to(device),
        offsets=tuple(np.cumsum([0, *map(len, paths)]).tolist()),
    )
