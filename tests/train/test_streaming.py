"""Streamed updates: equivalence over plans of prefixes and waves, at every depth.

One streamed forward-backward against one unpadded Hugging Face run a rollout, in float64 unless
said otherwise; and log-probs of a streamed Forward.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ratoon.model.spec import ModelDtype
from ratoon.planner.costs import CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train import prepare
from ratoon.train.loss.resolve import resolve_loss
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMode,
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    ReferenceKind,
    RolloutCorrection,
    SharedTokens,
)
from tests.plans import make_plan
from tests.rollout.stages import num_ancestors
from tests.tiny_models import ROUTED, write_folder
from tests.train.equivalence_runs import (
    EAGER,
    WHOLE,
    Pair,
    check_step,
    check_window,
    make_pair,
    plan_of,
    random_batch_near,
)
from tests.train.trainer_runs import assert_same_found

# Prefixes of up to 6 tokens are joined to the one above.
JOINING = replace(EAGER, call=6.0)
GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
GRPO = LossConfig(kind=LossKind.GRPO, old_logprobs=GIVEN_OLD, entropy_coefficient=0.01)


def _depth(plan: UpdatePlan) -> int:
    return max(max(num_ancestors(part.stages), default=0) for part in plan.micro_batches)


def _check(
    pair: Pair,
    batch: RolloutBatch,
    request: LossConfig,
    *,
    budget: int,
    costs: CostModel = EAGER,
) -> UpdatePlan:
    """Streamed loss, counters and gradients are the oracle's; both windows stay open."""
    plan = plan_of(batch, budget, costs)
    assert _depth(plan) > 0, "nothing is streamed"
    check_window(pair, batch, request, plan=plan)
    return plan


@pytest.mark.parametrize(
    ("seed", "budget", "costs"),
    [
        (0, 1, EAGER),
        (1, 16, EAGER),
        (2, 30, EAGER),
        (1, 1, JOINING),
        (2, 16, JOINING),
        (0, 30, JOINING),
    ],
)
def test_streamed_gradients_are_those_of_each_rollout_alone(
    pair: Pair, seed: int, budget: int, costs: CostModel
) -> None:
    batch = random_batch_near(pair, seed, max_response=14)
    plan = _check(pair, batch, GRPO, budget=budget, costs=costs)
    if budget == 1 and costs is EAGER:
        assert _depth(plan) > 1


LOSSES = {
    "gspo": LossConfig(kind=LossKind.GSPO, old_logprobs=GIVEN_OLD),
    "sequence correction": LossConfig(
        kind=LossKind.DAPO,
        old_logprobs=GIVEN_OLD,
        drop_zero_variance_groups=False,
        correction=RolloutCorrection(
            mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.SEQUENCE, high=1.5, low=0.0
        ),
    ),
    "on-policy correction": LossConfig(
        kind=LossKind.REINFORCE,
        correction=RolloutCorrection(
            mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.SEQUENCE, high=1.5, low=0.0
        ),
    ),
    "shared tokens once": replace(GRPO, shared_tokens=SharedTokens.ONCE),
    "frozen reference": replace(
        GRPO, kl=KlConfig(kind=KlKind.K3, coefficient=0.1, reference=ReferenceKind.FROZEN)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_span_stages_are_exact(pair: Pair, name: str) -> None:
    """Terms of one sequence lie in prefixes and waves; prefixes are trained by many sequences."""
    batch, request = random_batch_near(pair, 23), LOSSES[name]
    _check(pair, batch, request, budget=12)
    streamed = pair.trainer.found
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    whole = plan_of(batch, WHOLE)
    assert not any(part.stages for part in whole.micro_batches)
    pair.trainer.forward_backward(pair.trainer.prepare(batch, loss, whole))
    assert_same_found(streamed, pair.trainer.found)


@pytest.mark.parametrize("seed", range(2))
def test_forests_of_two_letters_are_exact(pair: Pair, seed: int) -> None:
    """What one path trains is prompt or context in others; stages without any row come up."""
    batch = random_batch_near(pair, seed, vocab_size=2, max_prompt=4, num_groups=8)
    _check(pair, batch, GRPO, budget=5)


@pytest.mark.parametrize(
    "architecture",
    ["qwen2", "llama", "qwen3_moe", "olmo3", "gemma3", "qwen3_5", "qwen3_next", *ROUTED],
)
def test_architectures_are_exact(tmp_path: Path, architecture: str) -> None:
    pair = make_pair(write_folder(tmp_path / "base", architecture), scratch=tmp_path / "adapter")
    _check(pair, random_batch_near(pair, 3), GRPO, budget=14)


@pytest.mark.parametrize(
    ("architecture", "use_rslora", "targets"),
    [
        ("qwen3", False, ()),
        ("qwen3_moe", False, ()),
        ("qwen3_5", False, ()),
        # The factor is the adapter's alone: `test_three_steps_of_lora` has it.
        pytest.param("qwen3_moe", True, (), marks=pytest.mark.more),
        ("llama", False, ("q_proj", "embed_tokens", "lm_head")),
        ("qwen3", False, ("lm_head",)),
    ],
)
def test_lora_is_exact(
    tmp_path: Path, architecture: str, use_rslora: bool, targets: tuple[str, ...]
) -> None:
    tuning = LoraTuning(rank=3, alpha=6.0, use_rslora=use_rslora, target_modules=targets)
    folder = write_folder(tmp_path / "base", architecture)
    pair = make_pair(folder, scratch=tmp_path / "adapter", tuning=tuning)
    _check(pair, random_batch_near(pair, 4), GRPO, budget=14)
    if targets:
        # B is zero before the first step.
        check_step(pair, OptimStepConfig(learning_rate=1e-2), divide_by="sequences")
        for seed, request in enumerate((GRPO, LOSSES["gspo"], LOSSES["frozen reference"])):
            _check(pair, random_batch_near(pair, 5 + seed), request, budget=14)
            pair.discard()


def test_float32_is_as_exact_as_packed(tmp_path: Path) -> None:
    pair = make_pair(
        write_folder(tmp_path / "base", "qwen3"),
        scratch=tmp_path / "adapter",
        dtype=ModelDtype.FLOAT32,
    )
    _check(pair, random_batch_near(pair, 5), GRPO, budget=14)


def test_three_streamed_steps_equal_the_oracles(tmp_path: Path) -> None:
    pair = make_pair(write_folder(tmp_path / "base", "qwen3"), scratch=tmp_path / "adapter")
    for seed in range(3):
        _check(pair, random_batch_near(pair, 40 + seed), GRPO, budget=10 + 4 * seed)
        check_step(pair, OptimStepConfig(learning_rate=1e-2), divide_by="sequences")


def test_streamed_forward_gives_the_packed_logprobs(pair: Pair) -> None:
    batch = random_batch_near(pair, 6)
    is_run_S = prepare.has_trained_tokens(batch)
    prefixes = sort_sequences(batch)
    streamed = make_plan(batch, prefixes, is_run_S, 9, EAGER)
    assert _depth(streamed) > 1
    for use_reference in (False, True):
        got, expected = (
            pair.trainer.forward(
                pair.trainer.prepare_forward(batch, plan),
                with_entropy=True,
                use_reference=use_reference,
            )
            for plan in (streamed, make_plan(batch, prefixes, is_run_S, WHOLE))
        )
        assert np.abs(expected.logprobs).max() > 1
        assert got.entropy is not None
        assert expected.entropy is not None
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=1e-12)
        np.testing.assert_allclose(got.entropy, expected.entropy, rtol=0, atol=1e-12)
