"""What each KL term pulls a policy towards: expectations over a tiny vocabulary, enumerated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.planner.planning import cpu_planner
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.prepare import prepare
from ratoon_proto.types import (
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
    StepWarning,
)
from tests import builders
from tests.train.loss_cases import make_loss, run_loss, summed

_RNG = np.random.default_rng(7)
# Log-probs of policy, reference and the policy that the tokens were sampled from.
_LOGP, _LOGQ, _LOGB = (
    torch.log_softmax(torch.tensor(_RNG.normal(size=5)), dim=0) for _ in range(3)
)
_P, _Q = _LOGP.exp(), _LOGQ.exp()
_REVERSE_KL = (_P * (_LOGP - _LOGQ)).sum()
# With respect to the logits: of KL(p || q), which is to be small, and of KL(q || p).
_REVERSE = _P * (_LOGP - _LOGQ - _REVERSE_KL)
_FORWARD = _P - _Q


def _expected(kind: KlKind, sampled: Tensor, *, weighted: bool = False) -> tuple[float, Tensor]:
    """Expected value and gradient of a KL term over tokens of `sampled` (log-probs); the gradient
    is with respect to the policy's logits, d log p(x) = e_x - p."""
    config = KlConfig(
        kind=kind, coefficient=1.0, reference=ReferenceKind.GIVEN, importance_weighted=weighted
    )
    output = run_loss(
        make_loss(LossKind.PPO_CLIP, kl=config),
        _LOGP,
        weight_L=sampled.exp(),
        advantage_L=torch.zeros_like(_LOGP),
        old_L=sampled,
        reference_L=_LOGQ,
    )
    gradient = output.grad_logprob_L - output.grad_logprob_L.sum() * _P
    return summed(output).kl, gradient


def test_k1_has_no_expected_gradient_on_policy() -> None:
    """Its mean is the KL, its gradient is that of E[log p], which is zero: noise alone."""
    value, gradient = _expected(KlKind.K1, _LOGP)
    assert value == pytest.approx(_REVERSE_KL.item(), rel=1e-12)
    assert gradient.abs().max() < 1e-15
    assert _REVERSE.abs().max() > 0.01


def test_k3_has_the_gradient_of_the_other_kl() -> None:
    """The gradient is that of KL(q || p), which is near the other's only where the two are near."""
    value, gradient = _expected(KlKind.K3, _LOGP)
    assert value == pytest.approx(_REVERSE_KL.item(), rel=1e-12)
    torch.testing.assert_close(gradient, _FORWARD, rtol=1e-12, atol=1e-14)
    assert (_FORWARD - _REVERSE).abs().max() > 0.01


@pytest.mark.parametrize("kind", [KlKind.K2, KlKind.K1_PLUS, KlKind.K3_PLUS])
def test_k2_and_the_straight_through_forms_have_the_right_gradient(kind: KlKind) -> None:
    """k1_plus and k3_plus: an unbiased value, with the gradient of k2."""
    value, gradient = _expected(kind, _LOGP)
    torch.testing.assert_close(gradient, _REVERSE, rtol=1e-12, atol=1e-14)
    assert (value == pytest.approx(_REVERSE_KL.item(), rel=1e-12)) == (kind is not KlKind.K2)


@pytest.mark.parametrize("kind", [KlKind.K1, KlKind.K3])
def test_importance_weighted_estimators_are_right_off_policy(kind: KlKind) -> None:
    """Value and gradient are those of KL(p || q) whoever sampled; without the weight, not."""
    value, gradient = _expected(kind, _LOGB, weighted=True)
    assert value == pytest.approx(_REVERSE_KL.item(), rel=1e-12)
    torch.testing.assert_close(gradient, _REVERSE, rtol=1e-12, atol=1e-14)
    value, gradient = _expected(kind, _LOGB)
    assert abs(value - _REVERSE_KL.item()) > 0.01
    assert (gradient - _REVERSE).abs().max() > 0.01


def test_weighted_term_that_is_clamped_has_no_gradient_at_all() -> None:
    """Through the weight alone, a k3 held at 10 would push a rare token further down."""
    far = KlConfig(
        kind=KlKind.K3, coefficient=1.0, reference=ReferenceKind.GIVEN, importance_weighted=True
    )
    output = run_loss(
        make_loss(LossKind.PPO_CLIP, kl=far),
        [-9.0, -1.0, -30.0],
        advantage_L=[0.0] * 3,
        old_L=[-9.0, -1.5, -1.0],
        reference_L=[-1.0, -1.2, -30.5],
    )
    first, second, third = output.grad_logprob_L.tolist()
    assert (first, third) == (0.0, 0.0)
    assert second == pytest.approx(np.exp(0.5) * 0.2)


def _resolve(kind: LossKind, kl: KlConfig, **changes: Any) -> tuple[StepWarning, ...]:
    """Warnings of a loss with this KL term."""
    rollouts = [
        builders.rollout(
            [1, 2],
            sampler_logprobs=np.array([-1.0, -2.0], np.float32),
            reference_logprobs=np.array([-1.0, -1.0], np.float32),
            reward=reward,
        )
        for reward in (0.0, 1.0)
    ]
    batch = validate_groups([builders.group([5], rollouts)], builders.limits())
    loss = resolve_loss(LossConfig(kind=kind, kl=kl, **changes), batch, has_frozen_reference=False)
    return prepare(batch, loss, version=0, plan=cpu_planner(100)).warnings


def test_k1_as_a_loss_warns() -> None:
    config = KlConfig(kind=KlKind.K1, coefficient=0.1, reference=ReferenceKind.GIVEN)
    (warning,) = _resolve(LossKind.GRPO, config)
    assert "k1" in warning.message
    assert "expected gradient" in warning.message
    for other in (KlKind.K2, KlKind.K3, KlKind.K1_PLUS, KlKind.K3_PLUS):
        other_config = KlConfig(kind=other, coefficient=0.1, reference=ReferenceKind.GIVEN)
        assert _resolve(LossKind.GRPO, other_config) == ()
    weighted = KlConfig(
        kind=KlKind.K1,
        coefficient=0.1,
        reference=ReferenceKind.GIVEN,
        importance_weighted=True,
    )
    assert _resolve(LossKind.GRPO, weighted) == ()


def test_weight_with_on_policy_old_log_probs_has_a_gradient() -> None:
    old = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
    config = KlConfig(
        kind=KlKind.K1, coefficient=0.1, reference=ReferenceKind.GIVEN, importance_weighted=True
    )
    assert _resolve(LossKind.GRPO, config, old_logprobs=old) == ()
