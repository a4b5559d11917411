"""Workloads of steps: models, groups of random rollouts, and their floating-point work.

All ways to run the same rollouts are credited with the same work, so MFU compares as time does.
Gradients of a packed batch and of the same rollouts replicated, however cut, are sums of the same
terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from harness.decoder_sizes import uniform_sizes
from ratoon.model.experts import EXPERTS_NAME
from ratoon.model.families import family_of
from ratoon.planner.activation_plan import DecoderSizes
from ratoon.planner.costs import path_pairs
from ratoon.planner.layer_kinds import window_of_layers
from ratoon.planner.stage_plan import HeldTokens
from ratoon.planner.waves import resident_tokens
from ratoon.rollout.batch import RolloutBatch, sequence_lengths
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import Forest, PackedBatch, Stage
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train import report
from ratoon.train.micro_batches import DeviceBatch, to_device
from ratoon.train.staged_batch import stream_tokens

# Dense bfloat16 FLOP/s of an H200 (data sheet).
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
        """Parameters of all layers, without embedding, head and final norm."""
        d, h = self.hidden_size, self.head_dim
        attention = d * h * (2 * self.num_heads + 2 * self.num_kv_heads) + 2 * h
        return self.num_layers * (attention + 3 * d * self.intermediate_size + 2 * d)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedSize(ModelSize):
    """A Qwen3-MoE decoder: `intermediate_size` has the experts of one token side by side.

    Attributes:
        num_experts: Experts of a layer.
        experts_per_token: Experts that each token passes.
        implementation: Transformers' name of what runs experts; with one of its own, its router
            decides, too.
    """

    num_experts: int
    experts_per_token: int
    implementation: str = EXPERTS_NAME

    @property
    def layer_parameters(self) -> int:
        """Parameters that a token passes: its own experts and the router included."""
        router = self.num_layers * self.hidden_size * self.num_experts
        return super(RoutedSize, self).layer_parameters + router


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySize:
    """A decoder of any family that is served, as its configuration states it."""

    name: str
    config: PreTrainedConfig

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.geometry.vocab_size

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self.geometry.hidden_size

    @property
    def window(self) -> int | None:
        """Tokens that a query sees in layers with a window; None: no layer has one."""
        return window_of_layers(self.geometry.layers)

    @property
    def geometry(self) -> report.Geometry:
        """Sizes by which the service counts work, with all weights trained."""
        config: Any = self.config
        layers = family_of(config).layers(config)
        weights = float(sum(layer.weights(config.hidden_size) for layer in layers))
        return report.Geometry(
            layer_parameters=weights,
            trained_layer_parameters=weights,
            head_is_trained=True,
            layers=layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
        )


AnySize = ModelSize | FamilySize

QWEN3_8B = ModelSize(
    name="Qwen3-8B", num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=12_288, vocab_size=151_936, ties_embeddings=False,
)  # fmt: skip
QWEN3_30B_A3B = RoutedSize(
    name="Qwen3-30B-A3B", num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4,
    head_dim=128, intermediate_size=8 * 768, vocab_size=151_936, ties_embeddings=False,
    num_experts=128, experts_per_token=8,
)  # fmt: skip
QWEN3_1_7B = ModelSize(
    name="Qwen3-1.7B", num_layers=28, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128,
    intermediate_size=6144, vocab_size=151_936, ties_embeddings=True,
)  # fmt: skip
QWEN3_0_6B = ModelSize(
    name="Qwen3-0.6B", num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128,
    intermediate_size=3072, vocab_size=151_936, ties_embeddings=True,
)  # fmt: skip
# Scale for a CPU: it runs everything in seconds, and says nothing about speed.
TINY = ModelSize(
    name="tiny", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=48, vocab_size=67, ties_embeddings=False,
)  # fmt: skip
TINY_ROUTED = RoutedSize(
    name="tiny with experts", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=2 * 24, vocab_size=67, ties_embeddings=False, num_experts=8,
    experts_per_token=2,
)  # fmt: skip


def sizes_of(size: ModelSize) -> DecoderSizes:
    """What the planner reads of a model in bfloat16, all of it trained."""
    return uniform_sizes(**flat_sizes(size))


def flat_sizes(size: ModelSize) -> dict[str, Any]:
    """Arguments of `uniform_sizes` for `size`, as results have them."""
    is_routed = isinstance(size, RoutedSize)
    return {
        "num_layers": size.num_layers,
        "hidden_size": size.hidden_size,
        "mlp_size": size.intermediate_size,
        "num_heads": size.num_heads,
        "num_kv_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab_size,
        "element_bytes": 2,
        "head_is_trained": True,
        "num_experts": size.num_experts if is_routed else 1,
        "experts_per_token": size.experts_per_token if is_routed else 1,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one forward and backward.

    Attributes:
        tokens: Tokens through the layers.
        rows: Hidden states that reach the LM head.
        pairs: Attended (query, key) pairs of one head of one layer, causal.
        near_pairs: Those of one with a window; 0 if none has.
    """

    tokens: int
    rows: int
    pairs: int
    near_pairs: int = 0


