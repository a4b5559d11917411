"""Equivalence, at the level of the optimizer: weights after three steps, however the work is cut.

Every test steps a trainer on packed forests and an oracle on single rollouts, and compares gradient
sums, gradient norms and weights after each step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ratoon.errors import RatoonError
from ratoon.model.spec import ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.selection import predicted_mask
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import resolve_empty, resolve_optim
from ratoon.train.saved_state import (
    NO_OPERATIONS,
    AsOf,
    copy_saved_state,
    read_saved_state,
)
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    Decay,
    DivideBy,
    FullTuning,
    KlConfig,
    KlKind,
    LogprobsOf,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    OverlongFilter,
    ReferenceKind,
    SharedTokens,
    TokenWeight,
)
from tests.builders import limits, random_groups
from tests.equivalence import assert_close, paths_of, relative_error, relative_errors
from tests.oracle import hf
from tests.tiny_models import ARCHITECTURES, write_folder
from tests.train.equivalence_runs import (
    ADAMW,
    VOCAB_SIZE,
    Pair,
    check_step,
    forward_backward,
    make_pair,
    make_request,
    oracle_loss,
    random_batch_near,
    rollouts_of,
    weight_errors,
)
from tests.work_units import rows

LORA = LoraTuning(rank=3, alpha=6.0)
RSLORA = LoraTuning(rank=3, alpha=4.0, use_rslora=True)
LORA_ATTENTION = LoraTuning(
    rank=3, alpha=6.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")
)
LORA_LATENT = LoraTuning(
    rank=3,
    alpha=6.0,
    target_modules=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)
# The LM head and the embedding, tied or not, alone and beside other maps.
LORA_HEAD = LoraTuning(rank=3, alpha=6.0, target_modules=("lm_head",))
LORA_EMBEDDING = LoraTuning(rank=3, alpha=6.0, target_modules=("embed_tokens", "q_proj"))
LORA_BOTH = LoraTuning(
    rank=3, alpha=4.0, use_rslora=True, target_modules=("down_proj", "embed_tokens", "lm_head")
)
LORA_BOTH_EXPERTS = LoraTuning(
    rank=3,
    alpha=6.0,
    target_modules=("gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"),
)
FROZEN_K3 = KlConfig(kind=KlKind.K3, coefficient=0.2, reference=ReferenceKind.FROZEN)
GRPO = LossConfig(kind=LossKind.GRPO, kl=FROZEN_K3, entropy_coefficient=0.01)
# Clipping and weight decay change from step to step.
STEPS = (
    OptimStepConfig(learning_rate=1e-2, max_grad_norm=0.05),
    OptimStepConfig(learning_rate=2e-2, weight_decay=0.3),
    OptimStepConfig(learning_rate=5e-3, max_grad_norm=1e6, weight_decay=0.0),
)


def _pair(
    root: Path,
    architecture: str = "qwen3",
    tuning: FullTuning | LoraTuning | None = None,
    dtype: ModelDtype = ModelDtype.FLOAT64,
) -> Pair:
    folder = write_folder(root / "base", architecture)
    return make_pair(folder, scratch=root / "adapter", tuning=tuning, dtype=dtype)


def _three_steps(pair: Pair, request: LossConfig = GRPO, *, micro_batch_tokens: int = 60) -> None:
    for seed, optim in enumerate(STEPS):
        batch = random_batch_near(pair, seed)
        forward_backward(pair, batch, request, micro_batch_tokens=micro_batch_tokens)
        assert_close(pair.gradient_errors(), pair.tolerance)
        check_step(pair, optim, divide_by=oracle_loss(request, batch).divide_by)
    assert pair.trainer.version == len(STEPS)


@pytest.mark.parametrize(
    "architecture", rows(ARCHITECTURES, ("qwen3", "gemma3", "qwen3_moe", "deepseek_v3", "qwen3_5"))
)
def test_three_steps_of_full_tuning(tmp_path: Path, architecture: str) -> None:
    """GQA everywhere, tied embeddings (qwen3, mistral, gemma3), biases (qwen2), experts
    (qwen3_moe), windows (olmo3, gemma3)."""
    _three_steps(_pair(tmp_path, architecture))


@pytest.mark.parametrize(
    ("architecture", "tuning"),
    rows(
        (
            *((name, LORA) for name in ("qwen3", "llama", "gemma3", "qwen3_moe", "qwen3_5")),
            *((name, LORA_ATTENTION) for name in ("qwen3_moe", "glm4_moe", "gpt_oss")),
            *((name, LORA_LATENT) for name in ("glm4_moe_lite",)),
            *((name, RSLORA) for name in ("qwen3", "qwen3_moe")),
            *((name, LORA_HEAD) for name in ("qwen3", "llama")),
            *((name, LORA_EMBEDDING) for name in ("qwen3", "llama", "gemma3")),
            *((name, LORA_BOTH) for name in ("qwen3", "llama", "gemma3", "qwen3_5")),
            ("qwen3_moe", LORA_BOTH_EXPERTS),
        ),
        now=(
            ("qwen3_moe", LORA),
            ("glm4_moe_lite", LORA_LATENT),
            ("qwen3", RSLORA),
            ("qwen3", LORA_HEAD),
            ("llama", LORA_BOTH),
            ("gemma3", LORA_BOTH),
            ("qwen3_moe", LORA_BOTH_EXPERTS),
        ),
    ),
)
def test_three_steps_of_lora(tmp_path: Path, architecture: str, tuning: LoraTuning) -> None:
    """The frozen reference is the adapter off."""
    _three_steps(_pair(tmp_path, architecture, tuning))


def test_three_steps_in_float32(tmp_path: Path) -> None:
    """Gradients are compared while the weights are the same bits: AdamW divides by small numbers,
    so that two float32 runs of whatever kind part with the first step."""
    pair = _pair(tmp_path, dtype=ModelDtype.FLOAT32)
    for seed in range(3):
        batch = random_batch_near(pair, seed)
        forward_backward(pair, batch, GRPO, micro_batch_tokens=60)
        if seed == 0:
            assert_close(pair.gradient_errors(), pair.tolerance)
        check_step(pair, OptimStepConfig(learning_rate=1e-3), divide_by="sequences")


@pytest.mark.parametrize("token_weight", TokenWeight)
def test_normalisations(tmp_path: Path, token_weight: TokenWeight) -> None:
    """Sums divided once, by a counter of the whole window; a pair that is no mean is refused.

    A mean over sequences of sums over tokens is verl's `seq-mean-token-sum`; over a constant too,
    it is Dr. GRPO.
    """
    pair = _pair(tmp_path)
    request = LossConfig(kind=LossKind.PPO_CLIP, token_weight=token_weight)
    for divide_by in DivideBy:
        for part in range(2):
            batch = random_batch_near(pair, part, num_groups=3)
            forward_backward(pair, batch, request, micro_batch_tokens=40)
        constant = 37.5 if divide_by is DivideBy.CONSTANT else None
        optim = OptimStepConfig(
            learning_rate=1e-2, divide_by=divide_by, divide_constant=constant, max_grad_norm=0.4
        )
        if (token_weight, divide_by) == (TokenWeight.PER_SEQUENCE, DivideBy.TOKENS):
            with pytest.raises(RatoonError, match=r"optim\.divide_by"):
                resolve_optim(optim, pair.trainer.normalisation, ADAMW)
            pair.discard()
            continue
        check_step(pair, optim, divide_by=str(divide_by))


@pytest.mark.parametrize(
    ("micro_batch_tokens", "shared_tokens"), [(1, SharedTokens.ONCE), (25, SharedTokens.SUM)]
)
def test_micro_batches_do_not_matter(
    tmp_path: Path, micro_batch_tokens: int, shared_tokens: SharedTokens
) -> None:
    pair = _pair(tmp_path)
    request = replace(GRPO, shared_tokens=shared_tokens)
    _three_steps(pair, request, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize(("parts", "divide_by"), [(4, DivideBy.GROUPS), (2, DivideBy.SEQUENCES)])
def test_groups_cut_into_calls_do_not_matter(
    tmp_path: Path, parts: int, divide_by: DivideBy
) -> None:
    """A group whose rollouts come in several ForwardBackwards is one group of the window."""
    pair = _pair(tmp_path)
    request = LossConfig(kind=LossKind.GRPO, kl=FROZEN_K3)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        groups = random_groups(
            rng, vocab_size=VOCAB_SIZE, kinds=("flat", "tree"), outcome="advantages"
        )
        whole = validate_groups(groups, limits(vocab_size=VOCAB_SIZE))
        for batch in rollouts_of(groups, parts=parts):
            loss = resolve_loss(request, batch, has_frozen_reference=True)
            pair.trainer.forward_backward(pair.trainer.prepare(batch, loss))
        frozen = hf.all_logprobs(pair.initial, paths_of(whole))
        paths = [
            replace(path, reference=logprob.numpy())
            for path, (logprob, _) in zip(paths_of(whole), frozen, strict=True)
        ]
        pair.oracle.forward_backward(paths, oracle_loss(request, whole))
        assert_close(pair.gradient_errors(), pair.tolerance)
        optim = OptimStepConfig(learning_rate=1e-2, divide_by=divide_by)
        check_step(pair, optim, divide_by=str(divide_by))


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO])
def test_sibling_order_does_not_matter(tmp_path: Path, kind: LossKind) -> None:
    """The trainer sees groups and rollouts shuffled, another way at each step."""
    pair = _pair(tmp_path)
    request = make_request(kind, kl=FROZEN_K3)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        groups = random_groups(rng, vocab_size=VOCAB_SIZE, num_groups=5)
        batch = validate_groups(groups, limits(vocab_size=VOCAB_SIZE))
        shuffled = [
            replace(group, rollouts=tuple(group.rollouts[n] for n in order))
            for group, order in ((group, rng.permutation(len(group.rollouts))) for group in groups)
        ]
        shuffled = [shuffled[g] for g in rng.permutation(len(groups))]
        other = validate_groups(shuffled, limits(vocab_size=VOCAB_SIZE))
        forward_backward(pair, other, request, micro_batch_tokens=60, oracle_batch=batch)
        assert_close(pair.gradient_errors(), pair.tolerance)
        check_step(
            pair,
            OptimStepConfig(learning_rate=1e-2),
            divide_by=oracle_loss(request, batch).divide_by,
        )


@pytest.mark.parametrize(
    ("kind", "tuning"), [(LossKind.PPO_CLIP, LORA), (LossKind.GSPO, FullTuning())], ids=str
)
def test_four_updates_reuse_one_forward(
    tmp_path: Path, kind: LossKind, tuning: FullTuning | LoraTuning
) -> None:
    """PPO's mini-epochs: old log-probs are the first weights' own, the ratio starts at 1."""
    pair = _pair(tmp_path, tuning=tuning)
    trainer, oracle = pair.trainer, pair.oracle
    batch = random_batch_near(pair, 40, outcome="reward")
    old = trainer.forward(trainer.prepare_forward(batch), with_entropy=True, use_reference=False)
    assert old.entropy is not None
    own = hf.all_logprobs(oracle.model, paths_of(batch))
    mask = torch.as_tensor(batch.loss_mask)
    for got, expected in (
        (old.logprobs, torch.cat([logprob for logprob, _ in own])),
        (old.entropy, torch.cat([entropy for _, entropy in own])),
    ):
        assert relative_error(torch.as_tensor(got), expected * mask) <= pair.tolerance
    request = LossConfig(
        kind=kind,
        kl=FROZEN_K3,
        old_logprobs=OldLogprobs(
            kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="forward-1"
        ),
    )
    paths = [
        replace(path, old=logprob.numpy(), reference=logprob.numpy())
        for path, (logprob, _) in zip(paths_of(batch), own, strict=True)
    ]
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    optim = OptimStepConfig(learning_rate=2e-2, max_grad_norm=1.0)
    ratios: list[float] = []
    for _ in range(4):
        step = resolve_optim(optim, loss.normalisation, ADAMW)
        report = trainer.update(trainer.prepare(batch, loss, old_logprobs_J=old.logprobs), step)
        sums = oracle.forward_backward(paths, oracle_loss(request, batch))
        divide_by = oracle_loss(request, batch).divide_by
        divisor = oracle.divisor(divide_by)
        norm = oracle.optim_step(
            learning_rate=step.learning_rate,
            divide_by=divide_by,
            max_grad_norm=optim.max_grad_norm,
        )
        assert report.grad_norm == pytest.approx(norm, rel=pair.tolerance)
        assert report.loss == pytest.approx(sums.total / divisor, rel=1e-8, abs=1e-12)
        assert_close(weight_errors(pair), pair.tolerance)
        assert report.ratio_max is not None
        ratios.append(report.ratio_max)
    frozen = trainer.forward(trainer.prepare_forward(batch), with_entropy=False, use_reference=True)
    initial = torch.cat([logprob for logprob, _ in own]) * mask
    assert relative_error(torch.as_tensor(frozen.logprobs), initial) <= pair.tolerance
    assert ratios[0] == pytest.approx(1.0, abs=1e-12)
    assert all(ratio > 1.001 for ratio in ratios[1:])


@pytest.mark.parametrize("architecture", rows(("qwen2", "qwen3_moe", "olmo3"), now=("qwen2",)))
def test_norms_and_biases_need_not_decay(tmp_path: Path, architecture: str) -> None:
    """The oracle tells them by the classes of their modules."""
    folder = write_folder(tmp_path / "base", architecture)
    config = replace(ADAMW, decay=Decay.MATRICES)
    pair = make_pair(folder, scratch=tmp_path / "adapter", optimizer=config)
    kept = {
        id(parameter)
        for module in pair.oracle.model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "Norm" in type(module).__name__ or name == "bias"
    }
    assert 0 < len(kept) < len(pair.oracle.parameters())
    pair.oracle.decay_only(lambda parameter: id(parameter) not in kept)
    _three_steps(pair)


def test_a_step_without_a_gradient_decays(tmp_path: Path) -> None:
    """As torch's AdamW on zeros: the moments decay and move the weights, weight decay applies.

    So it is without a forward-backward, and with one none of whose tokens counts."""
    pair = _pair(tmp_path)
    trainer = pair.trainer
    forward_backward(pair, random_batch_near(pair, 0), GRPO)
    check_step(pair, STEPS[0], divide_by="sequences")
    dropped = random_batch_near(pair, 1)
    dropped = replace(dropped, truncated=np.ones(dropped.num_sequences, np.bool_))
    request = OptimStepConfig(learning_rate=1e-2, weight_decay=0.3, divide_constant=7.0)
    empty = replace(resolve_empty(request, ADAMW), allow_empty=True)
    for is_open in (False, True):
        if is_open:
            loss = resolve_loss(
                LossConfig(kind=LossKind.PPO_CLIP, overlong=OverlongFilter()),
                dropped,
                has_frozen_reference=True,
            )
            trainer.forward_backward(trainer.prepare(dropped, loss))
        before = {name: p.detach().clone() for name, p in pair.oracle.parameters().items()}
        report = trainer.optim_step(empty)
        pair.oracle.optim_step(learning_rate=1e-2, divide_by="none", weight_decay=0.3)
        assert (report.skipped, report.grad_norm, report.loss) == (False, 0.0, None)
        assert_close(weight_errors(pair), pair.tolerance)
        after = {name: p.detach() for name, p in pair.oracle.parameters().items()}
        assert min(relative_errors(before, after).values()) > 1e-4
    assert trainer.version == 3
    with pytest.raises(RatoonError, match="no ForwardBackward"):
        trainer.optim_step(replace(empty, allow_empty=False))


def _with_idle_rollouts(batch: RolloutBatch) -> RolloutBatch:
    """Every third rollout has no advantage, every fourth is truncated, every fifth token masked."""
    assert batch.advantages is not None
    sequence_J = np.repeat(np.arange(batch.num_sequences), np.diff(batch.response_offsets))
    return replace(
        batch,
        advantages=np.where(sequence_J % 3 == 0, np.float32(0), batch.advantages),
        truncated=np.arange(batch.num_sequences) % 4 == 1,
        loss_mask=batch.loss_mask & (np.arange(len(sequence_J)) % 5 != 4),
    )


@pytest.mark.parametrize(
    ("kind", "micro_batch_tokens", "architecture"),
    [
        (LossKind.PPO_CLIP, 1 << 20, "qwen3"),
        (LossKind.PPO_CLIP, 25, "qwen3"),
        (LossKind.GSPO, 1 << 20, "gemma3"),
        (LossKind.GSPO, 25, "qwen3_moe"),
    ],
    ids=str,
)
def test_a_pass_answers_log_probs(
    tmp_path: Path, kind: LossKind, micro_batch_tokens: int, architecture: str
) -> None:
    """Masked and dropped tokens, and those without an advantage, have the oracle's log-probs and
    entropies, and no part in the loss; those of trained tokens alone change no bit of the pass."""
    pair = _pair(tmp_path, architecture)
    batch = _with_idle_rollouts(random_batch_near(pair, 3))
    request = make_request(kind, overlong=OverlongFilter(), entropy_coefficient=0.0)
    gradients: dict[LogprobsOf | None, dict[str, torch.Tensor]] = {}
    oracle_JJ = hf.all_logprobs(pair.oracle.model, paths_of(batch))
    logprob_J, entropy_J = (torch.cat(each).numpy() for each in zip(*oracle_JJ, strict=True))
    for asked in (None, LogprobsOf.TRAINED, LogprobsOf.ALL):
        options = {"micro_batch_tokens": micro_batch_tokens, "logprobs_of": asked}
        report, sums = forward_backward(pair, batch, request, **options)
        assert_close(pair.gradient_errors(), pair.tolerance)
        counted = (report.trained_tokens, report.num_sequences)
        assert counted == (sums.counters.tokens, sums.counters.sequences)
        gradients[asked] = pair.gradients()
        found = pair.trainer.found
        assert found is not None
        if asked is None:
            assert found.answers_2J is None
        elif found.answers_2J is not None:
            is_trained_J = ~np.isnan(found.columns_4J[0])
            is_known_J = predicted_mask(batch) if asked is LogprobsOf.ALL else is_trained_J
            assert (np.isnan(found.answers_2J) == ~is_known_J).all()
            assert 0 < is_trained_J.sum() < batch.loss_mask.sum() < predicted_mask(batch).sum()
            np.testing.assert_allclose(
                found.answers_2J[:, is_known_J],
                np.stack([logprob_J, entropy_J])[:, is_known_J],
                rtol=pair.tolerance,
                atol=pair.tolerance,
            )
        pair.discard()
    for name, expected in gradients[None].items():
        assert torch.equal(gradients[LogprobsOf.TRAINED][name], expected)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_steps_of_a_new_policy_go_on_from_a_checkpoint(
    tmp_path: Path, with_optimizer: bool
) -> None:
    """Weights, and moments and their counter where they come along, are those of the source."""
    pair = _pair(tmp_path)
    forward_backward(pair, random_batch_near(pair, 0), GRPO)
    check_step(pair, STEPS[0], divide_by="sequences")
    pair.trainer.snapshot().write(tmp_path / "checkpoint", AsOf(seq=57, replay_from_seq=56))
    spec = pair.trainer.spec
    spec = replace(spec, model=replace(spec.model, seed=9))
    copy_saved_state(tmp_path / "checkpoint", tmp_path / "copy", spec.model)
    saved = read_saved_state(tmp_path / "copy")
    assert (saved.version, saved.as_of) == (0, NO_OPERATIONS)
    assert saved.state_digest == pair.trainer.state_digest()
    new = replace(pair, trainer=Trainer.create(spec))
    new.trainer.load_checkpoint(tmp_path / "copy")
    assert new.trainer.state_digest() == saved.state_digest
    if not with_optimizer:
        new.trainer.reset_optimizer()
        pair.oracle.forget_moments()
    for seed, optim in enumerate(STEPS[1:], start=1):
        forward_backward(new, random_batch_near(new, seed), GRPO)
        check_step(new, optim, divide_by="sequences")
    assert new.trainer.version == len(STEPS) - 1


def test_steps_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    """Moments, counter and weights come back: the steps after are the oracle's."""
    pair = _pair(tmp_path)
    forward_backward(pair, random_batch_near(pair, 0), GRPO)
    check_step(pair, STEPS[0], divide_by="sequences")
    (tmp_path / "checkpoints").mkdir()
    pair.trainer.snapshot().write(tmp_path / "checkpoints" / "1")
    resumed = replace(pair, trainer=Trainer.create(pair.trainer.spec))
    assert max(weight_errors(resumed).values()) > pair.tolerance
    resumed.trainer.load_checkpoint(tmp_path / "checkpoints" / "1")
    for seed, optim in enumerate(STEPS[1:], start=1):
        forward_backward(resumed, random_batch_near(resumed, seed), GRPO)
        check_step(resumed, optim, divide_by="sequences")
    assert resumed.trainer.version == len(STEPS)
