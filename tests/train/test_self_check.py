"""The self-check: silent where packing is right, loud where it is not, and nowhere to be felt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model import layers
from ratoon.model.loader import read_model
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.planner.waves import cut_into_stages
from ratoon.rollout.batch import RolloutBatch, sent_field, sequence_lengths
from ratoon.rollout.forest import build_forest
from ratoon.rollout.validate import validate_groups
from ratoon.train import passes, self_check
from ratoon.train.gradient_window import WindowState
from ratoon.train.micro_batches import to_device
from ratoon.train.passes import train_rows
from ratoon.train.self_check import LIMITS, sample_rollout
from ratoon.train.spec import PassHooks
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    FullTuning,
    KlConfig,
    KlKind,
    LoraTuning,
    LossKind,
    ReferenceKind,
    SelfCheckReport,
    SharedTokens,
    StepReport,
)
from tests.model.compiled import eager_graphs
from tests.tiny_models import write_folder
from tests.train.test_equivalence_mutations import _mask_off_by_one, _packed_index_as_position
from tests.train.trainer_runs import (
    FROZEN,
    SHORT,
    assert_equal,
    bad_groups,
    gradients_of,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)

Patch = pytest.MonkeyPatch
KL = KlConfig(kind=KlKind.K3, coefficient=0.3, reference=ReferenceKind.GIVEN)
EVERY_DTYPE = (ModelDtype.FLOAT64, ModelDtype.FLOAT32, ModelDtype.BFLOAT16)


def watched(base: Any, *, every: int = 1, **options: Any) -> Trainer:
    """A trainer with a self-check at every `every`th version."""
    trainer = make_trainer(base, **options)
    trainer.spec = replace(trainer.spec, self_check_every=every)
    return trainer


def run(trainer: Trainer, batch: RolloutBatch, kind: LossKind, **changes: Any) -> StepReport:
    """One forward-backward whose gradients are let go."""
    loss = make_loss(batch, kind, **changes)
    report = trainer.forward_backward(trainer.prepare(batch, loss))
    trainer.discard_gradients()
    return report


def update(trainer: Trainer, batch: RolloutBatch) -> StepReport:
    loss = make_loss(batch)
    return trainer.update(trainer.prepare(batch, loss), make_step(trainer, loss))


def self_check_of(report: StepReport) -> SelfCheckReport:
    assert report.self_check is not None
    return report.self_check


def alarms(report: StepReport) -> list[str]:
    return [str(each) for each in report.warnings if each.kind == "self_check_exceeded"]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*(("qwen3", dtype) for dtype in EVERY_DTYPE), ("qwen2", ModelDtype.FLOAT32)],
)
def test_healthy_runs_are_below_the_limits(
    tmp_path: Path, architecture: str, dtype: ModelDtype
) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path / "model", architecture)))
    trainer = watched(base, dtype=dtype, tokens=200)
    kinds = (LossKind.GRPO, LossKind.REINFORCE, LossKind.GSPO, LossKind.CISPO)
    worst = 0.0
    for version, kind in enumerate(kinds):
        trainer.version = version
        batch = make_batch(version, max_response=10 + 10 * version)
        shared = SharedTokens.ONCE if version == 1 else SharedTokens.SUM
        report = run(trainer, batch, kind, kl=KL if version % 2 else None, shared_tokens=shared)
        found = self_check_of(report)
        assert not alarms(report)
        assert not found.exceeds_limits
        assert found.seconds > 0
        assert found.gradient_difference is not None
        worst = max(worst, found.gradient_difference)
    # The two runs round differently somewhere, as a run compared with itself would not.
    assert worst > 0


def _first_tokens_lost(patch: Patch) -> None:
    """The first token of every node of a forest is another: a gather that is off by one."""

    def lossy(packed: Any, *others: Any, **options: Any) -> Any:
        batch = to_device(packed, *others, **options)
        if len(packed.forest.sequences) == 1:
            return batch
        tokens_T = batch.tokens_T.clone()
        tokens_T[packed.forest.node_start] = 0
        return replace(batch, tokens_T=tokens_T)

    patch.setattr(passes, "to_device", lossy)


@pytest.mark.parametrize(
    ("mutate", "dtype"),
    [
        *((_packed_index_as_position, dtype) for dtype in EVERY_DTYPE),
        (_mask_off_by_one, ModelDtype.FLOAT32),
        (_first_tokens_lost, ModelDtype.BFLOAT16),
    ],
)
def test_a_planted_fault_is_seen(
    base: FolderBase, monkeypatch: Patch, dtype: ModelDtype, mutate: Callable[[Patch], None]
) -> None:
    """Not every rollout feels every fault (the first leaf is where it would be alone): of eight
    self-checks some do, by log-probs and by gradients."""
    trainer = watched(base, dtype=dtype, tokens=1000)
    mutate(monkeypatch)
    found: list[SelfCheckReport] = []
    for version in range(8):
        trainer.version = version
        report = run(trainer, make_batch(50), LossKind.GRPO)
        found.append(self_check_of(report))
        assert bool(alarms(report)) == found[-1].exceeds_limits
    loud = [one for one in found if one.exceeds_limits]
    assert len(loud) >= 3
    limits = LIMITS[dtype]
    assert max(one.logprob_mean_difference for one in loud) > limits.logprob_mean
    assert max(one.gradient_difference or 0.0 for one in loud) > limits.gradient


def test_a_fault_of_the_backward_alone_is_seen(base: FolderBase, monkeypatch: Patch) -> None:
    """Log-probs are right and one gradient is not: only the self-check's gradient tells."""
    trainer = watched(base, dtype=ModelDtype.FLOAT32, tokens=1000)

    def scaled(model: Any, packed: Any, batch: Any, loss: Any, clock: Any) -> Any:
        def scaled_of(*args: Any) -> Any:
            found = loss.of(*args)
            return replace(found, grad_logprob_L=found.grad_logprob_L * 1.01)

        is_packed = len(batch.tokens_T) > 40
        given: Any = SimpleNamespace(of=scaled_of, sums=loss.sums) if is_packed else loss
        return train_rows(model, packed, batch, given, clock)

    monkeypatch.setattr(passes, "train_rows", scaled)
    batch = make_batch(50)
    report = run(trainer, batch, LossKind.GRPO)
    found = self_check_of(report)
    assert found.logprob_max_difference <= LIMITS[ModelDtype.FLOAT32].logprob_max
    assert found.gradient_difference == pytest.approx(0.01, rel=1e-3)
    assert found.worst_parameter in trainer.model.named_trainable()
    (alarm,) = alarms(report)
    assert "gradient difference 0.01 > 0.001" in alarm
    assert f"{sent_field(batch, found.sequence)} is" in alarm


