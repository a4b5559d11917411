"""Every figure of the report against its definition, and none depends on how a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train import prepare
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    OverlongFilter,
    OverlongPenalty,
    RolloutCorrection,
    SharedTokens,
    StepReport,
)
from tests.builders import Outcome, limits, random_groups
from tests.equivalence import near_policy, paths_of
from tests.oracle import hf
from tests.oracle.advantages import count, select
from tests.oracle.figures import figures, rollout_figures
from tests.oracle.paths import Path
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    ADAMW,
    VOCAB_SIZE,
    WHOLE,
    Pair,
    make_pair,
    oracle_loss,
)

GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
QUANTILES = ("ratio_p01", "ratio_p50", "ratio_p99")


def _correction(mode: CorrectionMode, level: CorrectionLevel, high: float) -> RolloutCorrection:
    low = 0.8 if mode is CorrectionMode.MASK else 0.0
    return RolloutCorrection(mode=mode, level=level, low=low, high=high)


REQUESTS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": LossKind.GRPO, "dual_clip": 1.25},
    "once": {"kind": LossKind.PPO_CLIP, "shared_tokens": SharedTokens.ONCE, "dual_clip": 1.25},
    "dapo": {"kind": LossKind.DAPO, "overlong": OverlongFilter()},
    "penalty": {
        "kind": LossKind.DR_GRPO,
        "overlong": OverlongPenalty(max_tokens=8, buffer_tokens=5, scale=2.0),
    },
    "gspo": {"kind": LossKind.GSPO, "old_logprobs": GIVEN_OLD},
    "gmpo": {"kind": LossKind.GMPO},
    "cispo": {"kind": LossKind.CISPO},
    "importance_sampling": {"kind": LossKind.IMPORTANCE_SAMPLING},
    "reinforce": {"kind": LossKind.REINFORCE},
    "reinforce_corrected": {
        "kind": LossKind.REINFORCE,
        "correction": _correction(CorrectionMode.TRUNCATE, CorrectionLevel.TOKEN, 1.1),
    },
    "on_policy": {
        "kind": LossKind.GRPO,
        "old_logprobs": OldLogprobs(kind=OldLogprobsKind.ON_POLICY),
    },
    **{
        f"{mode}_{level}": {
            "kind": LossKind.GRPO,
            "old_logprobs": GIVEN_OLD,
            "correction": _correction(mode, level, 1.15),
        }
        for mode in CorrectionMode
        for level in CorrectionLevel
    },
    "truncated_beside_a_mask": {
        "kind": LossKind.IMPORTANCE_SAMPLING,
        "old_logprobs": GIVEN_OLD,
        "correction": _correction(CorrectionMode.TRUNCATE, CorrectionLevel.TOKEN, 1.15),
        "correction_mask": CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.95, high=1.05),
    },
}


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("figures")
    return make_pair(write_folder(root / "base", "qwen3"), scratch=root / "adapter")


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.discard()


@cache
def _batch(pair: Pair, seed: int, outcome: Outcome = "reward") -> RolloutBatch:
    """A random forest; the first group's rewards are equal, every third rollout is truncated."""
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, temperatures=(1.0, 0.7), vocab_size=VOCAB_SIZE, outcome=outcome)
    batch = validate_groups(groups, limits(vocab_size=VOCAB_SIZE))
    batch = near_policy(batch, pair.oracle.model, rng, noise=0.15)
    if batch.rewards is not None:
        rewards = batch.rewards + 1e6
        rewards[: batch.group_offsets[1]] = 1e6
        batch = replace(batch, rewards=rewards)
    return replace(batch, truncated=np.arange(batch.num_sequences) % 3 == 1)


_ALONE: dict[tuple[bytes, int, float], NDArray[np.float64]] = {}


def _logprobs(pair: Pair, paths: Sequence[Path]) -> list[NDArray[np.float64]]:
    """By the oracle's model, whose weights stay: each rollout is run once, by itself."""
    keys = [(path.tokens.tobytes(), len(path.prompt), path.temperature) for path in paths]
    for key, path in zip(keys, paths, strict=True):
        if key not in _ALONE:
            ((logprob, _),) = hf.all_logprobs(pair.oracle.model, [path])
            _ALONE[key] = logprob.numpy()
    return [_ALONE[key] for key in keys]


def _run(pair: Pair, batch: RolloutBatch, request: LossConfig, tokens: int = WHOLE) -> StepReport:
    """One forward-backward in micro-batches of so many packed tokens."""
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    trainer, plan = pair.trainer, cpu_planner(tokens)
    prepared = prepare.prepare(batch, loss, version=trainer.version, plan=plan)
    return trainer.forward_backward(prepared)


