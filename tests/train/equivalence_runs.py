"""A trainer and an oracle with the same weights, run side by side and compared.

In: model folders, loss and step requests, batches. Out: nothing; a difference is an AssertionError.
Invariant: the oracle gets its defaults from its own table, not from the code under test.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.planner.costs import DEFAULT_COSTS, CostModel
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.raw import RawGroup, RawRollout
from ratoon.rollout.validate import validate_groups
from ratoon.train import prepare
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.ranks.rank import Rank
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    CorrectionMode,
    FullTuning,
    LogprobsOf,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    StepReport,
)
from tests.builders import limits, random_groups
from tests.equivalence import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    assert_close,
    near_policy,
    paths_of,
    relative_errors,
)
from tests.oracle import hf
from tests.oracle.adamw import OracleTrainer, Sums
from tests.oracle.paths import Correction, OracleLoss, Overlong, default_loss
from tests.plans import make_plan
from tests.train.rank_runs import ranked, together
from tests.train.trainer_runs import make_trainer

WHOLE = 1 << 20
# Calls cost nothing, so whatever does not fit is streamed and every small prefix stays apart.
EAGER = CostModel(pair=1e-3, row=0.1, call=0.0, resident=0.0)
# At once, cut, and in stages of one node, or few, each.
CUTS = {
    "whole": (WHOLE, DEFAULT_COSTS),
    "cut": (40, DEFAULT_COSTS),
    "streamed": (16, EAGER),
    "a token at a time": (1, EAGER),
}
ADAMW = AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
VOCAB_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two sides; `initial` is a second oracle model that keeps the first weights."""

    trainer: Trainer
    oracle: OracleTrainer
    initial: torch.nn.Module
    tolerance: float

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names with one of them may have zero gradients: LoRA's A while its B is zero, and an
        embedding's B while its A is."""
        return () if self.trainer.version else (".lora_A.", ".lora_embedding_B.")

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the trainer's gradient sums by name."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.trainer.model.named_trainable().items()
        }

    def gradient_errors(self) -> dict[str, float]:
        return relative_errors(
            self.gradients(), self.oracle.gradients(), may_be_zero=self.may_be_zero
        )

    def discard(self) -> None:
        self.trainer.discard_gradients()
        self.oracle.discard()


def make_pair(
    folder: Path,
    *,
    scratch: Path,
    tuning: FullTuning | LoraTuning | None = None,
    dtype: ModelDtype = ModelDtype.FLOAT64,
    micro_batch_tokens: int = WHOLE,
    attention: str = "eager",
    optimizer: AdamWConfig = ADAMW,
    value_head: bool = False,
) -> Pair:
    """Load the folder on both sides; an adapter is made by the trainer and read by the oracle."""
    tuning = FullTuning() if tuning is None else tuning
    is_lora = isinstance(tuning, LoraTuning)
    base = FolderBase(folder=str(folder))
    trainer = Trainer.create(
        TrainerSpec(
            model=ModelSpec(base=base, tuning=tuning, dtype=dtype, seed=3, value_head=value_head),
            optimizer=optimizer,
            deterministic=True,
            micro_batch_tokens=micro_batch_tokens,
            keep_reference=not is_lora,
            attention_backend="reference",
            device="cpu",
            num_threads=1,
        )
    )
    is_double = dtype is ModelDtype.FLOAT64
    torch_dtype = torch.float64 if is_double else torch.float32
    model = hf.load(folder, dtype=torch_dtype, attention=attention)
    initial = copy.deepcopy(model)
    if is_lora:
        scratch.mkdir()
        export_weights(trainer.model, scratch)
        model = hf.with_adapter(model, scratch)
    if value_head:
        hf.add_value_head(model, folder / "value_head" / "model.safetensors")
    oracle = OracleTrainer(
        model,
        betas=(ADAMW.beta1, ADAMW.beta2),
        eps=ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
    )
    return Pair(
        trainer=trainer,
        oracle=oracle,
        initial=initial,
        tolerance=FLOAT64_TOLERANCE if is_double else FLOAT32_TOLERANCE,
    )


