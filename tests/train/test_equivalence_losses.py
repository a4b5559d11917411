"""Equivalence, at the level of the model: every loss, its counters and every parameter's gradient.

One packed forward-backward against one unpadded Hugging Face run a rollout, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

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
from tests.train.equivalence_runs import (
    WHOLE,
    Pair,
    check_gradients,
    forward_backward,
    make_request,
    oracle_loss,
    random_batch_near,
)

GRPO, GSPO, DAPO, CISPO = LossKind.GRPO, LossKind.GSPO, LossKind.DAPO, LossKind.CISPO
REINFORCE, IPO, SAPO = LossKind.REINFORCE, LossKind.IPO, LossKind.SAPO
ONCE = SharedTokens.ONCE
GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
ON_POLICY = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
TOKEN, SEQUENCE = CorrectionLevel.TOKEN, CorrectionLevel.SEQUENCE
GEOMETRIC = CorrectionLevel.GEOMETRIC
ADVANTAGED = {*LossKind} - {LossKind.CROSS_ENTROPY, LossKind.DISTILLATION, LossKind.VALUE}
# One batch has many branches, the other all that a random group may have.
BRANCHES = ("flat", "tree")

# The batch of a pair; its request; packed tokens of a micro-batch.
MakeBatch = Callable[[Pair], RolloutBatch]
Row = tuple[MakeBatch, LossConfig, int]


# The pair's weights never change here: neither do its batches.
_batch = functools.cache(random_batch_near)


def _on(
    seed: int, change: Callable[[RolloutBatch], RolloutBatch] | None = None, **knobs: Any
) -> MakeBatch:
    """A random batch, advantages random, non-zero and different for every token of every path."""

    def make(pair: Pair) -> RolloutBatch:
        batch = _batch(pair, seed, **knobs)
        return batch if change is None else change(batch)

    return make


def _kl(kind: KlKind = KlKind.K3, *, frozen: bool = False, **changes: Any) -> KlConfig:
    reference = ReferenceKind.FROZEN if frozen else ReferenceKind.GIVEN
    return KlConfig(kind=kind, coefficient=0.3, reference=reference, **changes)


def _token_weights(batch: RolloutBatch) -> RolloutBatch:
    """Signed token weights in place of advantages."""
    weights = np.random.default_rng(1).normal(size=len(batch.loss_mask)).astype(np.float32)
    return replace(batch, advantages=None, token_weights=weights)


def _without_outcomes(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, advantages=None)


def _with_flat_group(batch: RolloutBatch) -> RolloutBatch:
    """The first group's rewards are 0.1, every other one a step of float32 above it."""
    assert batch.rewards is not None
    rewards = batch.rewards.copy()
    low = np.float32(0.1)
    rewards[: batch.group_offsets[1]] = low
    rewards[: batch.group_offsets[1] : 2] = np.nextafter(low, np.float32(1))
    return replace(batch, rewards=rewards)


def _with_truncated(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, truncated=np.arange(batch.num_sequences) % 3 == 1)


def _rule(mode: CorrectionMode, level: CorrectionLevel, high: float, low: float = 0.0) -> Any:
    return RolloutCorrection(mode=mode, level=level, low=low, high=high)


CORRECTIONS = {
    f"{rule.mode} {rule.level}": rule
    for rule in (
        _rule(CorrectionMode.TRUNCATE, TOKEN, 1.1),
        _rule(CorrectionMode.TRUNCATE, SEQUENCE, 1.2),
        _rule(CorrectionMode.TRUNCATE, GEOMETRIC, 1.02),
        _rule(CorrectionMode.MASK, TOKEN, 1.2, 0.8),
        _rule(CorrectionMode.MASK, SEQUENCE, 1.7, 0.6),
        _rule(CorrectionMode.MASK, GEOMETRIC, 1.07, 0.93),
    )
}
# A correction of another level than each mask.
BESIDE = {
    TOKEN: CORRECTIONS["truncate sequence"],
    SEQUENCE: CORRECTIONS["truncate token"],
    GEOMETRIC: CORRECTIONS["truncate token"],
}