def _expected(
    pair: Pair, batches: Sequence[RolloutBatch], request: LossConfig
) -> dict[str, float | None]:
    paths = [path for batch in batches for path in paths_of(batch)]
    return figures(paths, _logprobs(pair, paths), oracle_loss(request, batches[0]))


def _assert_figures(report: StepReport, expected: dict[str, float | None]) -> None:
    for name, value in expected.items():
        got = getattr(report, name)
        if value is None or got is None:
            assert got is value, name
        elif name in QUANTILES:
            # The resolution that training.proto states.
            bound = max(abs(math.log(value)) / 16, 2.0**-20)
            assert abs(math.log(got) - math.log(value)) <= bound * (1 + 1e-9), name
        else:
            assert got == pytest.approx(value, rel=1e-9, abs=1e-10), name


def _assert_rollouts(
    pair: Pair, batch: RolloutBatch, request: LossConfig, report: StepReport
) -> None:
    """Every rollout's figures are its own, and of those that the report is made of."""
    paths = paths_of(batch)
    expected = rollout_figures(paths, _logprobs(pair, paths), oracle_loss(request, batch))
    assert pair.trainer.found is not None
    found = pair.trainer.found.figures
    for name in expected[0].keys() - {"is_at_ratio_max", "own"}:
        values = [float(each[name]) for each in expected]
        got = getattr(found, f"{name}_S").tolist()
        assert got == pytest.approx(values, rel=1e-9, abs=1e-10, nan_ok=True), name
    for s, each in enumerate(expected):
        token = int(found.ratio_max_token_S[s])
        at_max = each["own"][np.flatnonzero(each["is_at_ratio_max"])]
        assert token in at_max if len(at_max) else token == -1
    starts = batch.group_offsets[found.group_S]
    assert (starts + found.rollout_S).tolist() == list(range(batch.num_sequences))
    assert np.nanmax(found.gap_max_S) == report.sampler_gap_max
    run = [(len(each["own"]), held) for each, held in zip(expected, found.clipped_S, strict=True)]
    total = sum(tokens for tokens, _ in run)
    held = sum(tokens * share for tokens, share in run if tokens) / total
    assert report.clip_fraction_low is not None
    assert report.clip_fraction_high is not None
    assert held == pytest.approx(report.clip_fraction_low + report.clip_fraction_high, rel=1e-12)


@pytest.mark.parametrize("name", REQUESTS)
def test_figures_are_those_of_each_rollout_alone(pair: Pair, name: str) -> None:
    request, batch = LossConfig(**REQUESTS[name]), _batch(pair, 0)
    expected = _expected(pair, [batch], request)
    reports: list[StepReport] = []
    for tokens in (WHOLE, 40):
        report = _run(pair, batch, request, tokens)
        _assert_figures(report, expected)
        _assert_rollouts(pair, batch, request, report)
        reports.append(report)
        pair.discard()
    assert len({report.num_micro_batches for report in reports}) > 1
    for report in reports[1:]:
        for each in QUANTILES:
            first, other = getattr(reports[0], each), getattr(report, each)
            assert other == first or other == pytest.approx(first, rel=1e-12), each


def test_cases_reach_what_they_are_for(pair: Pair) -> None:
    """No oracle above compares nothing but zeros."""
    found = {
        name: _expected(pair, [_batch(pair, 0)], LossConfig(**fields))
        for name, fields in REQUESTS.items()
    }

    def share(case: str, name: str) -> float:
        value = found[case][name]
        assert value is not None
        return value

    assert 0 < share("grpo", "clip_fraction_dual") < 1
    assert 0 < share("mask_token", "correction_masked_fraction") < 1
    assert 0 < share("mask_sequence", "correction_masked_fraction") < 1
    assert 0 < share("truncate_token", "correction_truncated_fraction") < 1
    assert 0 < share("truncate_sequence", "correction_truncated_fraction") < 1
    assert 0 < share("truncate_token", "correction_ess_fraction") < 1
    assert 0 < share("truncated_beside_a_mask", "correction_masked_fraction") < 1
    assert 0 < share("truncated_beside_a_mask", "correction_truncated_fraction") < 1
    assert 0 < share("grpo", "zero_variance_fraction") < 1
    assert 0 < share("grpo", "truncated_fraction") < 1
    assert share("grpo", "reward_std") > 0.1
    assert share("grpo", "sampler_gap_mean") != share("grpo", "sampler_gap_abs_mean")
    assert found["reinforce"]["ratio_mean"] is None
    assert share("on_policy", "old_kl") == 0


