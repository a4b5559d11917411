"""Gradients of groups on a GPU, streamed or at once.

Enters a policy and rollouts, leaves gradients by parameter. Invariant: the weight of a term is the
same, however the group is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ratoon.model.policy_model import PolicyModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import PackedBatch, Stage
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from ratoon.train.clock import DeviceClock
from ratoon.train.loss.compute import LossGradients
from ratoon.train.loss.sums import pack_sums
from ratoon.train.micro_batches import put, run_model, to_device
from ratoon.train.staged_batch import StagedBatch
from tests.builders import group, limits, rollout
from tests.model.gpu_policies import DEVICE, VOCAB_SIZE


def make_batch(prompt: int, num_responses: int, response: int) -> RolloutBatch:
    """Each half of the responses begins with a turn of its own, and no two go on alike."""
    rng = np.random.default_rng(0)
    turns = [rng.integers(0, VOCAB_SIZE, 150) for _ in range(2)]
    raws = []
    for n in range(num_responses):
        tokens = [turns[2 * n // num_responses], [n], rng.integers(0, VOCAB_SIZE, response - n % 7)]
        raws.append(rollout(np.concatenate(tokens).astype(np.int32)))
    head = rng.integers(0, VOCAB_SIZE, prompt)
    return validate_groups(
        [group(head, raws)], limits(vocab_size=VOCAB_SIZE, max_sequence_tokens=1 << 17)
    )


def pack_batch(batch: RolloutBatch) -> PackedBatch:
    forest = build_forest(batch, sort_sequences(batch), np.arange(batch.num_sequences))
    return pack(batch, forest, batch.loss_mask)


def cut_stages(packed: PackedBatch, wave: int) -> tuple[Stage, ...]:
    """The prompt; each turn below it; below a turn its responses, `wave` at a time."""
    forest = packed.forest
    starts, stops = forest.node_start.tolist(), forest.node_stop.tolist()
    ends, parents = forest.node_end.tolist(), forest.node_parent.tolist()
    stages = [Stage(start=0, stop=stops[0], parent=-1)]
    for turn in (node for node, parent in enumerate(parents) if parent == 0):
        index = len(stages)
        stages.append(Stage(start=starts[turn], stop=stops[turn], parent=0))
        below = [starts[node] for node, parent in enumerate(parents) if parent == turn][::wave]
        bounds = pairwise([*below, ends[turn]])
        stages += [Stage(start=start, stop=stop, parent=index) for start, stop in bounds]
    return tuple(stages)


@dataclass(frozen=True)
class _Seeds:
    """A loss that is nothing but its gradients."""

    weight_L: Tensor

    def of(self, terms: np.ndarray, *_: object) -> LossGradients:
        return LossGradients(grad_logprob_L=self.weight_L[put(terms, DEVICE)], grad_entropy_L=None)

    def sums(self, *_: object) -> Tensor:
        return pack_sums({}, None, torch.zeros(0))


def stream_gradients(
    policy: PolicyModel, packed: PackedBatch, stages: tuple[Stage, ...], *, is_of_rows: bool = True
) -> dict[str, Tensor]:
    """Gradients for a random weight of each term; at once, and in two phases, if there are no
    stages."""
    generator = torch.Generator().manual_seed(1)
    weight_L = torch.randn(len(packed.term_target), generator=generator).to(DEVICE)
    policy.module.zero_grad(set_to_none=True)
    batch = to_device(packed, DEVICE)
    if stages:
        staged = StagedBatch(policy, packed, batch, stages, lambda: None)
        staged.forward_backward(_Seeds(weight_L), DeviceClock(DEVICE), is_of_rows=is_of_rows)
    else:
        logprob_M = run_model(policy, batch).logprob_M
        seed_M = torch.zeros_like(logprob_M).index_add_(0, batch.term_target_L, weight_L)
        logprob_M.backward(seed_M)
    found = {
        name: parameter.grad
        for name, parameter in policy.named_trainable().items()
        if parameter.grad is not None
    }
    policy.module.zero_grad(set_to_none=True)
    return found