def random_batch_near(pair: Pair, seed: int, *, noise: float = 0.2, **knobs: Any) -> RolloutBatch:
    """Four random groups (tree of depth 3, equal, prefix, empty, N = 1, P = 0) near the policy."""
    rng = np.random.default_rng(seed)
    fields = {"num_groups": 4, "temperatures": (1.0, 0.7), "outcome": "advantages"}
    fields |= {"vocab_size": VOCAB_SIZE} | knobs
    groups = random_groups(rng, **fields)
    batch = validate_groups(groups, limits(vocab_size=VOCAB_SIZE))
    return near_policy(batch, pair.oracle.model, rng, noise=noise)


def make_request(kind: LossKind, **changes: Any) -> LossConfig:
    """Request of a loss with its defaults; gspo, which has none, is told its old log-probs."""
    if kind is LossKind.GSPO:
        changes = {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.SAMPLER)} | changes
    return LossConfig(kind=kind, **changes)


def oracle_loss(request: LossConfig, batch: RolloutBatch) -> OracleLoss:
    """The oracle's loss of a request; whatever the request leaves out is the oracle's default."""
    fields: dict[str, Any] = {
        "clip_low": request.clip_low,
        "clip_high": request.clip_high,
        "dual_clip": request.dual_clip,
        "tau_positive": request.tau_positive,
        "tau_negative": request.tau_negative,
        "token_weight": request.token_weight,
        "drop_zero_variance": request.drop_zero_variance_groups,
        "advantage": request.advantage,
        "top_entropy_share": request.top_entropy_share,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if request.advantage is None and batch.advantages is not None:
        fields["advantage"] = "given"
    if request.old_logprobs is not None:
        kind = str(request.old_logprobs.kind)
        fields["old"] = "given" if kind == "from_forward" else kind
    elif request.kind == "reinforce" and (request.correction or request.correction_mask):
        fields["old"] = "on_policy"
    if request.kl is not None:
        fields |= {"kl": str(request.kl.kind), "kl_coefficient": request.kl.coefficient}
        fields["kl_weighted"] = request.kl.importance_weighted
    if request.distillation is not None:
        asked = request.distillation
        fields["divergence"] = str(asked.divergence)
        fields["divergence_coefficient"] = asked.coefficient
        fields["beta"] = 0.5 if asked.beta is None else asked.beta
    if request.value is not None:
        fields["value_coefficient"] = request.value.coefficient
        fields["value_clip"] = request.value.clip
    if request.correction is not None:
        rule = request.correction
        is_mask = rule.mode is CorrectionMode.MASK
        fields["correction"] = Correction(
            mode=str(rule.mode), level=str(rule.level), low=rule.low * is_mask, high=rule.high
        )
    if request.correction_mask is not None:
        mask = request.correction_mask
        fields["correction_mask"] = Correction(
            mode="mask", level=str(mask.level), low=mask.low, high=mask.high
        )
    if isinstance(request.overlong, OverlongPenalty):
        rule = request.overlong
        fields["overlong"] = Overlong(
            max_tokens=rule.max_tokens, buffer_tokens=rule.buffer_tokens, scale=rule.scale
        )
    return default_loss(
        str(request.kind),
        entropy_coefficient=request.entropy_coefficient,
        shared=str(request.shared_tokens),
        filter_truncated=isinstance(request.overlong, OverlongFilter),
        max_versions=None if request.staleness is None else request.staleness.max_versions,
        **fields,
    )


def plan_of(
    batch: RolloutBatch, budget: int, costs: CostModel = DEFAULT_COSTS, *, num_ranks: int = 1
) -> UpdatePlan:
    """Micro-batches of so many tokens of all that is trained; with EAGER some are streamed."""
    kept_S, prefixes = prepare.has_trained_tokens(batch), sort_sequences(batch)
    plan = make_plan(batch, prefixes, kept_S, budget, costs, num_ranks=num_ranks)
    assert costs is not EAGER or any(part.stages for part in plan.micro_batches)
    return plan


def forward_backward(
    pair: Pair,
    batch: RolloutBatch,
    request: LossConfig,
    *,
    micro_batch_tokens: int = WHOLE,
    plan: UpdatePlan | None = None,
    forward_logprobs_J: np.ndarray[Any, Any] | None = None,
    forward_entropy_J: np.ndarray[Any, Any] | None = None,
    oracle_batch: RolloutBatch | None = None,
    logprobs_of: LogprobsOf | None = None,
) -> tuple[StepReport, Sums]:
    """One forward-backward on both sides, by `plan` or by one of micro-batches of so many tokens.

    `oracle_batch`: what the oracle sees in the batch's place.
    """
    trainer = pair.trainer
    has_head = trainer.spec.model.value_head
    loss = resolve_loss(request, batch, has_frozen_reference=True, has_value_head=has_head)
    prepared = prepare.prepare(
        batch,
        loss,
        version=trainer.version,
        plan=cpu_planner(micro_batch_tokens) if plan is None else plan,
        old_logprobs_J=forward_logprobs_J,
        entropy_J=forward_entropy_J,
        logprobs_of=logprobs_of,
    )
    report = trainer.forward_backward(prepared)
    paths = paths_of(oracle_batch or batch)
    if forward_logprobs_J is not None:
        offsets = batch.response_offsets
        paths = [
            replace(path, old=forward_logprobs_J[start:stop].astype(np.float64))
            for path, start, stop in zip(paths, offsets[:-1], offsets[1:], strict=True)
        ]
    if forward_entropy_J is not None:
        paths = [
            replace(path, entropy=entropy)
            for path, entropy in zip(
                paths, np.split(forward_entropy_J, batch.response_offsets[1:-1]), strict=True
            )
        ]
    if request.kl is not None and request.kl.reference is ReferenceKind.FROZEN:
        # Which routes by itself.
        frozen = hf.all_logprobs(pair.initial, [replace(path, routes=None) for path in paths])
        paths = [
            replace(path, reference=logprob.numpy())
            for path, (logprob, _) in zip(paths, frozen, strict=True)
        ]
    return report, pair.oracle.forward_backward(paths, oracle_loss(request, batch))


def assert_same_report(
    report: StepReport, sums: Sums, divisor: float, *, token_weight: str, tolerance: float
) -> None:
    """Counters, losses over the divisor, and means over the weights of what was run agree."""
    counters = sums.counters
    got = (report.trained_tokens, report.num_sequences, report.num_groups)
    assert got == (counters.tokens, counters.sequences, len(counters.groups))
    # The weights of a path's terms add up to their number or to one.
    weight = counters.tokens if token_weight == "per_token" else counters.sequences
    assert (report.loss is None, report.entropy is None) == (counters.tokens == 0, sums.weight == 0)
    pairs = [
        ((report.loss or 0.0) * divisor, sums.total),
        ((report.policy_gradient_loss or 0.0) * divisor, sums.policy_gradient),
        ((report.entropy or 0.0) * sums.weight, sums.entropy),
        ((report.kl or 0.0) * weight, sums.kl),
    ]
    scale = abs(sums.policy_gradient) + abs(sums.kl) + abs(sums.entropy)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, abs=tolerance * scale)


