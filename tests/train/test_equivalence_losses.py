"""Equivalence, at the level of the model: every loss, its counters and every parameter's gradient.

One packed forward-backward against one unpadded Hugging Face run a rollout, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ratoon.rollout.batch import RolloutBatch
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    RolloutCorrection,
    SharedTokens,
    StalenessAction,
    StalenessConfig,
    TokenWeight,
)
from tests.equivalence import assert_close, paths_of
from tests.oracle.advantages import select
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    WHOLE,
    Pair,
    check_gradients,
    forward_backward,
    make_pair,
    make_request,
    oracle_loss,
    random_batch_near,
)

GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
ON_POLICY = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
CLIPPED = [LossKind.GRPO, LossKind.PPO_CLIP, LossKind.DAPO, LossKind.DR_GRPO]
WITH_RATIO = [
    *CLIPPED,
    LossKind.GSPO,
    LossKind.CISPO,
    LossKind.SAPO,
    LossKind.IPO,
    LossKind.IMPORTANCE_SAMPLING,
]


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("losses")
    return make_pair(write_folder(root / "base", "qwen3"), scratch=root / "adapter")


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.discard()


# The pair's weights never change here: neither do its batches.
_batch = functools.cache(random_batch_near)


def _kl(kind: KlKind, reference: ReferenceKind = ReferenceKind.GIVEN) -> KlConfig:
    return KlConfig(kind=kind, coefficient=0.3, reference=reference)


def _correction(
    mode: CorrectionMode, level: CorrectionLevel, *, low: float = 0.0, high: float
) -> RolloutCorrection:
    return RolloutCorrection(mode=mode, level=level, low=low, high=high)


CORRECTIONS = {
    "truncate_token": _correction(CorrectionMode.TRUNCATE, CorrectionLevel.TOKEN, high=1.1),
    "mask_token": _correction(CorrectionMode.MASK, CorrectionLevel.TOKEN, low=0.8, high=1.2),
    "truncate_sequence": _correction(CorrectionMode.TRUNCATE, CorrectionLevel.SEQUENCE, high=1.2),
    "truncate_geometric": _correction(
        CorrectionMode.TRUNCATE, CorrectionLevel.GEOMETRIC, high=1.02
    ),
    "mask_geometric": _correction(
        CorrectionMode.MASK, CorrectionLevel.GEOMETRIC, low=0.93, high=1.07
    ),
    "mask_sequence": _correction(CorrectionMode.MASK, CorrectionLevel.SEQUENCE, low=0.6, high=1.7),
}


def _without_outcomes(batch: RolloutBatch, seed: int) -> RolloutBatch:
    """Signed token weights in place of advantages."""
    weights = np.random.default_rng(seed).normal(size=len(batch.loss_mask)).astype(np.float32)
    return replace(batch, advantages=None, token_weights=weights)


@pytest.mark.parametrize(
    "micro_batch_tokens",
    [30, *(pytest.param(tokens, marks=pytest.mark.more) for tokens in (1, WHOLE))],
)
@pytest.mark.parametrize("kind", [kind for kind in LossKind if kind != "cross_entropy"])
def test_loss_and_gradients_of_every_kind(
    pair: Pair, kind: LossKind, micro_batch_tokens: int
) -> None:
    """Advantages random, non-zero and different for every token of every path."""
    batch = _batch(pair, 20)
    request = make_request(kind)
    check_gradients(pair, batch, request, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize("micro_batch_tokens", [1, WHOLE])
@pytest.mark.parametrize("has_weights", [True, False])
def test_cross_entropy(pair: Pair, has_weights: bool, micro_batch_tokens: int) -> None:
    batch = _without_outcomes(_batch(pair, 21), 1)
    if not has_weights:
        batch = replace(batch, token_weights=None)
    request = LossConfig(kind=LossKind.CROSS_ENTROPY, kl=_kl(KlKind.K3), entropy_coefficient=0.1)
    check_gradients(pair, batch, request, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize("shared_tokens", SharedTokens)
@pytest.mark.parametrize("kind", [kind for kind in LossKind if kind != "cross_entropy"])
def test_every_kind_with_kl_and_entropy(
    pair: Pair, kind: LossKind, shared_tokens: SharedTokens
) -> None:
    kinds = list(KlKind)
    request = make_request(
        kind,
        kl=_kl(kinds[list(LossKind).index(kind) % len(kinds)]),
        entropy_coefficient=0.05,
        shared_tokens=shared_tokens,
    )
    batch = _batch(pair, 22, kinds=("flat", "tree"))
    check_gradients(pair, batch, request, micro_batch_tokens=50)


@pytest.mark.parametrize("shared_tokens", SharedTokens)
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO, LossKind.REINFORCE])
def test_rollouts_of_two_letters(pair: Pair, kind: LossKind, shared_tokens: SharedTokens) -> None:
    """With two token ids, what one path trains is context or prompt in others, across groups."""
    batch = _batch(pair, 36, vocab_size=2, max_prompt=4, temperatures=(1.0, 1.0, 0.7))
    request = make_request(kind, kl=_kl(KlKind.K3), shared_tokens=shared_tokens)
    for micro_batch_tokens in (20, WHOLE):
        check_gradients(pair, batch, request, micro_batch_tokens=micro_batch_tokens)


def test_once_takes_tokens_from_some_paths_and_all_from_others(pair: Pair) -> None:
    """The batch of the test before is worth testing with."""
    batch = _batch(pair, 22, kinds=("flat", "tree"))
    request = LossConfig(kind=LossKind.GRPO, shared_tokens=SharedTokens.ONCE)
    remaining = select(paths_of(batch), oracle_loss(request, batch))
    paid = [int(counted.own.sum()) for counted in remaining]
    trained = [int(counted.path.mask.sum()) for counted in remaining]
    assert any(0 < p < t for p, t in zip(paid, trained, strict=True))
    assert any(p == 0 < t for p, t in zip(paid, trained, strict=True))


@pytest.mark.parametrize("reference", ReferenceKind)
@pytest.mark.parametrize("kl_kind", KlKind)
def test_kl(pair: Pair, kl_kind: KlKind, reference: ReferenceKind) -> None:
    request = LossConfig(kind=LossKind.PPO_CLIP, kl=_kl(kl_kind, reference))
    check_gradients(pair, _batch(pair, 23), request, micro_batch_tokens=50)


@pytest.mark.parametrize("kind", [LossKind.PPO_CLIP, LossKind.GSPO])
@pytest.mark.parametrize("kl_kind", [KlKind.K1, KlKind.K3])
def test_importance_weighted_kl(pair: Pair, kl_kind: KlKind, kind: LossKind) -> None:
    """The weight is the token's ratio, of gspo too."""
    kl = replace(_kl(kl_kind), importance_weighted=True)
    request = LossConfig(kind=kind, kl=kl, old_logprobs=GIVEN_OLD)
    check_gradients(pair, _batch(pair, 23), request, micro_batch_tokens=50)


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS.keys())
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO, LossKind.CISPO])
def test_rollout_correction(pair: Pair, kind: LossKind, correction: RolloutCorrection) -> None:
    request = LossConfig(
        kind=kind,
        old_logprobs=GIVEN_OLD,
        correction=correction,
        shared_tokens=SharedTokens.ONCE,
        kl=_kl(KlKind.K3),
    )
    batch = _batch(pair, 24, kinds=("flat", "tree"))
    check_gradients(pair, batch, request, micro_batch_tokens=50)


