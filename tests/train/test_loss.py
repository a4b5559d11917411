"""Every loss against oracles written from the papers, and what may not be lost on the way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.train.loss.compute import LossOutput, TermColumns, compute_loss
from ratoon.train.loss.kinds import LOSSES, CispoObjective, ClipObjective, IpoObjective
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.sums import LossSums
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    KlConfig,
    KlKind,
    LossKind,
    ReferenceKind,
    RolloutCorrection,
    TokenWeight,
)
from tests.oracle.advantages import Counted
from tests.oracle.losses import path_loss
from tests.oracle.losses_numpy import path_value
from tests.oracle.paths import Correction, OracleLoss, Path, default_loss
from tests.train.loss_cases import make_columns, make_loss, make_objective, run_loss, summed

_TRUNCATE, _MASK = CorrectionMode.TRUNCATE, CorrectionMode.MASK
_TOKEN, _SEQUENCE, _GEOMETRIC = CorrectionLevel


def _rule(mode: CorrectionMode, level: CorrectionLevel, low: float, high: float) -> Any:
    return RolloutCorrection(mode=mode, level=level, low=low, high=high)


# Corrections, and the masks beside them.
_CORRECTIONS: tuple[tuple[RolloutCorrection | None, CorrectionMask | None], ...] = (
    (None, None),
    (_rule(_TRUNCATE, _TOKEN, 0.0, 1.1), None),
    (_rule(_MASK, _TOKEN, 0.7, 1.3), None),
    (_rule(_TRUNCATE, _SEQUENCE, 0.0, 1.5), None),
    (_rule(_MASK, _SEQUENCE, 0.3, 3.0), None),
    (_rule(_MASK, _GEOMETRIC, 0.9, 1.1), None),
    (_rule(_TRUNCATE, _GEOMETRIC, 0.0, 1.05), None),
    (None, CorrectionMask(level=_GEOMETRIC, low=0.9, high=1.1)),
    (
        _rule(_TRUNCATE, _TOKEN, 0.0, 1.1),
        CorrectionMask(level=_SEQUENCE, low=0.5, high=2.0),
    ),
    (
        _rule(_TRUNCATE, _SEQUENCE, 0.0, 1.5),
        CorrectionMask(level=_TOKEN, low=0.7, high=1.3),
    ),
)


def _oracle_loss(loss: Loss) -> OracleLoss:
    overrides: dict[str, object] = {
        "advantage": "given",
        "old": "given",
        "token_weight": str(loss.token_weight),
        "kl": None if loss.kl is None else str(loss.kl.kind),
        "kl_coefficient": 0.0 if loss.kl is None else loss.kl.coefficient,
        "kl_weighted": loss.kl is not None and loss.kl.importance_weighted,
        "entropy_coefficient": loss.entropy_coefficient,
    }
    if isinstance(loss.objective, CispoObjective):
        overrides |= {
            "clip_low": loss.objective.ratio_low,
            "clip_high": loss.objective.ratio_high,
        }
    if isinstance(loss.objective, IpoObjective):
        overrides |= {"clip_low": loss.objective.most_down, "clip_high": loss.objective.most_up}
    if isinstance(loss.objective, ClipObjective) and math.isfinite(loss.objective.dual_clip):
        overrides["dual_clip"] = loss.objective.dual_clip
    if loss.correction is not None:
        rule = loss.correction
        overrides["correction"] = Correction(
            mode=str(rule.mode), level=str(rule.level), low=rule.low, high=rule.high
        )
    if loss.correction_mask is not None:
        mask = loss.correction_mask
        overrides["correction_mask"] = Correction(
            mode="mask", level=str(mask.level), low=mask.low, high=mask.high
        )
    return default_loss(str(loss.kind), **overrides)


def _paths(
    rng: np.random.Generator, *, once: bool, spread: float
) -> tuple[list[Counted], list[Tensor]]:
    """Five paths of 1 to 8 tokens and their log-probs; ratios on both sides of every clip.

    `spread` 1: within every clamp; 60: on both sides of those too.
    """
    counted: list[Counted] = []
    logprobs: list[Tensor] = []
    for length in (1, 4, 8, 5, 6):
        logp = -rng.uniform(0.1, 3.0, length)
        mask = rng.random(length) < 0.75
        mask[0] = True
        own = mask & (rng.random(length) < 0.6) if once else mask.copy()
        own[0] = True
        path = Path(
            group_id="g",
            prompt=rng.integers(0, 9, 2),
            response=rng.integers(0, 9, length),
            mask=mask,
            temperature=1.0,
            reward=None,
            advantages=rng.normal(size=length),
            sampler=logp + rng.normal(size=length) * 0.3 * spread,
            old=logp + rng.normal(size=length) * 0.3 * spread,
            reference=logp + rng.normal(size=length) * 0.5 * spread,
            weights=rng.normal(size=length),
            truncated=False,
            version=-1,
        )
        assert path.advantages is not None
        counted.append(Counted(path=path, own=own, advantages=path.advantages))
        logprobs.append(torch.tensor(logp))
    return counted, logprobs


def _columns(loss: Loss, counted: list[Counted]) -> TermColumns:
    def joined(name: str) -> Tensor:
        values = [getattr(one.path, name)[one.path.mask] for one in counted]
        return torch.tensor(np.concatenate(values))

    own = np.concatenate([one.own[one.path.mask] for one in counted])
    shares = [
        np.full(one.path.mask.sum(), 1.0 / one.own.sum())
        if loss.token_weight is TokenWeight.PER_SEQUENCE
        else np.ones(one.path.mask.sum())
        for one in counted
    ]
    sequences = [np.full(one.path.mask.sum(), index) for index, one in enumerate(counted)]
    is_cross_entropy = loss.kind is LossKind.CROSS_ENTROPY
    return TermColumns(
        sequence_L=torch.tensor(np.concatenate(sequences)),
        num_sequences=len(counted),
        counted_C=torch.tensor(np.flatnonzero(own)),
        weight_L=torch.tensor(np.concatenate(shares)),
        advantage_L=joined("weights" if is_cross_entropy else "advantages"),
        old_L=joined("old"),
        sampler_L=joined("sampler"),
        sampler_usable_L=torch.ones(len(own), dtype=torch.bool),
        reference_L=joined("reference"),
    )


def _run(
    loss: Loss, counted: list[Counted], logprobs: list[Tensor], entropies: list[Tensor]
) -> LossOutput:
    masks = [torch.tensor(one.path.mask) for one in counted]
    logprob_L = torch.cat([value[mask] for value, mask in zip(logprobs, masks, strict=True)])
    entropy_L = torch.cat([value[mask] for value, mask in zip(entropies, masks, strict=True)])
    return compute_loss(loss, _columns(loss, counted), logprob_L, entropy_L)


@pytest.mark.parametrize(
    ("kind", "correction"),
    [
        (kind, correction)
        for kind in LossKind
        for correction in range(len(_CORRECTIONS))
        # resolve_loss refuses a correction of a loss without a sampler.
        if LOSSES[kind].advantage is not None or correction == 0
    ],
)
def test_loss_equals_oracle_with_every_option(kind: LossKind, correction: int) -> None:
    """Value against plain floats and gradient against autograd, one path at a time, in float64."""
    rng = np.random.default_rng([correction, list(LossKind).index(kind)])
    rule, mask = _CORRECTIONS[correction]
    for seed in range(8):
        has_dual = "dual_clip" in LOSSES[kind].objective.options and seed % 2 == 1
        loss = make_loss(
            kind,
            objective=make_objective(kind, dual_clip=1.3 if has_dual else math.inf),
            correction=rule,
            correction_mask=mask,
            token_weight=list(TokenWeight)[seed % 2],
            kl=KlConfig(
                kind=list(KlKind)[seed % 5],
                coefficient=0.3,
                reference=ReferenceKind.GIVEN,
                # Once of k3, and of k1 beyond the clamps.
                importance_weighted=seed in (2, 5),
            ),
            entropy_coefficient=0.1,
        )
        counted, logprobs = _paths(rng, once=seed >= 3, spread=60.0 if seed > 3 else 1.0)
        entropies = [torch.tensor(rng.uniform(0.1, 2.0, len(value))) for value in logprobs]
        output = _run(loss, counted, logprobs, entropies)

        oracle = _oracle_loss(loss)
        leaves = [value.clone().requires_grad_() for value in logprobs]
        bonus_leaves = [value.clone().requires_grad_() for value in entropies]
        value, policy_gradient = 0.0, 0.0
        for one, leaf, bonus_leaf in zip(counted, leaves, bonus_leaves, strict=True):
            sums = path_loss(one, oracle, leaf, bonus_leaf)
            sums.total.backward()
            value += path_value(one, oracle, leaf.detach().numpy(), bonus_leaf.detach().numpy())
            policy_gradient += sums.policy_gradient.item()
        masks = [torch.tensor(one.path.mask) for one in counted]
        assert summed(output).loss == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert summed(output).policy_gradient == pytest.approx(
            policy_gradient, rel=1e-12, abs=1e-12
        )
        for got, expected in (
            (output.grad_logprob_L, leaves),
            (output.grad_entropy_L, bonus_leaves),
        ):
            assert got is not None
            grads = [leaf.grad[mask] for leaf, mask in zip(expected, masks, strict=True)]  # type: ignore[index]
            # A mask and the clamp of the KL may leave nothing where all gaps are far.
            masks_some = kind in (LossKind.IPO, LossKind.VALUE) or (
                rule is not None and rule.mode is CorrectionMode.MASK
            )
            may_be_nothing = seed > 3 and (masks_some or mask is not None)
            assert torch.cat(grads).norm() > 0 or may_be_nothing
            torch.testing.assert_close(got, torch.cat(grads), rtol=1e-12, atol=1e-13)


def test_sampler_mismatch_is_reported_over_usable_terms() -> None:
    """k3 of KL(sampler || trainer) with u = log p - log p_sampler = 0.2 and -0.1; 9 is raw."""
    output = run_loss(
        make_loss(LossKind.REINFORCE),
        [-1.0, -2.0, -3.0],
        sampler_L=[-1.2, -11.0, -2.9],
        sampler_usable_L=torch.tensor([True, False, True]),
    )
    sums = summed(output)
    expected = (math.exp(0.2) - 1.2) + (math.exp(-0.1) - 0.9)
    assert sums.sampler_kl == pytest.approx(expected)
    assert sums.sampler_terms == 2
    assert sums.sampler_gap_max == pytest.approx(0.2)


def test_clipped_overflow_leaves_a_finite_gradient() -> None:
    """exp of a held log-ratio of 800 is infinite; its gradient is 0, not infinity times 0."""
    output = run_loss(make_loss(LossKind.GRPO), [-1.0, -2.0], old_L=[-801.0, -2.0])
    assert output.grad_logprob_L.tolist() == [0.0, -1.0]
    assert summed(output).loss == pytest.approx(-2.2)


def test_uncounted_terms_reach_sequence_ratios_and_nothing_else() -> None:
    """gspo under `once`: the second token is another path's, but it is in the mean of log r."""
    output = run_loss(
        make_loss(LossKind.GSPO),
        [-1.0, -2.0],
        counted_C=torch.tensor([0]),
        advantage_L=[-1.0, math.nan],
        old_L=[-1.0 - math.log(2.0), -2.0 - math.log(8.0)],
    )
    assert summed(output).loss == pytest.approx(4.0)
    assert output.grad_logprob_L.tolist() == pytest.approx([4.0, 0.0])
    assert summed(output).terms == 1