def test_the_gradient_is_that_of_the_rollout_alone(base: FolderBase) -> None:
    """The denominator is the loss gradient of the sampled rollout and of no other: a batch in which
    all others have no advantage gives the same one."""
    trainer = watched(base, every=0)
    batch = make_batch(8)
    loss = make_loss(batch, LossKind.REINFORCE)
    prepared = trainer.prepare(batch, loss)
    sequence = sample_rollout(prepared, trainer.spec.model.seed)
    assert sequence is not None
    assert batch.advantages is not None
    norms: list[float] = []
    original = self_check._norms

    def recorded(gradients: Any) -> dict[str, float]:
        found = original(gradients)
        norms.append(float(np.linalg.norm(list(found.values()))))
        return found

    start, stop = batch.response_offsets[sequence : sequence + 2]
    only = np.zeros_like(batch.advantages)
    only[start:stop] = batch.advantages[start:stop]
    alone = replace(batch, advantages=only)
    trainer.forward_backward(trainer.prepare(alone, loss, prepared.plan))
    expected = float(np.linalg.norm([float(g.norm()) for g in gradients_of(trainer).values()]))
    trainer.discard_gradients()
    trainer.spec = replace(trainer.spec, self_check_every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "_norms", recorded)
        found = self_check_of(run(trainer, batch, LossKind.REINFORCE))
    assert found.sequence == sequence
    assert found.tokens == int(batch.loss_mask[start:stop].sum())
    assert norms[0] == pytest.approx(expected, rel=1e-9)
    assert norms[1] <= 1e-9 * expected


