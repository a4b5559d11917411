"""Every loss on three tokens whose values and gradients are worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ratoon.train.loss.compute import LossOutput
from ratoon.train.loss.kinds import CispoObjective, ClipObjective, IpoObjective, SapoObjective
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    KlConfig,
    KlKind,
    LossKind,
    ReferenceKind,
    RolloutCorrection,
)
from tests.train.loss_cases import make_loss, run_loss, summed

_LOGPROBS = [-1.0, -2.0, -3.0]


def _three(
    kind: LossKind, advantages: list[float], ratios: list[float], **changes: Any
) -> LossOutput:
    """One path of log-probs -1, -2, -3 with the given ratios to the old policy."""
    old = [logprob - math.log(ratio) for logprob, ratio in zip(_LOGPROBS, ratios, strict=True)]
    return run_loss(make_loss(kind, **changes), _LOGPROBS, advantage_L=advantages, old_L=old)


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.PPO_CLIP, LossKind.DR_GRPO])
def test_clip_holds_three_tokens_by_hand(kind: LossKind) -> None:
    """r 1.5, 1, 0.5. A = 2: held at 1.2, free, free. A = -2: free, free, held at 0.8."""
    output = _three(kind, [2.0, 2.0, 2.0], [1.5, 1.0, 0.5])
    assert summed(output).loss == pytest.approx(-(2.4 + 2.0 + 1.0))
    assert output.grad_logprob_L.tolist() == pytest.approx([0.0, -2.0, -1.0])
    assert (summed(output).clipped_low, summed(output).clipped_high) == (0, 1)
    output = _three(kind, [-2.0, -2.0, -2.0], [1.5, 1.0, 0.5])
    assert summed(output).loss == pytest.approx(3.0 + 2.0 + 1.6)
    assert output.grad_logprob_L.tolist() == pytest.approx([3.0, 2.0, 0.0])
    assert (summed(output).clipped_low, summed(output).clipped_high) == (1, 0)
    assert summed(output).ratio_max == pytest.approx(1.5)


def test_clip_higher_of_dapo_by_hand() -> None:
    """A = 1: 1.25 is free under 1.28, 1.5 is held there, 0.9 is free."""
    output = _three(LossKind.DAPO, [1.0, 1.0, 1.0], [1.25, 1.5, 0.9])
    assert summed(output).loss == pytest.approx(-(1.25 + 1.28 + 0.9))
    assert output.grad_logprob_L.tolist() == pytest.approx([-1.25, 0.0, -0.9])


def test_dual_clip_bounds_negative_advantages_by_hand() -> None:
    """c = 3: r = 4 is held at 3 for A = -1 and at 1.2 for A = 1; r = 2 is free for A = -1."""
    objective = ClipObjective(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    output = _three(LossKind.PPO_CLIP, [-1.0, 1.0, -1.0], [4.0, 4.0, 2.0], objective=objective)
    assert summed(output).loss == pytest.approx(3.0 - 1.2 + 2.0)
    assert output.grad_logprob_L.tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert summed(output).clipped_high == 2


def test_gspo_holds_the_whole_sequence_by_hand() -> None:
    """s is the geometric mean of the ratios: 8, 1, 1/8 give 1, so that each token's term is -A."""
    output = _three(LossKind.GSPO, [1.0, 2.0, 3.0], [8.0, 1.0, 0.125])
    assert summed(output).loss == pytest.approx(-6.0)
    assert output.grad_logprob_L.tolist() == pytest.approx([-1.0, -2.0, -3.0])
    # s = 2: held at 1.0004 where A > 0, free where A < 0.
    output = _three(LossKind.GSPO, [1.0, -1.0, 1.0], [8.0, 1.0, 1.0])
    assert summed(output).loss == pytest.approx(-1.0004 + 2.0 - 1.0004)
    assert output.grad_logprob_L.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert summed(output).ratio_max == pytest.approx(2.0)