def test_float32_log_ratio_survives_where_bfloat16_would_not() -> None:
    """Trap 2: log-probs stored in bf16 move a ratio of 1 by 0.4%; in fp32 it is 1 to rounding."""
    old = torch.full((1,), -3.0071, dtype=torch.float32)
    rounded = old.to(torch.bfloat16).to(torch.float32)
    assert abs(math.exp((old - rounded).item()) - 1) > 3e-3
    ones_L = torch.ones(1)
    columns = make_columns(old, weight_L=ones_L, advantage_L=ones_L, old_L=old)
    output = compute_loss(make_loss(LossKind.GRPO), columns, old.clone(), torch.zeros(1))
    assert summed(output).ratio_max == 1.0
    assert output.grad_logprob_L.dtype is torch.float32
    assert output.grad_logprob_L.item() == -1.0


def test_sums_add_up_and_maxima_do_not() -> None:
    one = LossSums(loss=1.5, weight=2.0, terms=3.0, ratio_max=1.2, sampler_gap_max=0.1)
    two = LossSums(loss=-0.5, weight=1.0, terms=1.0, ratio_max=0.9, sampler_gap_max=0.4)
    total = one + two
    assert (total.loss, total.weight, total.terms) == (1.0, 3.0, 4.0)
    assert (total.ratio_max, total.sampler_gap_max) == (1.2, 0.4)