def _rows_of_kinds() -> Iterator[tuple[str, Row]]:
    kl_kinds = list(KlKind)
    for index, kind in enumerate(LossKind):
        if kind not in ADVANTAGED:
            continue
        yield f"{kind}", (_on(20), make_request(kind), 30)
        kl = _kl(kl_kinds[index % len(kl_kinds)])
        request = make_request(kind, kl=kl, entropy_coefficient=0.05, shared_tokens=ONCE)
        yield f"{kind} once, kl, entropy", (_on(22, kinds=BRANCHES), request, 50)
    for name, change, tokens in (("", _token_weights, 1), (" plain", _without_outcomes, WHOLE)):
        request = LossConfig(kind=LossKind.CROSS_ENTROPY, kl=_kl(), entropy_coefficient=0.1)
        yield f"cross_entropy{name}", (_on(21, change), request, tokens)
    for kind in (GRPO, GSPO, CISPO, SAPO, IPO, LossKind.IMPORTANCE_SAMPLING):
        # Every ratio is 1 and has a gradient.
        yield f"{kind} on policy", (_on(27), LossConfig(kind=kind, old_logprobs=ON_POLICY), WHOLE)
    for kind in (GRPO, DAPO):
        request = LossConfig(kind=kind, dual_clip=1.3)
        yield f"{kind} dual clip", (_on(26, noise=0.6), request, WHOLE)
    for kind in (GSPO, CISPO, GRPO):
        request = make_request(kind, clip_low=0.05, clip_high=0.15 + (kind is CISPO))
        yield f"{kind} other clips", (_on(28), request, WHOLE)
    for bound in (0.005, 0.05):
        request = LossConfig(kind=IPO, clip_low=bound, clip_high=2 * bound)
        yield f"ipo within {bound}", (_on(26, noise=0.6), request, 30)
    request = LossConfig(kind=SAPO, tau_positive=3.0, tau_negative=0.5)
    yield "sapo other temperatures", (_on(26, noise=0.6), request, 30)
    for kind, weight in (
        (GRPO, TokenWeight.PER_TOKEN),
        (DAPO, TokenWeight.PER_SEQUENCE),
        (REINFORCE, TokenWeight.PER_SEQUENCE),
    ):
        request = LossConfig(kind=kind, token_weight=weight, entropy_coefficient=0.1)
        yield f"{kind} {weight}", (_on(29), request, 1)


def _rows_of_terms() -> Iterator[tuple[str, Row]]:
    for kl_kind in KlKind:
        frozen = kl_kind not in (KlKind.K1, KlKind.K1_PLUS)
        request = LossConfig(kind=LossKind.PPO_CLIP, kl=_kl(kl_kind, frozen=frozen))
        yield f"{kl_kind}", (_on(23), request, 50)
    # The weight is the token's ratio, of gspo too.
    for kind, kl_kind in (
        (LossKind.PPO_CLIP, KlKind.K1),
        (LossKind.PPO_CLIP, KlKind.K3),
        (GSPO, KlKind.K3),
    ):
        kl = _kl(kl_kind, importance_weighted=True)
        request = LossConfig(kind=kind, kl=kl, old_logprobs=GIVEN_OLD)
        yield f"{kind} weighted {kl_kind}", (_on(23), request, 50)
    of_other_losses = [(GSPO, "mask geometric"), (GSPO, "truncate token"), (CISPO, "mask token")]
    for kind, name in [*((GRPO, name) for name in CORRECTIONS), *of_other_losses]:
        request = LossConfig(
            kind=kind,
            old_logprobs=GIVEN_OLD,
            correction=CORRECTIONS[name],
            shared_tokens=ONCE,
            kl=_kl(),
        )
        yield f"{kind} {name}", (_on(24, kinds=BRANCHES), request, 50)
    for level in CorrectionLevel:
        mask = CorrectionMask(level=level, low=0.9, high=1.1)
        for correction, tokens in ((None, 1), (BESIDE[level], 50)):
            request = LossConfig(
                kind=GRPO,
                old_logprobs=GIVEN_OLD,
                correction=correction,
                correction_mask=mask,
                kl=_kl(),
            )
            name = "beside a weight" if correction else "alone"
            yield f"mask {level} {name}", (_on(24, kinds=BRANCHES), request, tokens)
    mask = CorrectionMask(level=GEOMETRIC, low=0.93, high=1.07)
    for old in (GIVEN_OLD, ON_POLICY, None):
        request = LossConfig(kind=REINFORCE, old_logprobs=old, correction_mask=mask)
        yield f"reinforce mask {old and old.kind}", (_on(25), request, WHOLE)
    request = LossConfig(kind=REINFORCE, correction=CORRECTIONS["truncate token"])
    yield "reinforce truncate", (_on(25), request, WHOLE)