def test_cross_entropy_has_neither_advantage_nor_ratio(pair: Pair) -> None:
    batch = replace(_batch(pair, 3, outcome="advantages"), advantages=None)
    request = LossConfig(kind=LossKind.CROSS_ENTROPY)
    report = _run(pair, batch, request)
    _assert_figures(report, _expected(pair, [batch], request))


@pytest.mark.parametrize("outcome", ["reward", "advantages"])
def test_report_of_a_step_is_of_its_whole_window(pair: Pair, outcome: Outcome) -> None:
    """Red before: an OptimStep after several ForwardBackwards had no reward and no counters."""
    request = LossConfig(kind=LossKind.GRPO, dual_clip=1.25)
    parts = [_batch(pair, seed, outcome) for seed in (4, 5, 6)]
    # Each call has groups of its own.
    parts = [
        replace(part, group_ids=tuple(f"{seed}-{name}" for name in part.group_ids))
        for seed, part in enumerate(parts)
    ]
    for part in parts:
        _run(pair, part, request, 50)
    step = resolve_optim(OptimStepConfig(learning_rate=0.0), pair.trainer.normalisation, ADAMW)
    report = pair.trainer.optim_step(step)
    _assert_figures(report, _expected(pair, parts, request))
    paths = [path for part in parts for path in paths_of(part)]
    counters = count(select(paths, oracle_loss(request, parts[0])))
    assert report.trained_tokens == counters.tokens
    assert report.num_sequences == counters.sequences
    assert report.num_groups == len(counters.groups)


def _kinds(report: StepReport) -> list[str]:
    return [warning.kind for warning in report.warnings]


@pytest.mark.parametrize("level", CorrectionLevel)
def test_mask_that_leaves_no_token_warns(pair: Pair, level: CorrectionLevel) -> None:
    """Red before: the report of a policy gradient of zero said nothing. Once, also of an Update."""
    batch = _batch(pair, 7)
    assert batch.sampler_logprobs is not None
    far = replace(batch, old_logprobs=np.minimum(batch.sampler_logprobs - 9.0, 0.0))
    rule = _correction(CorrectionMode.MASK, level, 1.15)
    request = LossConfig(kind=LossKind.GRPO, old_logprobs=GIVEN_OLD, correction=rule)
    masked = _run(pair, far, request, 50)
    assert masked.correction_masked_fraction == 1.0
    assert (masked.correction_weight_mean, masked.correction_ess_fraction) == (0.0, 0.0)
    assert masked.policy_gradient_loss == 0.0
    assert "silenced_all" in _kinds(masked)
    # Something else of the window is left: its step has no such warning.
    assert not _kinds(_run(pair, batch, request)).count("silenced_all")
    step = resolve_optim(OptimStepConfig(learning_rate=0.0), pair.trainer.normalisation, ADAMW)
    report = pair.trainer.optim_step(step)
    assert report.correction_weight_mean
    assert not _kinds(report).count("silenced_all")
    loss = resolve_loss(request, far, has_frozen_reference=True)
    updated = pair.trainer.update(pair.trainer.prepare(far, loss), step)
    assert _kinds(updated).count("silenced_all") == 1


def test_gradient_norms_of_tensors_are_of_what_the_step_takes(pair: Pair) -> None:
    """After division, before clipping; squares of norms add up to that of the whole norm."""
    batch, request = _batch(pair, 8), LossConfig(kind=LossKind.GRPO)
    for _ in range(2):
        _run(pair, batch, request, 50)
    gradients = pair.gradients()
    divisor = 2.0 * _run(pair, batch, request).num_sequences
    pair.discard()
    for _ in range(2):
        _run(pair, batch, request, 50)
    asked = OptimStepConfig(learning_rate=0.0, max_grad_norm=1e-3, tensor_grad_norms=True)
    report = pair.trainer.optim_step(resolve_optim(asked, pair.trainer.normalisation, ADAMW))
    found = {each.name: (each.norm, each.max_abs) for each in report.tensor_grad_norms}
    assert list(found) == list(gradients)
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"} <= found.keys()
    for name, gradient in gradients.items():
        divided = gradient.double() / divisor
        expected = float(divided.square().sum().sqrt()), float(divided.abs().max())
        assert 0 < expected[1] < expected[0], name
        assert found[name] == pytest.approx(expected, rel=1e-9), name
    square = sum(norm**2 for norm, _ in found.values())
    assert report.grad_norm == pytest.approx(math.sqrt(square), rel=1e-9)
    _run(pair, batch, request)
    unasked = replace(asked, tensor_grad_norms=False)
    report = pair.trainer.optim_step(resolve_optim(unasked, pair.trainer.normalisation, ADAMW))
    assert report.tensor_grad_norms == ()