@pytest.mark.parametrize("micro_batch_tokens", [1, 50, WHOLE])
@pytest.mark.parametrize("level", CorrectionLevel)
def test_a_mask_alone_and_beside_a_weight_of_another_level(
    pair: Pair, level: CorrectionLevel, micro_batch_tokens: int
) -> None:
    mask = CorrectionMask(level=level, low=0.9, high=1.1)
    truncate = CORRECTIONS["truncate_token"]
    if level is CorrectionLevel.TOKEN:
        truncate = CORRECTIONS["truncate_sequence"]
    batch = _batch(pair, 24, kinds=("flat", "tree"))
    for correction in (None, truncate):
        request = LossConfig(
            kind=LossKind.GRPO,
            old_logprobs=GIVEN_OLD,
            correction=correction,
            correction_mask=mask,
            kl=_kl(KlKind.K3),
        )
        check_gradients(pair, batch, request, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize("micro_batch_tokens", [1, WHOLE])
@pytest.mark.parametrize("shared_tokens", SharedTokens)
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO])
def test_tokens_of_most_entropy(
    pair: Pair, kind: LossKind, shared_tokens: SharedTokens, micro_batch_tokens: int
) -> None:
    """The quantile is over all micro-batches, and takes no part in KL and counters."""
    batch = _batch(pair, 37, kinds=("flat", "tree"))
    plan = pair.trainer.plan_forward(batch)
    old = pair.trainer.forward(batch, plan, with_entropy=True, use_reference=False)
    assert old.entropy is not None
    request = LossConfig(
        kind=kind,
        old_logprobs=OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op"),
        top_entropy_share=0.2,
        shared_tokens=shared_tokens,
        kl=_kl(KlKind.K2),
    )
    report, sums = forward_backward(
        pair,
        batch,
        request,
        micro_batch_tokens=micro_batch_tokens,
        forward_logprobs_J=old.logprobs,
        forward_entropy_J=old.entropy,
    )
    assert_close(pair.gradient_errors(), pair.tolerance)
    assert report.trained_tokens == sums.counters.tokens
    assert report.policy_gradient_loss is not None
    assert report.policy_gradient_loss * sums.counters.sequences == pytest.approx(
        sums.policy_gradient, abs=1e-9
    )
    pair.discard()