def test_gmpo_holds_tokens_within_the_mean_by_hand() -> None:
    """Log-ratios 0.9, 0, -0.6 under a clip of 0.4. A = 1: 0.4, 0, -0.6, and s = exp(-0.2 / 3); the
    first has no gradient. A = -1: 0.9, 0, -0.4, and s = exp(0.5 / 3); the last has none."""
    ratios = [math.exp(0.9), 1.0, math.exp(-0.6)]
    output = _three(LossKind.GMPO, [1.0, 1.0, 1.0], ratios)
    s = math.exp(-0.2 / 3)
    assert summed(output).loss == pytest.approx(-3 * s)
    assert output.grad_logprob_L.tolist() == pytest.approx([0.0, -s, -s])
    assert (summed(output).clipped_low, summed(output).clipped_high) == (0, 1)
    output = _three(LossKind.GMPO, [-1.0, -1.0, -1.0], ratios)
    s = math.exp(0.5 / 3)
    assert summed(output).loss == pytest.approx(3 * s)
    assert output.grad_logprob_L.tolist() == pytest.approx([s, s, 0.0])
    assert (summed(output).clipped_low, summed(output).clipped_high) == (1, 0)


def test_cispo_keeps_every_gradient_by_hand() -> None:
    """-sg(min(r, 5)) A log p: weights 5, 1, 0.5 on log-probs -1, -2, -3."""
    objective = CispoObjective(ratio_low=0.0, ratio_high=5.0)
    output = _three(LossKind.CISPO, [1.0, -1.0, 2.0], [8.0, 1.0, 0.5], objective=objective)
    assert summed(output).loss == pytest.approx(5.0 - 2.0 + 3.0)
    assert output.grad_logprob_L.tolist() == pytest.approx([-5.0, 1.0, -1.0])
    assert (summed(output).clipped_low, summed(output).clipped_high) == (0, 1)


def test_sapo_gates_three_tokens_by_hand() -> None:
    """r = 1: value 2/tau A, gradient A. r = 2, tau = 1: sigma(1) = .731059, so -2.924234 A, and the
    gradient is 4 sigma(1) (1 - sigma(1)) r = 1.572896 A; for A < 0, tau = 2: sigma(2) = .880797."""
    objective = SapoObjective(tau_positive=1.0, tau_negative=2.0)
    output = _three(LossKind.SAPO, [1.0, 1.0, -1.0], [1.0, 2.0, 2.0], objective=objective)
    assert summed(output).loss == pytest.approx(-2.0 - 2.924234 + 2 * 0.880797, rel=1e-6)
    assert output.grad_logprob_L.tolist() == pytest.approx([-1.0, -1.572896, 0.839949], rel=1e-6)
    # Far away nothing is left: no clip, and no overflow either.
    output = _three(LossKind.SAPO, [1.0, -1.0, 1.0], [1e8, 1e8, 1e-8], objective=objective)
    assert output.grad_logprob_L.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)


def test_ipo_masks_by_probability_by_hand() -> None:
    """p = e^-1, e^-2, e^-3 = .368, .135, .050. The first was .018, and has risen by .35; the second
    .677, and has fallen by .54; the third a twentieth of what it is: a ratio of 20 is no matter."""
    objective = IpoObjective(most_down=0.3, most_up=0.3)
    output = _three(LossKind.IPO, [1.0, 1.0, 2.0], [20.0, 0.2, 20.0], objective=objective)
    assert output.grad_logprob_L.tolist() == pytest.approx([0.0, 0.0, -40.0])
    assert summed(output).loss == pytest.approx(-40.0)
    assert (summed(output).clipped_low, summed(output).clipped_high) == (1, 1)
    wide = IpoObjective(most_down=0.6, most_up=0.4)
    output = _three(LossKind.IPO, [1.0, 1.0, -1.0], [20.0, 0.2, 20.0], objective=wide)
    assert output.grad_logprob_L.tolist() == pytest.approx([-20.0, -0.2, 20.0])


def test_ipo_sees_how_far_a_probability_fell_beyond_the_clamp() -> None:
    """A log-ratio of -40 is clamped at -20; the probability fell by nearly 1 all the same."""
    objective = IpoObjective(most_down=0.3, most_up=0.3)
    output = run_loss(make_loss(LossKind.IPO, objective=objective), [-40.0], old_L=[-0.01])
    assert summed(output).clipped_low == 1
    assert summed(output).loss == 0.0


