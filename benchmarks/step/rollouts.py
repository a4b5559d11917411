"""Groups of random rollouts, packed or each rollout alone, ready to be run.

Enters prompt and response lengths and a seed, leaves `PackedBatch`es whose terms carry the same
weights in either form. Invariant: the gradients of a packed batch and those of the same rollouts
replicated, however they are cut, are sums of the same terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.step.sizes import StepWork
from ratoon.model.stage_plan import HeldTokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.pack import pack
from ratoon.rollout.packed import Forest, PackedBatch, Stage
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.ragged import sequence_lengths
from ratoon.rollout.waves import resident_tokens
from ratoon.train.device_batch import DeviceBatch, to_device
from ratoon.train.streamed.passes import stream_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tokens of a prompt and of each of its responses."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGroup:
    """A group and how its update is cut.

    Attributes:
        group: Its rollouts.
        budget: Packed tokens at a time, in which a larger group is streamed; 0: it runs at once.
        is_shared: False: each rollout is a tree of its own.
    """

    group: Group
    budget: int = 0
    is_shared: bool = True

    @property
    def name(self) -> str:
        """Tells the shapes of one section apart."""
        shape = f"{self.group.prompt}x{len(self.group.responses)}"
        streamed = f" by {self.budget}" if self.budget else ""
        return shape + streamed + ("" if self.is_shared else " replicated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededBatch:
    """A micro-batch on the device and the gradient of the loss by each of its terms.

    Attributes:
        batch: The micro-batch.
        column_L: int64; response token of each term, to compare ways by.
        packed: The same on the host.
        stages: Of a batch that is streamed; empty: it is run at once.
        weight_L: float32; the terms' weights.
    """

    batch: DeviceBatch
    column_L: Tensor
    packed: PackedBatch
    stages: tuple[Stage, ...]
    weight_L: Tensor

    @property
    def held(self) -> list[HeldTokens]:
        """By which the service plans what the layers of each of its forwards keep."""
        if not self.stages:
            return [HeldTokens(tokens=self.packed_tokens, above=0, waits=False, stream=None)]
        stream, parents = stream_tokens(self.stages), {stage.parent for stage in self.stages}
        resident = resident_tokens(self.stages)
        return [
            HeldTokens(tokens=stage.num_tokens, above=above, waits=index in parents, stream=stream)
            for index, (stage, above) in enumerate(zip(self.stages, resident, strict=True))
        ]

    @property
    def packed_tokens(self) -> int:
        return self.packed.forest.num_tokens


def make_batch(groups: tuple[Group, ...], vocab_size: int, seed: int) -> RolloutBatch:
    """Uniformly random tokens, normal rewards, sampler log-probs near those of random weights."""
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
    """All rollouts in one micro-batch, every shared prefix once."""
    forest = build_forest(batch, sort_sequences(batch), np.arange(batch.num_sequences))
    return pack(batch, forest, batch.loss_mask)


def replicated_batches(batch: RolloutBatch, sequences_per_batch: int) -> list[PackedBatch]:
    """The same rollouts in request order, `sequences_per_batch` in a micro-batch, none shared."""
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
    """Onto the device, with the gradient of the GRPO loss at ratio 1 by each log-prob.

    That is -A / (tokens of the response * sequences), A being the rewards, which are random and
    different in every response.
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
    """Stages of one tree: its root, which stays, and the subtrees below it, so many at a time."""
    forest = packed.forest
    starts = forest.node_start[forest.node_parent == 0].tolist()[::num_subtrees]
    bounds = [*starts, forest.num_tokens]
    prefix = Stage(start=0, stop=int(forest.node_stop[0]), parent=-1)
    parts = [Stage(start=start, stop=stop, parent=0) for start, stop in pairwise(bounds)]
    return (prefix, *parts)


def packed_work(packed: PackedBatch) -> StepWork:
    """What one packed micro-batch runs."""
    forest = packed.forest
    own = forest.node_stop - forest.node_start
    pairs = own * forest.node_depth + own * (own + 1) // 2
    return StepWork(tokens=forest.num_tokens, rows=len(packed.row_index), pairs=int(pairs.sum()))


def replicated_work(batch: RolloutBatch) -> StepWork:
    """What all rollouts run, each alone: tokens and causal pairs in place of the packed ones."""
    length = sequence_lengths(batch)
    return StepWork(
        tokens=int(length.sum()),
        rows=len(batch.loss_mask),
        pairs=int((length * (length + 1) // 2).sum()),
    )


def _separate_trees(batch: RolloutBatch, sequences: NDArray[np.int64]) -> Forest:
    """One root for each sequence, though sequences may share a prefix."""
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
