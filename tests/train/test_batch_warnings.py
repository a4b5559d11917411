"""Warnings about a batch that is well formed, yet is not trained as its sender may think."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.gradient_window import of_prepared
from ratoon.train.loss.compute import LossOutput
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.warnings import sum_warnings
from ratoon.train.planning import cpu_planner
from ratoon.train.prepare import prepare
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    RolloutCorrection,
    StalenessAction,
    StalenessConfig,
)
from tests import builders
from tests.train.loss_cases import make_loss, run_loss, summed

_GIVEN = OldLogprobs(kind=OldLogprobsKind.GIVEN)
_LATEST = 2**63 - 1


def _batch(*versions: tuple[int | None, ...], **fields: Any) -> RolloutBatch:
    """One group for each tuple, with a rollout of two tokens for each version."""
    column = np.full(2, -1.0, np.float32)
    groups = [
        builders.group(
            [9],
            [
                builders.rollout(
                    [1, n],
                    **({"reward": float(n)} | fields),
                    policy_version=version,
                    sampler_logprobs=column,
                    old_logprobs=column,
                )
                for n, version in enumerate(of_group)
            ],
            f"group-{g}",
        )
        for g, of_group in enumerate(versions)
    ]
    return validate_groups(groups, builders.limits())


def _warnings(batch: RolloutBatch, version: int = 3, **changes: Any) -> tuple[str, ...]:
    request = LossConfig(**({"kind": LossKind.GRPO, "old_logprobs": _GIVEN} | changes))
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    return prepare(batch, loss, version=version, plan=cpu_planner(64)).warnings


@pytest.mark.parametrize(
    "kind",
    [
        AdvantageKind.GROUP_MEAN_STD,
        AdvantageKind.GROUP_MEAN,
        AdvantageKind.GROUP_MEAN_BATCH_STD,
        AdvantageKind.LEAVE_ONE_OUT,
    ],
)
def test_groups_of_one_under_a_group_baseline_are_counted(kind: AdvantageKind) -> None:
    """A rollout sent alone had its reward as its advantage, and nothing said so."""
    batch = _batch((None,), (None, None), (None,))
    (warning,) = _warnings(batch, advantage=kind)
    assert warning.startswith("2 of 3 groups have a single rollout: ")
    assert str(kind) in warning
    assert _warnings(batch, advantage=AdvantageKind.NONE) == ()
    assert _warnings(_batch((None, None)), advantage=kind) == ()


def test_ready_advantages_of_a_single_rollout_are_as_they_are() -> None:
    batch = _batch((None,), reward=None, advantages=np.ones(2, np.float32))
    assert _warnings(batch) == ()


def test_on_policy_of_stale_rollouts_is_counted_with_its_versions() -> None:
    on_policy: dict[str, Any] = {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.ON_POLICY)}
    batch = _batch((3, 1), (2, 3, None))
    found = _warnings(batch, **on_policy)
    (warning,) = (text for text in found if "old_logprobs were sent" not in text)
    assert warning.startswith("2 of 5 rollouts were sampled by versions 1 to 2, before version 3")
    assert "on_policy" in warning
    assert not [text for text in _warnings(batch, 1, **on_policy) if "before version" in text]
    # Whoever weighs or masks the mismatch knows of it.
    correction = RolloutCorrection(
        mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.TOKEN, low=0.0, high=2.0
    )
    mask = CorrectionMask(level=CorrectionLevel.TOKEN, low=0.5, high=2.0)
    fields: list[dict[str, Any]] = [{"correction": correction}, {"correction_mask": mask}]
    for known in fields:
        assert not [
            text for text in _warnings(batch, **on_policy, **known) if "before version" in text
        ]
    # Dropped rollouts are not trained on.
    staleness = StalenessConfig(max_versions=0, action=StalenessAction.DROP)
    dropped = _warnings(_batch((3, 1), (3, 3)), **on_policy, staleness=staleness)
    assert not [text for text in dropped if "before version" in text]


def test_versions_of_the_future_are_counted() -> None:
    """They made a mean staleness of less than none, and two of them one that overflowed."""
    batch = _batch((3, 9), (4, None))
    (warning,) = _warnings(batch)
    assert warning.startswith("2 of 4 rollouts name versions 4 to 9, and the policy is at 3")
    assert _warnings(batch, 9) == ()


def test_a_span_of_the_future_is_counted() -> None:
    batch = _batch((None, None), version_spans=((0, 3), (1, 5)))
    (warning,) = _warnings(batch)
    assert warning.startswith("2 of 2 rollouts name versions 5 to 5, and the policy is at 3")


def test_staleness_is_of_versions_that_the_policy_has_had() -> None:
    batch = _batch((1, _LATEST), (_LATEST, _LATEST))
    request = LossConfig(kind=LossKind.GRPO, old_logprobs=_GIVEN)
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    sums = of_prepared(prepare(batch, loss, version=3, plan=cpu_planner(64)))
    assert (sums.dated_rollouts, sums.staleness, sums.staleness_max) == (1, 2, 2)
    assert (sums.dated_tokens, sums.token_staleness) == (2, 4)


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
    return run_loss(
        make_loss(LossKind.GSPO),
        logprob_L,
        sequence_L=sequence_L,
        num_sequences=_PATHS,
        weight_L=torch.full_like(gap_L, 1 / _TOKENS),
        advantage_L=(sequence_L % 2) * 2.0 - 1.0,
        old_L=logprob_L - gap_L,
        sampler_L=logprob_L - gap_L,
    )


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