def _rows_of_batches() -> Iterator[tuple[str, Row]]:
    # With two token ids, what one path trains is context or prompt in others, across groups.
    letters = _on(36, vocab_size=2, max_prompt=4, temperatures=(1.0, 1.0, 0.7))
    for kind, shared, tokens in (
        (GRPO, ONCE, 20),
        (GSPO, ONCE, 20),
        (GSPO, SharedTokens.SUM, WHOLE),
        (REINFORCE, SharedTokens.SUM, 20),
    ):
        request = make_request(kind, kl=_kl(), shared_tokens=shared)
        yield f"{kind} {shared} of two letters", (letters, request, tokens)
    rewards: dict[str, Any] = {"outcome": "reward"}
    for advantage in AdvantageKind:
        if advantage is not AdvantageKind.GIVEN:
            request = LossConfig(kind=GRPO, advantage=advantage)
            yield f"{advantage}", (_on(30, _with_flat_group, **rewards), request, 1)
    # Groups of no variance are dropped for dapo and where asked; what they count, where they stay.
    for kind, is_dropped in ((DAPO, None), (DAPO, False), (GRPO, True)):
        request = LossConfig(kind=kind, drop_zero_variance_groups=is_dropped, kl=_kl(KlKind.K2))
        name = f"{kind} zero variance {is_dropped}"
        yield name, (_on(31, _with_flat_group, **rewards), request, 50)
    # Truncated rollouts are in the group's mean, then go.
    request = LossConfig(kind=DAPO, overlong=OverlongFilter())
    yield "overlong filter", (_on(32, _with_truncated, **rewards), request, 50)
    rule = OverlongPenalty(max_tokens=8, buffer_tokens=5, scale=2.0)
    yield "overlong penalty", (_on(33, **rewards), LossConfig(kind=DAPO, overlong=rule), WHOLE)
    # As the paper filters by accuracy: a group told apart by length alone is dropped.
    rule = OverlongPenalty(max_tokens=8, buffer_tokens=7, scale=1.0)
    request = LossConfig(kind=DAPO, overlong=rule)
    yield "variance without penalty", (_on(35, _with_flat_group, **rewards), request, WHOLE)


ROWS = dict([*_rows_of_kinds(), *_rows_of_terms(), *_rows_of_batches()])


@pytest.mark.parametrize("name", ROWS)
def test_loss_counters_and_gradients_are_the_oracles(pair: Pair, name: str) -> None:
    make_batch, request, micro_batch_tokens = ROWS[name]
    check_gradients(pair, make_batch(pair), request, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.more
@pytest.mark.parametrize("micro_batch_tokens", [1, WHOLE])
@pytest.mark.parametrize("kind", sorted(ADVANTAGED))
def test_every_kind_however_it_is_cut(pair: Pair, kind: LossKind, micro_batch_tokens: int) -> None:
    check_gradients(
        pair, _batch(pair, 20), make_request(kind), micro_batch_tokens=micro_batch_tokens
    )


def test_once_takes_tokens_from_some_paths_and_all_from_others(pair: Pair) -> None:
    """The batch of the rows above is worth testing with."""
    batch = _batch(pair, 22, kinds=BRANCHES)
    request = LossConfig(kind=GRPO, shared_tokens=ONCE)
    remaining = select(paths_of(batch), oracle_loss(request, batch))
    paid = [int(counted.own.sum()) for counted in remaining]
    trained = [int(counted.path.mask.sum()) for counted in remaining]
    assert any(0 < p < t for p, t in zip(paid, trained, strict=True))
    assert any(p == 0 < t for p, t in zip(paid, trained, strict=True))


@pytest.mark.parametrize(
    ("kind", "shared_tokens", "micro_batch_tokens"),
    [(GRPO, SharedTokens.SUM, 1), (GRPO, ONCE, WHOLE), (GSPO, ONCE, 1)],
)
def test_tokens_of_most_entropy(
    pair: Pair, kind: LossKind, shared_tokens: SharedTokens, micro_batch_tokens: int
) -> None:
    """The quantile is over all micro-batches, and takes no part in KL and counters."""
    batch = _batch(pair, 37, kinds=BRANCHES)
    old = pair.trainer.forward(
        pair.trainer.prepare_forward(batch), with_entropy=True, use_reference=False
    )
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


@pytest.mark.parametrize("shared_tokens", SharedTokens)
def test_stale_rollouts_are_dropped(pair: Pair, shared_tokens: SharedTokens) -> None:
    """A dropped path pays for nothing, nor does it count."""
    batch = _batch(pair, 34, outcome="reward", policy_version=0)
    pair.trainer.version = pair.oracle.version = 5
    versions = np.where(np.arange(batch.num_sequences) % 3 == 0, 2, 4)
    request = LossConfig(
        kind=GRPO,
        shared_tokens=shared_tokens,
        staleness=StalenessConfig(max_versions=1, action=StalenessAction.DROP),
    )
    check_gradients(pair, replace(batch, policy_version=versions.astype(np.int64)), request)
    pair.trainer.version = pair.oracle.version = 0