def step_flops(size: AnySize, work: StepWork) -> float:
    """6 per token and weight, 14 per pair and head dimension; recomputation is not counted."""
    if isinstance(size, FamilySize):
        counted = report.Work(
            tokens=work.tokens, rows=work.rows, pairs=work.pairs, near_pairs=work.near_pairs
        )
        return report.training_flops(size.geometry, counted)
    layers = 6 * size.layer_parameters * work.tokens
    head = 6 * size.vocab_size * size.hidden_size * work.rows
    attention = 14 * size.head_dim * size.num_heads * size.num_layers * work.pairs
    return float(layers + head + attention)


def mfu(size: AnySize, work: StepWork, seconds: float) -> float:
    """Model FLOPs utilization, of an H200's peak whatever the device."""
    return step_flops(size, work) / seconds / PEAK_FLOPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Lengths, in tokens, of a prompt and of each of its responses."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGroup:
    """A group and how its update is cut.

    Attributes:
        group: Its rollouts.
        budget: Packed tokens at a time; a larger group is streamed. 0: it runs at once.
        is_shared: Whether rollouts share their prompt; otherwise each is a tree of its own.
    """

    group: Group
    budget: int = 0
    is_shared: bool = True

    @property
    def name(self) -> str:
        """Unique within a section."""
        shape = f"{self.group.prompt}x{len(self.group.responses)}"
        streamed = f" by {self.budget}" if self.budget else ""
        return shape + streamed + ("" if self.is_shared else " replicated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededBatch:
    """A micro-batch on the device, with the loss's gradient with respect to each of its terms.

    Attributes:
        batch: The micro-batch.
        column_L: int64; the response token of each term, for comparing ways.
        packed: The packed batch on the host.
        stages: Stages of a streamed batch; empty if it runs at once.
        weight_L: float32; the terms' weights.
    """

    batch: DeviceBatch
    column_L: Tensor
    packed: PackedBatch
    stages: tuple[Stage, ...]
    weight_L: Tensor

    @property
    def held(self) -> list[HeldTokens]:
        """Held tokens from which the service plans each forward's activations."""
        if not self.stages:
            return [HeldTokens(tokens=self.packed_tokens, above=0, waits=False, stream=None)]
        stream, parents = (
            stream_tokens(self.stages, self.packed.forest),
            {stage.parent for stage in self.stages},
        )
        resident = resident_tokens(self.stages)
        return [
            HeldTokens(tokens=stage.num_tokens, above=above, waits=index in parents, stream=stream)
            for index, (stage, above) in enumerate(zip(self.stages, resident, strict=True))
        ]

    @property
    def packed_tokens(self) -> int:
        return self.packed.forest.num_tokens


def make_batch(groups: tuple[Group, ...], vocab_size: int, seed: int) -> RolloutBatch:
    """Uniform random tokens, normal rewards, sampler log-probs near those of random weights."""
    rng = np.random.default_rng(seed)
    lengths = np.array([length for group in groups for length in group.responses], np.int64)
    prompts = np.array([group.prompt for group in groups], np.int64)
    num_tokens, count = int(lengths.sum()), len(lengths)
    return RolloutBatch(
        group_ids=tuple(f"group-{i}" for i in range(len(groups))),
        group_offsets=_offsets(np.array([len(group.responses) for group in groups])),
        prompt_tokens=rng.integers(0, vocab_size, int(prompts.sum()), np.int32),
        prompt_offsets=_offsets(prompts),
        response_tokens=rng.integers(0, vocab_size, num_tokens, np.int32),
        response_offsets=_offsets(lengths),
        loss_mask=np.ones(num_tokens, np.bool_),
        sampler_logprobs=rng.normal(-np.log(vocab_size), 0.1, num_tokens).astype(np.float32),
        old_logprobs=None,
        reference_logprobs=None,
        rewards=rng.normal(size=count),
        advantages=None,
        token_weights=None,
        temperature=np.ones(count, np.float32),
        sampler_is_raw=np.zeros(count, np.bool_),
        truncated=np.zeros(count, np.bool_),
        policy_version=np.zeros(count, np.int64),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
    )


def packed_batch(batch: RolloutBatch) -> PackedBatch:
    """All rollouts in one micro-batch, each shared prefix once."""
    forest = build_forest(batch, sort_sequences(batch), np.arange(batch.num_sequences))
    return pack(batch, forest, batch.loss_mask)


def replicated_batches(batch: RolloutBatch, sequences_per_batch: int) -> list[PackedBatch]:
    """Replicated batches: the rollouts in request order, unshared, `sequences_per_batch` per
    micro-batch."""
    return [
        pack(
            batch,
            _separate_trees(batch, np.arange(i, min(i + sequences_per_batch, batch.num_sequences))),
            batch.loss_mask,
        )
        for i in range(0, batch.num_sequences, sequences_per_batch)
    ]


def upload(
    batch: RolloutBatch,
    packed: PackedBatch,
    device: torch.device,
    stages: tuple[Stage, ...] = (),
) -> SeededBatch:
    """Uploads the batch, with the gradient of the GRPO loss at ratio 1 per log-prob.

    That is -A / (tokens of the response * sequences), where A are the random rewards, different for
    every response.
    """
    assert batch.rewards is not None
    lengths_S = np.diff(batch.response_offsets)
    weight_S = -batch.rewards / np.maximum(lengths_S, 1) / batch.num_sequences
    weight_L = np.repeat(weight_S, lengths_S)[packed.term_token]
    return SeededBatch(
        batch=to_device(packed, device),
        column_L=torch.from_numpy(packed.term_token).to(device),
        packed=packed,
        stages=stages,
        weight_L=torch.from_numpy(weight_L.astype(np.float32)).to(device),
    )


def waves(packed: PackedBatch, num_subtrees: int) -> tuple[Stage, ...]:
    """Stages of one tree: its root, which stays, then `num_subtrees` subtrees at a time."""
    forest = packed.forest
    starts = forest.node_start[forest.node_parent == 0].tolist()[::num_subtrees]
    bounds = [*starts, forest.num_tokens]
    prefix = Stage(start=0, stop=int(forest.node_stop[0]), parent=-1)
    parts = [Stage(start=start, stop=stop, parent=0) for start, stop in pairwise(bounds)]
    return (prefix, *parts)


def packed_work(packed: PackedBatch, window: int | None = None) -> StepWork:
    """The work of one packed micro-batch, by a model some of whose layers have this window."""
    forest = packed.forest
    end = forest.node_depth + forest.node_stop - forest.node_start

    def pairs(of: int | None) -> int:
        return int((path_pairs(end, of) - path_pairs(forest.node_depth, of)).sum())

    return StepWork(
        tokens=forest.num_tokens,
        rows=len(packed.row_index),
        pairs=pairs(None),
        near_pairs=pairs(window) if window else 0,
    )


def replicated_work(batch: RolloutBatch, window: int | None = None) -> StepWork:
    """Work of all rollouts, each run separately; `window` as of `packed_work`."""
    length = sequence_lengths(batch)
    return StepWork(
        tokens=int(length.sum()),
        rows=len(batch.loss_mask),
        pairs=int(path_pairs(length).sum()),
        near_pairs=int(path_pairs(length, window).sum()) if window else 0,
    )


def _separate_trees(batch: RolloutBatch, sequences: NDArray[np.int64]) -> Forest:
    """One root per sequence, even if sequences share a prefix."""
    length = sequence_lengths(batch)[sequences]
    bounds = _offsets(length)
    return Forest(
        tokens=np.concatenate([batch.sequence_tokens(int(s)) for s in sequences]),
        node_parent=np.full(len(sequences), -1, np.int32),
        node_start=bounds[:-1],
        node_stop=bounds[1:],
        node_end=bounds[1:],
        node_depth=np.zeros(len(sequences), np.int64),
        sequences=sequences,
        sequence_node=np.arange(len(sequences), dtype=np.int32),
        sequence_length=length,
    )


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