@pytest.mark.parametrize("old", [GIVEN_OLD, ON_POLICY, None])
def test_reinforce_with_a_mask(pair: Pair, old: OldLogprobs | None) -> None:
    mask = CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.93, high=1.07)
    request = LossConfig(kind=LossKind.REINFORCE, old_logprobs=old, correction_mask=mask)
    check_gradients(pair, _batch(pair, 25), request)


@pytest.mark.parametrize("old", [GIVEN_OLD, ON_POLICY, None])
def test_reinforce_with_rollout_correction(pair: Pair, old: OldLogprobs | None) -> None:
    request = LossConfig(
        kind=LossKind.REINFORCE, old_logprobs=old, correction=CORRECTIONS["truncate_token"]
    )
    check_gradients(pair, _batch(pair, 25), request)


@pytest.mark.parametrize("kind", CLIPPED)
def test_dual_clip(pair: Pair, kind: LossKind) -> None:
    request = LossConfig(kind=kind, dual_clip=1.3)
    check_gradients(pair, _batch(pair, 26, noise=0.6), request)


@pytest.mark.parametrize("kind", WITH_RATIO)
def test_on_policy(pair: Pair, kind: LossKind) -> None:
    """Old log-probs are the current ones: every ratio is 1 and has a gradient."""
    request = LossConfig(kind=kind, old_logprobs=ON_POLICY)
    check_gradients(pair, _batch(pair, 27), request)


def test_sapo_with_other_temperatures(pair: Pair) -> None:
    request = LossConfig(kind=LossKind.SAPO, tau_positive=3.0, tau_negative=0.5)
    check_gradients(pair, _batch(pair, 26, noise=0.6), request, micro_batch_tokens=30)


@pytest.mark.parametrize("bound", [0.005, 0.05])
def test_ipo_with_other_bounds(pair: Pair, bound: float) -> None:
    request = LossConfig(kind=LossKind.IPO, clip_low=bound, clip_high=2 * bound)
    check_gradients(pair, _batch(pair, 26, noise=0.6), request, micro_batch_tokens=30)


@pytest.mark.parametrize("kind", [LossKind.GSPO, LossKind.CISPO, LossKind.GRPO])
def test_other_clips(pair: Pair, kind: LossKind) -> None:
    request = make_request(kind, clip_low=0.05, clip_high=0.15 + (kind is LossKind.CISPO))
    check_gradients(pair, _batch(pair, 28), request)


