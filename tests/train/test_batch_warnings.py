"""Warnings about a batch that is well formed, yet is not trained as its sender may think."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.prepare import prepare
from ratoon.train.report.batch_sums import of_prepared
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
