"""The models that steps are measured on, and the floating-point work of a step.

Enters a model's sizes and what a step runs, leaves FLOPs and shares of the device's peak.
Invariant: all ways to run the same rollouts have the same two counts, so that shares compare as
times do.
"""

from __future__ import annotations

from dataclasses import dataclass

# Dense bfloat16 of an H200, FLOP/s (data sheet).
PEAK_FLOPS = 989e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A Qwen3-style decoder: RMSNorm, normed queries and keys, SwiGLU, no biases."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    ties_embeddings: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers; embedding, head and the last norm are not in it."""
        d, h = self.hidden_size, self.head_dim
        attention = d * h * (2 * self.num_heads + 2 * self.num_kv_heads) + 2 * h
        return self.num_layers * (attention + 3 * d * self.intermediate_size + 2 * d)


QWEN3_8B = ModelSize(
    name="Qwen3-8B", num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=12_288, vocab_size=151_936, ties_embeddings=False,
)  # fmt: skip
QWEN3_1_7B = ModelSize(
    name="Qwen3-1.7B", num_layers=28, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128,
    intermediate_size=6144, vocab_size=151_936, ties_embeddings=True,
)  # fmt: skip
# For a CPU: does all of it in seconds, and says nothing of speed.
TINY = ModelSize(
    name="tiny", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=48, vocab_size=67, ties_embeddings=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one forward and backward has to run.

    Attributes:
        tokens: Tokens that go through the layers.
        rows: Hidden states that reach the LM head.
        pairs: Attended (query, key) pairs of one head of one layer, causal.
    """

    tokens: int
    rows: int
    pairs: int


def step_flops(size: ModelSize, work: StepWork) -> float:
    """6 a token and weight, 14 a pair and head dimension; recomputation is not counted."""
    layers = 6 * size.layer_parameters * work.tokens
    head = 6 * size.vocab_size * size.hidden_size * work.rows
    attention = 14 * size.head_dim * size.num_heads * size.num_layers * work.pairs
    return float(layers + head + attention)


def mfu(size: ModelSize, work: StepWork, seconds: float) -> float:
    """Share of an H200's peak, whatever the device."""
    return step_flops(size, work) / seconds / PEAK_FLOPS
