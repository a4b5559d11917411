"""Kinds of decoder layers, and the sizes from which their memory and their costs follow.

A layer mixes tokens along their paths (a mixer), then passes each token by itself (an MLP, dense or
of routed experts). This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

# Tokens between two states of a recurrence that its backward keeps.
_CHUNK_TOKENS = 64
# Bytes per expert of a token, without its weight: the expert's index and the row.
_ROUTE_BYTES = 2 + 4


class Mixer(Protocol):
    """What plans and costs ask of a mixer; elements are those of one token in one layer."""

    @property
    def num_heads(self) -> int:
        """Heads of its result, which ranks share."""
        ...

    @property
    def output_size(self) -> int:
        """Elements of its result, before the output projection."""
        ...

    @property
    def wide_bytes(self) -> int:
        """Bytes of float32 results that are kept beside the output."""
        ...

    @property
    def pair_elements(self) -> int:
        """Elements of a (query, key) pair, of queries and values together halved; 0: none."""
        ...

    @property
    def token_flops(self) -> int:
        """FLOPs of the forward beside projections, which do not grow with the path."""
        ...

    def projections(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each linear map."""
        ...

    def stack_elements(self, num_ranks: int) -> int:
        """Elements that one of `num_ranks` ranks has in a stream's stacks."""
        ...

    def state_elements(self, num_ranks: int) -> int:
        """Elements that one of `num_ranks` ranks passes on at a node's end in a stream."""
        ...

    def exchanged_elements(self, num_ranks: int) -> int:
        """Elements that are exchanged between ranks, forward and backward."""
        ...

    def working_elements(self, num_ranks: int) -> int:
        """Elements that the backward of the mixer alone holds beyond what was kept."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention of `num_heads` query heads over `num_kv_heads` heads of keys and values.

    `value_dim`: size of values; None: `head_dim`, that of queries and keys. `window`: tokens that a
    query sees, itself included; None: all before it. `is_gated`: the query projection has a gate of
    the output beside each query. `latent`: keys and values are expanded from a latent.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    is_gated: bool = False
    latent: Latent | None = None

    @property
    def value_size(self) -> int:
        """Elements of a value of one head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def output_size(self) -> int:
        """See `Mixer`."""
        return self.num_heads * self.value_size

    @property
    def wide_bytes(self) -> int:
        """See `Mixer`: the log-sum-exp of each head."""
        return 4 * self.num_heads

    @property
    def pair_elements(self) -> int:
        """See `Mixer`."""
        return self.num_heads * (self.head_dim + self.value_size) // 2

    @property
    def token_flops(self) -> int:
        """See `Mixer`."""
        return 0

    def projections(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """See `Mixer`."""
        queries = self.num_heads * self.head_dim * (1 + self.is_gated)
        output = (self.output_size, hidden_size)
        if self.latent is None:
            keys = self.num_kv_heads * (self.head_dim + self.value_size)
            return (hidden_size, queries), (hidden_size, keys), output
        return (*self.latent.projections(hidden_size, queries, self), output)

    def stack_elements(self, num_ranks: int) -> int:
        """See `Mixer`: keys and values."""
        copies = self.num_kv_heads * self.key_copies(num_ranks)
        return copies * (self.head_dim + self.value_size)

    def state_elements(self, num_ranks: int) -> int:
        """See `Mixer`."""
        return 0

    def exchanged_elements(self, num_ranks: int) -> int:
        """See `Mixer`: queries, results and their gradients in 2 + 4 exchanges, keys and values in
        1 + 2."""
        return 6 * self.pair_elements + 3 * self.stack_elements(num_ranks)

    def working_elements(self, num_ranks: int) -> int:
        """See `Mixer`: with several ranks the inputs of the backward twice, by tokens and by heads,
        and gradients in float32."""
        if num_ranks == 1:
            return 0
        return 10 * self.pair_elements + 6 * self.stack_elements(num_ranks)

    def key_copies(self, num_ranks: int) -> int:
        """Number of ranks that attend to each key head: more than one if there are more ranks than
        key heads, or if a rank's query heads are not whole groups."""
        of_key = self.num_heads // self.num_kv_heads
        return of_key // math.gcd(self.num_heads // num_ranks, of_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), expanded for training.

    `query_rank`: size of the queries' latent; None: queries are projected directly. `rank`: that of
    keys and values. `rotary_dim`: elements of a key that all heads share and that are rotated.
    """

    query_rank: int | None
    rank: int
    rotary_dim: int

    def projections(
        self, hidden_size: int, queries: int, attention: Attention
    ) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the maps to queries, keys and values."""
        own = attention.head_dim - self.rotary_dim + attention.value_size
        expanded = (self.rank, attention.num_heads * own)
        compressed = (hidden_size, self.rank + self.rotary_dim)
        if self.query_rank is None:
            return (hidden_size, queries), compressed, expanded
        return (hidden_size, self.query_rank), (self.query_rank, queries), compressed, expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule behind a causal convolution of `taps` taps.

    Yang et al., 2024, arXiv:2412.06464. `num_heads` heads of values read `num_key_heads` heads of
    queries and keys.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def convolved_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.output_size

    @property
    def output_size(self) -> int:
        """See `Mixer`."""
        return self.num_heads * self.value_dim

    @property
    def wide_bytes(self) -> int:
        """See `Mixer`."""
        return 0

    @property
    def pair_elements(self) -> int:
        """See `Mixer`."""
        return 0

    @property
    def token_flops(self) -> int:
        """See `Mixer`: products within chunks, and those with states."""
        within = _CHUNK_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return 2 * self.num_heads * (within + 4 * self.key_dim * self.value_dim)

    def projections(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """See `Mixer`: to what is convolved, to the gate, to decays and strengths, and back."""
        ins = self.convolved_size, self.output_size, 2 * self.num_heads
        return (*((hidden_size, size) for size in ins), (self.output_size, hidden_size))

    def stack_elements(self, num_ranks: int) -> int:
        """See `Mixer`."""
        return 0

    def state_elements(self, num_ranks: int) -> int:
        """See `Mixer`: the state, and the rows that later taps read."""
        states = self.num_heads * self.key_dim * self.value_dim // num_ranks
        return states + (self.taps - 1) * self.convolved_size

    def exchanged_elements(self, num_ranks: int) -> int:
        """See `Mixer`: what the recurrence reads and its results, in 1 + 2 exchanges."""
        return 3 * (self.convolved_size + 2 * self.num_heads + self.output_size)

    def working_elements(self, num_ranks: int) -> int:
        """See `Mixer`: inputs before and behind the convolution, their gradients, and the states of
        chunks with their gradients."""
        states = 2 * self.num_heads * self.key_dim * self.value_dim // _CHUNK_TOKENS
        return 4 * self.convolved_size + states


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A gated MLP of `size` features, or routed experts of `size` features each.

    `num_experts` is 1, with 1 per token, for a dense MLP. `shared_size`: features of a dense MLP
    beside the experts that every token passes, 0 without.
    """

    size: int
    num_experts: int = 1
    experts_per_token: int = 1
    shared_size: int = 0

    @property
    def is_routed(self) -> bool:
        """Whether it has experts."""
        return self.num_experts > 1

    @property
    def width(self) -> int:
        """Features that a token passes, over all its experts together."""
        return self.size * self.experts_per_token + self.shared_size

    @property
    def dense_size(self) -> int:
        """Features of what is dense of it; 0: nothing is."""
        return self.shared_size if self.is_routed else self.size

    @property
    def router_size(self) -> int:
        """Router logits of a token; 0 for a dense MLP."""
        return self.num_experts * self.is_routed

    def weights(self, hidden_size: int) -> int:
        """Weights that a token passes."""
        return hidden_size * (3 * self.width + self.router_size)

    def all_weights(self, hidden_size: int) -> int:
        """Weights of all experts together."""
        all_sizes = self.size * self.num_experts + self.shared_size
        return hidden_size * (3 * all_sizes + self.router_size)

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
    experts, which are `expert_adapter_size`. `has_post_norms`: outputs of the mixer and of the MLP
    are normed before they are added, so that the backward needs the MLP's.
    """

    mixer: Mixer
    mlp: Mlp
    adapter_size: int = 0
    expert_adapter_size: int = 0
    has_post_norms: bool = False

    def weights(self, hidden_size: int) -> int:
        """Weights that a token passes."""
        return self.mixer_weights(hidden_size) + self.mlp.weights(hidden_size)

    def mixer_weights(self, hidden_size: int) -> int:
        """Weights of the mixer's linear maps."""
        return sum(inputs * outputs for inputs, outputs in self.mixer.projections(hidden_size))


def window_of(mixer: Mixer) -> int | None:
    """Tokens that a query sees in a layer with a window; None: it sees all, or there is none."""
    return mixer.window if isinstance(mixer, Attention) else None


def window_of_layers(layers: Iterable[Layer]) -> int | None:
    """The window of all layers that have one, which is one for a model; None: no layer has."""
    windows = {window_of(layer.mixer) for layer in layers} - {None}
    assert len(windows) <= 1, "a configuration has one sliding_window"
    return next(iter(windows), None)
