"""Kinds of decoder layers, and the sizes from which their memory and their costs follow.

A layer mixes tokens along their paths (attention), then passes each token by itself (an MLP, dense
or of routed experts). This module imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes per expert of a token, without its weight: the expert's index and the row.
_ROUTE_BYTES = 2 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention of `num_heads` query heads over `num_kv_heads` heads of keys and values.

    `window`: tokens that a query sees, itself included; None: all before it. Elements are those of
    one token in one layer.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def output_size(self) -> int:
        """Elements of its result, before the output projection, and of the queries."""
        return self.num_heads * self.head_dim

    @property
    def wide_bytes(self) -> int:
        """Bytes of the float32 log-sum-exp of each head."""
        return 4 * self.num_heads

    def projections(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the maps to queries, to keys and values, and of the output's."""
        queries, keys = self.output_size, 2 * self.num_kv_heads * self.head_dim
        return (hidden_size, queries), (hidden_size, keys), (queries, hidden_size)

    def stack_elements(self, num_ranks: int) -> int:
        """Keys and values that one of `num_ranks` ranks has in a stream's stacks."""
        return 2 * self.num_kv_heads * self.key_copies(num_ranks) * self.head_dim

    def exchanged_elements(self, num_ranks: int) -> int:
        """Elements that ranks exchange: queries, results and their gradients in 2 + 4 exchanges,
        keys and values in 1 + 2."""
        return 6 * self.output_size + 3 * self.stack_elements(num_ranks)

    def working_elements(self, num_ranks: int) -> int:
        """Elements that its backward holds where several ranks run it: its inputs twice, by tokens
        and by heads, and gradients in float32."""
        if num_ranks == 1:
            return 0
        return 10 * self.output_size + 6 * self.stack_elements(num_ranks)

    def key_copies(self, num_ranks: int) -> int:
        """Number of ranks that attend to each key head: more than one if there are more ranks than
        key heads, or if a rank's query heads are not whole groups."""
        of_key = self.num_heads // self.num_kv_heads
        return of_key // math.gcd(self.num_heads // num_ranks, of_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A gated MLP of `size` features, or routed experts of `size` features each.

    `num_experts` is 1, with 1 per token, for a dense MLP.
    """

    size: int
    num_experts: int = 1
    experts_per_token: int = 1

    @property
    def is_routed(self) -> bool:
        """Whether it has experts."""
        return self.num_experts > 1

    @property
    def width(self) -> int:
        """Features that a token passes, over all its experts together."""
        return self.size * self.experts_per_token

    @property
    def dense_size(self) -> int:
        """Features of a dense MLP; 0 for experts."""
        return 0 if self.is_routed else self.size

    @property
    def router_size(self) -> int:
        """Router logits of a token; 0 for a dense MLP."""
        return self.num_experts * self.is_routed

    def weights(self, hidden_size: int) -> int:
        """Weights that a token passes."""
        return hidden_size * (3 * self.width + self.router_size)

    def all_weights(self, hidden_size: int) -> int:
        """Weights of all experts together."""
        return hidden_size * (3 * self.size * self.num_experts + self.router_size)

    def rows_size(self, hidden_size: int) -> int:
        """Features of a token's rows, one as wide as its hidden state per expert; 0 if dense."""
        return self.experts_per_token * hidden_size * self.is_routed

    def route_bytes(self, element_bytes: int) -> int:
        """Bytes of a token's choices and their weights."""
        return self.experts_per_token * (element_bytes + _ROUTE_BYTES) * self.is_routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer.

    `adapter_size`: sum of the adapter ranks that a token passes in it, without those on its
    experts, which are `expert_adapter_size`.
    """

    mixer: Attention
    mlp: Mlp
    adapter_size: int = 0
    expert_adapter_size: int = 0

    def weights(self, hidden_size: int) -> int:
        """Weights that a token passes."""
        return self.mixer_weights(hidden_size) + self.mlp.weights(hidden_size)

    def mixer_weights(self, hidden_size: int) -> int:
        """Weights of attention's linear maps."""
        return sum(inputs * outputs for inputs, outputs in self.mixer.projections(hidden_size))