@pytest.mark.parametrize("kind", [LossKind.IPO, LossKind.GRPO, LossKind.CISPO])
def test_clip_that_leaves_no_token_warns(pair: Pair, kind: LossKind) -> None:
    """Red before: only masks of a correction were looked at. A clip of cispo keeps gradients."""
    batch = _batch(pair, 7, "advantages")
    assert batch.old_logprobs is not None
    # Probabilities have risen by all there is to rise, against advantages that agree.
    old = np.full_like(batch.old_logprobs, -15.0)
    far = replace(batch, old_logprobs=old, advantages=np.ones_like(old))
    request = LossConfig(kind=kind, old_logprobs=GIVEN_OLD, clip_high=1e-9 + (kind == "cispo"))
    report = _run(pair, far, request, 50)
    assert report.clip_fraction_high == 1.0
    assert _kinds(report).count("silenced_all") == (kind is not LossKind.CISPO)
    assert (report.policy_gradient_loss == 0.0) == (kind is LossKind.IPO)


# Means over tokens, and ratios of what was run.
_OF_WHAT_WAS_RUN = (
    *("kl", "entropy", "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"),
    *("token_reduction", "attention_pair_reduction", "tokens_per_second"),
)


def _absent(report: StepReport) -> set[str]:
    names = ("loss", "policy_gradient_loss", *_OF_WHAT_WAS_RUN)
    return {name for name in names if getattr(report, name) is None}


def test_figures_of_rollouts_that_were_not_run_are_absent(pair: Pair) -> None:
    """They were 0, an entropy as of a policy that has collapsed; the losses are what they are."""
    batch = _batch(pair, 3, "advantages")
    assert batch.advantages is not None
    flat = replace(batch, advantages=np.zeros_like(batch.advantages))
    report = _run(pair, flat, LossConfig(kind=LossKind.GRPO))
    assert report.zero_advantage_sequences == report.num_sequences > 0
    assert (report.loss, report.policy_gradient_loss) == (0.0, 0.0)
    assert _absent(report) == {*_OF_WHAT_WAS_RUN}
    # Beside a batch that is run they are that one's.
    own = _run(pair, batch, LossConfig(kind=LossKind.GRPO))
    step = resolve_optim(OptimStepConfig(learning_rate=0.0), pair.trainer.normalisation, ADAMW)
    window = pair.trainer.optim_step(step)
    assert window.entropy == own.entropy
    assert _absent(window) == {
        *("kl", "token_reduction", "attention_pair_reduction", "tokens_per_second")
    }


@pytest.mark.parametrize("kind", [LossKind.DAPO, LossKind.REINFORCE])
def test_losses_of_no_token_are_absent(pair: Pair, kind: LossKind) -> None:
    """Whatever divides them: a sum that nothing divides is of nothing, too."""
    batch = replace(_batch(pair, 3), truncated=np.ones_like(_batch(pair, 3).truncated))
    report = _run(pair, batch, LossConfig(kind=kind, overlong=OverlongFilter()))
    assert report.trained_tokens == 0
    assert _absent(report) == {"loss", "policy_gradient_loss", *_OF_WHAT_WAS_RUN}
    step = resolve_optim(OptimStepConfig(learning_rate=0.0), pair.trainer.normalisation, ADAMW)
    window = pair.trainer.optim_step(step)
    assert _absent(window) == {"loss", "policy_gradient_loss", *_OF_WHAT_WAS_RUN}


def test_forward_has_no_loss_and_without_trained_tokens_no_entropy(pair: Pair) -> None:
    """Its loss and clip fractions were 0, and the mean entropy of no token was NaN."""
    batch = _batch(pair, 3)
    losses = {"loss", "policy_gradient_loss", "kl", *(n for n in _OF_WHAT_WAS_RUN if "clip" in n)}
    for mask_J, absent in (
        (batch.loss_mask, losses),
        (np.zeros_like(batch.loss_mask), losses | {*_OF_WHAT_WAS_RUN}),
    ):
        masked = replace(batch, loss_mask=mask_J)
        forward = pair.trainer.prepare_forward(masked)
        arrays = pair.trainer.forward(forward, with_entropy=True, use_reference=False)
        assert _absent(arrays.report) == absent