def test_linear_losses_by_hand() -> None:
    advantages, ratios = [1.0, -1.0, 2.0], [8.0, 1.0, 0.5]
    output = _three(LossKind.IMPORTANCE_SAMPLING, advantages, ratios)
    assert summed(output).loss == pytest.approx(-8.0 + 1.0 - 1.0)
    assert output.grad_logprob_L.tolist() == pytest.approx([-8.0, 1.0, -1.0])
    for kind in (LossKind.REINFORCE, LossKind.CROSS_ENTROPY):
        output = _three(kind, advantages, ratios)
        assert summed(output).loss == pytest.approx(1.0 - 2.0 + 6.0)
        assert output.grad_logprob_L.tolist() == pytest.approx([-1.0, 1.0, -2.0])
        assert summed(output).ratio_max == 0.0


def _corrected(gaps: list[float], **changes: Any) -> LossOutput:
    """REINFORCE with A = 1 on one path of log-probs -1, -2, -3; gaps are log(old / sampler)."""
    sampler = [logprob - gap for logprob, gap in zip(_LOGPROBS, gaps, strict=True)]
    loss = make_loss(LossKind.REINFORCE, **changes)
    return run_loss(loss, _LOGPROBS, old_L=_LOGPROBS, sampler_L=sampler)


def test_a_geometric_mask_is_blind_to_length_by_hand() -> None:
    """Gaps log 2, 0, log 4: the product is 8, its geometric mean 2, whatever the tokens are."""
    gaps = [math.log(2.0), 0.0, math.log(4.0)]
    mask = CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.5, high=2.01)
    output = _corrected(gaps, correction_mask=mask)
    assert output.grad_logprob_L.tolist() == pytest.approx([-1.0, -1.0, -1.0])
    for other in (
        CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.5, high=1.99),
        CorrectionMask(level=CorrectionLevel.SEQUENCE, low=0.5, high=7.9),
    ):
        output = _corrected(gaps, correction_mask=other)
        assert output.grad_logprob_L.tolist() == [0.0, 0.0, 0.0]
        assert summed(output).correction_masked == 3
    weight = RolloutCorrection(
        mode=CorrectionMode.MASK, level=CorrectionLevel.GEOMETRIC, low=0.5, high=2.01
    )
    output = _corrected(gaps, correction=weight)
    assert output.grad_logprob_L.tolist() == pytest.approx([-2.0, -2.0, -2.0])


def test_a_mask_at_one_level_and_truncation_at_another_by_hand() -> None:
    """Weights 2, 1, 4 truncated at 3; token 0.9 to 3.5 masks the last, the sequence (8) nothing."""
    gaps = [math.log(2.0), 0.0, math.log(4.0)]
    truncate = RolloutCorrection(
        mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.TOKEN, low=0.0, high=3.0
    )
    by_token = CorrectionMask(level=CorrectionLevel.TOKEN, low=0.9, high=3.5)
    output = _corrected(gaps, correction=truncate, correction_mask=by_token)
    assert output.grad_logprob_L.tolist() == pytest.approx([-2.0, -1.0, 0.0])
    assert summed(output).loss == pytest.approx(2.0 + 2.0)
    assert (summed(output).correction_masked, summed(output).correction_truncated) == (1, 0)
    by_sequence = CorrectionMask(level=CorrectionLevel.SEQUENCE, low=0.1, high=8.1)
    output = _corrected(gaps, correction=truncate, correction_mask=by_sequence)
    assert output.grad_logprob_L.tolist() == pytest.approx([-2.0, -1.0, -3.0])
    assert (summed(output).correction_masked, summed(output).correction_truncated) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [(KlKind.K1, 0.5, 1.0), (KlKind.K2, 0.125, 0.5), (KlKind.K3, math.exp(-0.5) - 0.5, 0.39347)],
)
def test_kl_estimates_by_hand(kind: KlKind, value: float, gradient: float) -> None:
    """log p - log q = 0.5. k3 = q/p - log(q/p) - 1, whose derivative in log p is 1 - q/p."""
    config = KlConfig(kind=kind, coefficient=2.0, reference=ReferenceKind.GIVEN)
    loss = make_loss(LossKind.REINFORCE, kl=config)
    output = run_loss(loss, [-1.0], advantage_L=[0.0], reference_L=[-1.5])
    assert summed(output).kl == pytest.approx(value)
    assert summed(output).loss == pytest.approx(2.0 * value)
    assert summed(output).policy_gradient == 0.0
    assert output.grad_logprob_L.item() == pytest.approx(2.0 * gradient, rel=1e-4)