def default_divisor(request: LossConfig, batch: RolloutBatch, sums: Sums) -> float:
    """What the report of one forward-backward divides its losses by."""
    counters = sums.counters
    return {
        "tokens": float(counters.tokens),
        "sequences": float(counters.sequences),
        "constant": 1.0,
        "none": 1.0,
    }[oracle_loss(request, batch).divide_by]


def check_gradients(
    pair: Pair,
    batch: RolloutBatch,
    request: LossConfig,
    *,
    micro_batch_tokens: int = WHOLE,
    plan: UpdatePlan | None = None,
) -> None:
    """`check_window`, of windows that are discarded after."""
    check_window(pair, batch, request, micro_batch_tokens=micro_batch_tokens, plan=plan)
    pair.discard()


def check_window(
    pair: Pair,
    batch: RolloutBatch,
    request: LossConfig,
    *,
    micro_batch_tokens: int = WHOLE,
    plan: UpdatePlan | None = None,
) -> None:
    """Loss, counters and every parameter's gradient sum are the oracle's; windows stay open."""
    report, sums = forward_backward(
        pair, batch, request, micro_batch_tokens=micro_batch_tokens, plan=plan
    )
    assert sums.counters.tokens > 0
    assert_close(pair.gradient_errors(), pair.tolerance)
    assert_same_report(
        report,
        sums,
        default_divisor(request, batch, sums),
        token_weight=oracle_loss(request, batch).token_weight,
        tolerance=pair.tolerance,
    )


