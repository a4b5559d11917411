"""A loss that the client differentiates: its gradient through the service is autograd's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ratoon.api.convert.groups import raw_groups
from ratoon.api.submissions import loss_request
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.prepare import prepare
from ratoon_client import Group, by_autograd, group, rollout
from ratoon_client.custom_loss import WEIGHTED, weighted
from ratoon_client.wire import group_message, loss_message
from tests.builders import limits
from tests.equivalence import assert_close, paths_of
from tests.oracle import hf
from tests.train.equivalence_runs import VOCAB_SIZE, Pair


def preference_loss(logprobs: list[Tensor]) -> Tensor:
    """DPO's form over pairs of rollouts (arXiv 2305.18290, eq. 7, without reference), and a term
    that couples all of them: neither is a sum over tokens."""
    sums = torch.stack([values.sum() for values in logprobs])
    margin = logsigmoid(0.3 * (sums[0::2] - sums[1::2]))
    return -margin.sum() + 0.01 * sums.std() ** 2


def sampled_groups() -> list[Group]:
    """Rollouts that share their beginnings, some with tokens that are not trained."""
    rng = np.random.default_rng(5)
    stem = rng.integers(0, VOCAB_SIZE, 6)

    def sampled(shared: int, length: int):
        tokens = np.concatenate([stem[:shared], rng.integers(0, VOCAB_SIZE, length)])
        mask = rng.random(len(tokens)) < 0.8
        return rollout(response=tokens, loss_mask=mask, temperature=0.7, reward=1.0)

    return [
        group("a", [1, 2, 3], [sampled(6, 3), sampled(6, 5), sampled(2, 1), sampled(4, 4)]),
        group("b", [1, 2, 9], [sampled(5, 2), sampled(0, 3)]),
    ]


def as_batch(groups: list[Group]) -> RolloutBatch:
    """The groups as the service reads them from the wire."""
    raw = raw_groups([group_message(each) for each in groups], max_tokens=1000)
    return validate_groups(raw, limits(vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("micro_batch_tokens", [1, 1000])
def test_the_gradient_is_that_of_autograd_through_the_model(
    pair: Pair, micro_batch_tokens: int
) -> None:
    trainer, groups = pair.trainer, sampled_groups()
    batch = as_batch(groups)
    forward = trainer.forward(
        trainer.prepare_forward(batch), with_entropy=False, use_reference=False
    )
    logprobs = np.split(forward.logprobs.astype(np.float32), batch.response_offsets[1:-1])
    loss, sent = weighted(groups, logprobs, by_autograd(preference_loss, torch.from_numpy))
    weighted_batch = as_batch(sent)
    complete = resolve_loss(
        loss_request(loss_message(WEIGHTED)), weighted_batch, has_frozen_reference=False
    )
    planner = cpu_planner(micro_batch_tokens)
    prepared = prepare(weighted_batch, complete, version=trainer.version, plan=planner)
    report = trainer.forward_backward(prepared)
    assert report.trained_tokens == batch.loss_mask.sum()

    paths = paths_of(batch)
    own = [
        torch.where(torch.as_tensor(path.mask), hf.logprobs(pair.oracle.model, path)[0], 0.0)
        for path in paths
    ]
    expected = preference_loss(own)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    # Log-probs and weights cross the wire as float32.
    assert_close(pair.gradient_errors(), 1e-5)
    pair.discard()
