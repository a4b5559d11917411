"""gspo against log-probs of a sampler whose numerics differ from the trainer's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.compute import LossOutput, compute_loss
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.terms import TermColumns
from ratoon.train.loss.warnings import sum_warnings
from ratoon_proto.types import LossConfig, LossKind, OldLogprobs, OldLogprobsKind
from tests import builders
from tests.train.loss_cases import make_loss, summed

_PATHS, _TOKENS = 256, 1024


def _mismatch() -> LossOutput:
    """Gradients of paths whose tokens a sampler drew that differs by sd 0.05 nats per token.

    Drawn by the sampler, a token's log p - log p_sampler has mean -sd^2 / 2: it is KL's. Advantages
    are -1 and 1 in turn.
    """
    rng = np.random.default_rng(0)
    gap_L = torch.tensor(rng.normal(-(0.05**2) / 2, 0.05, _PATHS * _TOKENS))
    logprob_L = torch.full_like(gap_L, -1.0)
    sequence_L = torch.arange(_PATHS).repeat_interleave(_TOKENS)
    columns = TermColumns(
        sequence_L=sequence_L,
        num_sequences=_PATHS,
        counted_C=torch.arange(len(gap_L)),
        weight_L=torch.full_like(gap_L, 1 / _TOKENS),
        advantage_L=(sequence_L % 2) * 2.0 - 1.0,
        old_L=logprob_L - gap_L,
        sampler_L=logprob_L - gap_L,
        sampler_usable_L=torch.ones_like(gap_L, dtype=torch.bool),
        reference_L=None,
    )
    return compute_loss(make_loss(LossKind.GSPO), columns, logprob_L, torch.zeros_like(gap_L))


def test_clip_of_gspo_is_narrower_than_a_samplers_numerics() -> None:
    """Most rollouts with a negative advantage are pushed by nothing; the report says so."""
    output = _mismatch()
    gradient_ST = output.grad_logprob_L.reshape(_PATHS, _TOKENS)
    is_still_S = (gradient_ST == 0).all(dim=1)
    negative, positive = is_still_S[0::2].double().mean(), is_still_S[1::2].double().mean()
    sums = summed(output)
    assert negative == 0.75
    assert sums.negative_clipped / sums.negative_terms == pytest.approx(negative.item())
    assert sums.positive_clipped / sums.positive_terms == pytest.approx(positive.item())
    old = OldLogprobs(kind=OldLogprobsKind.SAMPLER)
    (warning,) = sum_warnings(make_loss(LossKind.GSPO, old_logprobs=old), sums)
    share = math.floor(100 * negative.item() + 0.5)
    assert f"{share}% of the terms with a negative advantage without a gradient" in warning
    assert "from_forward" in warning


def test_gspo_does_not_take_the_samplers_log_probs_by_default() -> None:
    """Every other ratio does: their clips are a thousand times as wide."""
    rollout = builders.rollout(
        [1, 2], sampler_logprobs=np.array([-1.0, -2.0], np.float32), reward=1.0
    )
    groups = [builders.group([5], [rollout, rollout])]
    batch = validate_groups(groups, builders.limits())
    with pytest.raises(RatoonError) as caught:
        resolve_loss(LossConfig(kind=LossKind.GSPO), batch, has_frozen_reference=False)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "loss.old_logprobs"
    assert "from_forward" in caught.value.message
    assert "correction" in caught.value.message
    for kind in (OldLogprobsKind.SAMPLER, OldLogprobsKind.ON_POLICY):
        request = LossConfig(kind=LossKind.GSPO, old_logprobs=OldLogprobs(kind=kind))
        loss = resolve_loss(request, batch, has_frozen_reference=False)
        assert loss.old_logprobs == OldLogprobs(kind=kind)