@pytest.mark.parametrize("token_weight", TokenWeight)
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.DAPO, LossKind.REINFORCE])
def test_token_weights(pair: Pair, kind: LossKind, token_weight: TokenWeight) -> None:
    request = LossConfig(kind=kind, token_weight=token_weight, entropy_coefficient=0.1)
    check_gradients(pair, _batch(pair, 29), request, micro_batch_tokens=1)


@pytest.mark.parametrize("advantage", [kind for kind in AdvantageKind if kind != "given"])
def test_advantages_of_rewards(pair: Pair, advantage: AdvantageKind) -> None:
    """Rewards, some of them equal in a whole group."""
    batch = _batch(pair, 30, outcome="reward")
    request = LossConfig(kind=LossKind.GRPO, advantage=advantage)
    check_gradients(pair, _with_flat_group(batch), request, micro_batch_tokens=1)


@pytest.mark.parametrize("kind", [LossKind.DAPO, LossKind.GRPO])
@pytest.mark.parametrize("is_dropped", [True, False, None])
def test_zero_variance_groups(pair: Pair, kind: LossKind, is_dropped: bool | None) -> None:
    """Dropped for dapo and where asked: what they count is counted where they stay."""
    batch = _with_flat_group(_batch(pair, 31, outcome="reward"))
    request = LossConfig(kind=kind, drop_zero_variance_groups=is_dropped, kl=_kl(KlKind.K2))
    check_gradients(pair, batch, request, micro_batch_tokens=50)


def test_overlong_filter(pair: Pair) -> None:
    """Truncated rollouts are in the group's mean, then go."""
    batch = _with_truncated(_batch(pair, 32, outcome="reward"))
    request = LossConfig(kind=LossKind.DAPO, overlong=OverlongFilter())
    check_gradients(pair, batch, request, micro_batch_tokens=50)


def test_overlong_penalty(pair: Pair) -> None:
    request = LossConfig(
        kind=LossKind.DAPO, overlong=OverlongPenalty(max_tokens=8, buffer_tokens=5, scale=2.0)
    )
    check_gradients(pair, _batch(pair, 33, outcome="reward"), request)


def test_zero_variance_is_that_of_rewards_without_penalty(pair: Pair) -> None:
    """As the paper filters by accuracy: a group told apart by length alone is dropped."""
    batch = _with_flat_group(_batch(pair, 35, outcome="reward"))
    rule = OverlongPenalty(max_tokens=8, buffer_tokens=7, scale=1.0)
    check_gradients(pair, batch, LossConfig(kind=LossKind.DAPO, overlong=rule))


@pytest.mark.parametrize("shared_tokens", SharedTokens)
def test_stale_rollouts_are_dropped(pair: Pair, shared_tokens: SharedTokens) -> None:
    """A dropped path pays for nothing, nor does it count."""
    batch = _batch(pair, 34, outcome="reward", policy_version=0)
    pair.trainer.version = pair.oracle.version = 5
    versions = np.where(np.arange(batch.num_sequences) % 3 == 0, 2, 4)
    request = LossConfig(
        kind=LossKind.GRPO,
        shared_tokens=shared_tokens,
        staleness=StalenessConfig(max_versions=1, action=StalenessAction.DROP),
    )
    check_gradients(pair, replace(batch, policy_version=versions.astype(np.int64)), request)
    pair.trainer.version = pair.oracle.version = 0


def _with_flat_group(batch: RolloutBatch) -> RolloutBatch:
    """The first group's rewards are 0.1, every other one a step of float32 above it."""
    assert batch.rewards is not None
    rewards = batch.rewards.copy()
    low = np.float32(0.1)
    rewards[: batch.group_offsets[1]] = low
    rewards[: batch.group_offsets[1] : 2] = np.nextafter(low, np.float32(1))
    return replace(batch, rewards=rewards)


def _with_truncated(batch: RolloutBatch) -> RolloutBatch:
    truncated = np.arange(batch.num_sequences) % 3 == 1
    return replace(batch, truncated=truncated)