def _three_updates(base: FolderBase, every: int, **options: Any) -> tuple[Trainer, list[Any]]:
    trainer = watched(base, every=every, **options)
    seen: list[Any] = []
    for seed in range(3):
        batch = make_batch(seed)
        loss = make_loss(batch)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        report = trainer.forward_backward(trainer.prepare(batch, loss))
        window = (trainer.window_state, trainer._window.totals)
        sums = {name: tensor.clone() for name, tensor in trainer.ranks.own.gradients.sums().items()}
        drawn = (torch.rand(3), np.random.rand(3).tolist())  # noqa: NPY002
        trainer.optim_step(make_step(trainer, loss))
        seen.append((report, window, sums, drawn))
    return trainer, seen


@pytest.mark.parametrize(
    ("dtype", "tuning"),
    [
        (ModelDtype.FLOAT64, FullTuning()),
        (ModelDtype.BFLOAT16, FullTuning()),
        (ModelDtype.FLOAT32, LoraTuning(rank=2, alpha=4.0)),
    ],
)
def test_everything_else_has_the_same_bits(
    base: FolderBase, tmp_path: Path, dtype: ModelDtype, tuning: FullTuning | LoraTuning
) -> None:
    with_it, seen = _three_updates(base, 1, dtype=dtype, tuning=tuning)
    without, expected = _three_updates(base, 0, dtype=dtype, tuning=tuning)
    assert all(self_check_of(report).tokens > 0 for report, *_ in seen)
    assert all(report.self_check is None for report, *_ in expected)
    for (report, window, sums, drawn), (plain, window_, sums_, drawn_) in zip(
        seen, expected, strict=True
    ):
        assert window == window_
        assert window[0] is WindowState.OPEN
        assert_equal(sums, sums_)
        assert torch.equal(drawn[0], drawn_[0])
        assert drawn[1] == drawn_[1]
        assert (report.loss, report.entropy) == (plain.loss, plain.entropy)
    assert with_it.version == without.version == 3
    assert_equal(weights_of(with_it), weights_of(without))
    saved = [
        _checkpoint(trainer, tmp_path / name) for trainer, name in ((with_it, "1"), (without, "0"))
    ]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("kl", [None, pytest.param(FROZEN, marks=pytest.mark.more)])
def test_nothing_is_compiled_for_it(
    base: FolderBase, monkeypatch: Patch, kl: KlConfig | None
) -> None:
    """Though alone, the rollout is of another range of tokens than packed."""
    monkeypatch.setattr(layers, "_MOST_TOKENS", (61, 1021))
    batch = make_batch(50, max_response=30)
    spec = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=1000).spec
    with eager_graphs() as graphs:
        read = read_model(spec.model, keep_reference=True)
        model = read.place(torch.device(spec.device), compile_layers=True)
        trainer = Trainer(replace(spec, self_check_every=1), model)
        report = run(trainer, batch, LossKind.GRPO, kl=kl)
        # One graph is the policy's, the other the reference's: as without a self-check.
        assert len(graphs) == 1 + (kl is not None)
    alone = sequence_lengths(batch)[self_check_of(report).sequence]
    assert alone < 61 < report.packed_tokens
    assert not alarms(report)