def run_two_ranks(
    base: FolderBase, batch: RolloutBatch, loss: Loss, *, is_joint: bool
) -> tuple[StepReport, StepReport]:
    """Reports of two ranks and of one device, whose gradients are the same.

    The ranks run micro-batches of their own, or all together, streamed.
    """
    alone = make_trainer(base)
    with ranked(alone.spec, 2) as (many, _):
        if is_joint:
            plan = together(plan_of(batch, 16, EAGER), 2)
        else:
            plan = plan_of(batch, 40, num_ranks=2)
            assert {part.rank for part in plan.micro_batches} == {0, 1}
        report = many.forward_backward(many.prepare(batch, loss, plan))
        sums = [*many.ranks.all(Rank.sums_of, [*many.model.named_trainable()])]
    one = alone.forward_backward(alone.prepare(batch, loss, plan_of(batch, WHOLE)))
    parameters = alone.model.named_trainable()
    got = {name: sum(each[i] for each in sums) for i, name in enumerate(parameters)}
    expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert_close(relative_errors(got, expected), FLOAT64_TOLERANCE)  # type: ignore[arg-type]
    return report, one


def check_step(pair: Pair, optim: OptimStepConfig, *, divide_by: str) -> None:
    """Step both windows; gradient norm and weights agree, and every weight has moved.

    `divide_by` is what the oracle divides by; `optim` may leave it to the loss's default.
    """
    before = {name: p.detach().clone() for name, p in pair.oracle.parameters().items()}
    may_be_zero = pair.may_be_zero
    step = resolve_optim(optim, pair.trainer.normalisation, ADAMW)
    report = pair.trainer.optim_step(step)
    norm = pair.oracle.optim_step(
        learning_rate=step.learning_rate,
        divide_by=divide_by,
        constant=optim.divide_constant,
        max_grad_norm=optim.max_grad_norm,
        weight_decay=optim.weight_decay,
    )
    assert not report.skipped
    assert report.grad_norm == pytest.approx(norm, rel=10 * pair.tolerance)
    assert_close(weight_errors(pair), pair.tolerance)
    after = {name: p.detach() for name, p in pair.oracle.parameters().items()}
    moved = relative_errors(before, after, may_be_zero=may_be_zero)
    assert min(moved.values()) > 10 * pair.tolerance


def weight_errors(pair: Pair) -> dict[str, float]:
    """How far the two sides' weights are apart, by name."""
    theirs = {name: p.detach() for name, p in pair.oracle.parameters().items()}
    ours = {name: p.detach() for name, p in pair.trainer.model.named_trainable().items()}
    return relative_errors(ours, theirs)


def rollouts_of(groups: Sequence[RawGroup], *, parts: int) -> list[RolloutBatch]:
    """The groups as that many batches; each group's rollouts are dealt out over all of them."""
    batches: list[RolloutBatch] = []
    for part in range(parts):
        dealt = [replace(group, rollouts=group.rollouts[part::parts]) for group in groups]
        dealt = [group for group in dealt if any(is_trained(raw) for raw in group.rollouts)]
        if dealt:
            batches.append(validate_groups(dealt, limits(vocab_size=VOCAB_SIZE)))
    return batches


def is_trained(raw: RawRollout) -> bool:
    """Whether the rollout has a trained token."""
    if raw.loss_mask is not None:
        return bool(raw.loss_mask.any())
    return any(segment.trained and len(segment.tokens) for segment in raw.segments)