def _checkpoint(trainer: Trainer, folder: Path) -> dict[str, bytes]:
    """Weights, moments and version, as they are written."""
    trainer.snapshot().write(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_comes_every_k_versions_and_once_a_window(base: FolderBase) -> None:
    trainer = watched(base, every=3)
    batch = make_batch(1)
    loss = make_loss(batch)
    seen = [update(trainer, batch).self_check for _ in range(7)]
    assert [one is not None for one in seen] == [False, True, False, False, True, False, False]
    trainer.version = 10
    first = trainer.forward_backward(trainer.prepare(batch, loss))
    second = trainer.forward_backward(trainer.prepare(batch, loss))
    assert first.self_check is not None
    assert second.self_check is None


def test_a_version_that_is_asked_for_is_checked_before(base: FolderBase) -> None:
    """On the rollouts that made it, with its own weights, once a check is due."""
    trainer = watched(base, every=100)
    batch = make_batch(1)
    assert trainer.check_before_publication().report is None
    assert update(trainer, batch).self_check is None
    digest = trainer.state_digest()
    check = trainer.check_before_publication()
    assert check.report is not None
    assert not check.warnings
    assert (trainer.window_state, trainer.state_digest()) == (WindowState.EMPTY, digest)
    # The next update finds the same of these rollouts.
    found = update(trainer, batch).self_check
    assert found is not None
    assert replace(found, seconds=0.0) == replace(check.report, seconds=0.0)
    assert trainer.version == 2
    assert trainer.check_before_publication().report is None


def test_a_fault_is_found_before_a_version_that_is_asked_for(
    base: FolderBase, monkeypatch: Patch
) -> None:
    trainer = watched(base, every=100, tokens=1000)
    update(trainer, make_batch(50))
    _packed_index_as_position(monkeypatch)
    check = trainer.check_before_publication()
    assert check.report is not None
    assert check.report.exceeds_limits
    assert [each.kind for each in check.warnings] == ["self_check_exceeded"]


def test_the_same_version_samples_the_same_rollout(base: FolderBase) -> None:
    trainer = watched(base, every=0)
    batch = make_batch(2)
    prepared = trainer.prepare(batch, make_loss(batch))

    def draw(seed: int) -> list[int | None]:
        return [sample_rollout(replace(prepared, version=each), seed) for each in range(40)]

    drawn = draw(7)
    assert drawn == draw(7)
    assert drawn != draw(8)
    counted = prepared.columns.counted_J
    offsets = batch.response_offsets
    for sequence in set(drawn):
        assert sequence is not None
        assert counted[offsets[sequence] : offsets[sequence + 1]].any()
        (own,) = [part for part in prepared.plan.micro_batches if sequence in part.sequences]
        assert len(own.sequences) > 1
    assert len(set(drawn)) > 4


def test_a_rollout_without_advantage_is_not_drawn(base: FolderBase) -> None:
    """It is not run: neither it nor what would be packed with it alone is compared."""
    batch = make_batch(2)
    assert batch.advantages is not None
    starts = batch.response_offsets
    some = np.zeros_like(batch.advantages)
    for sequence in (0, 3):
        assert starts[sequence] < starts[sequence + 1]
        some[starts[sequence] : starts[sequence + 1]] = 1.0
    trainer = watched(base, tokens=1000)
    drawn: set[int] = set()
    for version in range(6):
        trainer.version = version
        report = run(trainer, replace(batch, advantages=some), LossKind.GRPO)
        drawn.add(self_check_of(report).sequence)
    assert drawn == {0, 3}
    nothing = replace(batch, advantages=np.zeros_like(some))
    assert run(trainer, nothing, LossKind.GRPO).self_check is None


def test_a_rollout_is_named_as_its_caller_numbered_it(base: FolderBase, monkeypatch: Patch) -> None:
    """Rollouts before it that the call drops count too."""
    sent, _ = bad_groups()
    batch = validate_groups(sent, SHORT, drops_bad=True)
    trainer = watched(base, dtype=ModelDtype.FLOAT32, tokens=1000)
    _packed_index_as_position(monkeypatch)
    places = [(g, r) for g, group in enumerate(sent) for r in range(len(group.rollouts))]
    drawn: set[int] = set()
    for version in range(10, 18):
        trainer.version = version
        report = run(trainer, batch, LossKind.GRPO)
        found = self_check_of(report)
        group, rollout = places[found.sequence]
        drawn.add(found.sequence)
        assert found.tokens == len(sent[group].rollouts[rollout].segments[0].tokens)
        assert (group, rollout) not in [(bad.group, bad.rollout) for bad in report.bad_rollouts]
        for warning in report.warnings:
            if warning.kind == "self_check_exceeded":
                assert f" groups[{group}].rollouts[{rollout}] " in warning.message
                assert [(who.group, who.rollout) for who in warning.offenders] == [(group, rollout)]
    assert max(drawn) > batch.num_sequences


def test_where_every_rollout_runs_alone_there_is_none(base: FolderBase) -> None:
    report = run(watched(base), make_batch(2, kinds=("single",), num_groups=1), LossKind.GRPO)
    assert report.self_check is None
    assert not alarms(report)


@pytest.mark.parametrize(
    "dtype",
    [EVERY_DTYPE[0], *(pytest.param(one, marks=pytest.mark.more) for one in EVERY_DTYPE[1:])],
)
def test_a_streamed_micro_batch_is_compared_as_it_is_run(
    base: FolderBase, monkeypatch: Patch, dtype: ModelDtype
) -> None:
    trainer = watched(base, dtype=dtype, tokens=1000)
    batch = make_batch(50)
    loss = make_loss(batch)
    prepared = trainer.prepare(batch, loss)
    (whole,) = prepared.plan.micro_batches
    forest = build_forest(batch, prepared.prefixes, np.array(whole.sequences))
    stages = cut_into_stages(forest, 30, 0)
    assert len(stages) > 2
    plan = replace(prepared.plan, micro_batches=(replace(whole, stages=stages),))

    def self_checks() -> list[SelfCheckReport]:
        found: list[SelfCheckReport] = []
        for version in range(4):
            trainer.version = version
            found.append(
                self_check_of(trainer.forward_backward(trainer.prepare(batch, loss, plan)))
            )
            trainer.discard_gradients()
        return found

    healthy = self_checks()
    assert not any(one.exceeds_limits for one in healthy)
    assert any(one.gradient_difference for one in healthy)
    _packed_index_as_position(monkeypatch)
    assert any(one.exceeds_limits for one in self_checks())


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "no plan")],
    ids=["found", "foreseen"],
)
def test_too_little_memory_is_a_warning(
    base: FolderBase, monkeypatch: Patch, error: Exception
) -> None:
    trainer = watched(base)
    plain = watched(base, every=0)
    calls: list[int] = []

    def starved(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        totals = passes.forward_backward_pass(*args, **kwargs)
        if len(calls) == 2:
            raise error
        return totals

    monkeypatch.setattr(self_check, "forward_backward_pass", starved)
    batch = make_batch(5)
    loss = make_loss(batch)
    report = trainer.forward_backward(trainer.prepare(batch, loss))
    assert report.self_check is None
    assert "self_check_not_run" in [each.kind for each in report.warnings]
    assert len(calls) == 2
    plain.forward_backward(plain.prepare(batch, loss))
    assert_equal(gradients_of(trainer), gradients_of(plain))


def test_a_cancel_during_it_leaves_the_window_empty(base: FolderBase) -> None:
    trainer = watched(base)
    batch = make_batch(5)
    loss = make_loss(batch)
    with pytest.raises(RatoonError, match="cancelled after 0 of 1"):
        trainer.forward_backward(trainer.prepare(batch, loss), PassHooks(is_cancelled=lambda: True))
    assert trainer.window_state is WindowState.EMPTY
    assert all(p.grad is None for p in trainer.model.named_trainable().values())


def test_a_model_with_experts_is_judged_in_float64_alone(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Below it rounding alone may change a route, which is no fault of packing."""
    base = FolderBase(folder=str(write_folder(tmp_path / "model", "qwen3_moe")))
    _packed_index_as_position(monkeypatch)
    for dtype in EVERY_DTYPE:
        trainer = watched(base, dtype=dtype, tokens=1000)
        found: list[SelfCheckReport] = []
        for version in range(4):
            trainer.version = version
            found.append(self_check_of(run(trainer, make_batch(50), LossKind.GRPO)))
        assert max(one.gradient_difference or 0.0 for one in found) > 0.1
        is_judged = dtype is ModelDtype.FLOAT64
        assert any(one.exceeds_limits for one in found) == is_judged
