"""Tasks on a real trainer: what a loss takes from a Forward's files."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ratoon.engine.commands import Command, ForwardBackwardCommand, ForwardCommand
from ratoon.engine.files.paths import PolicyPaths, make_policy_folders, policy_paths
from ratoon.engine.files.rollouts import read_rollouts
from ratoon.engine.types import ForwardResult
from ratoon.engine.worker.runner import TaskRunner
from ratoon.engine.worker.tasks import NO_FORWARD, Choices, Task
from ratoon.errors import RatoonError
from ratoon.model.spec import FolderBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.prefixes import SortedPrefixes, sort_sequences
from ratoon.rollout.serial import batch_to_bytes
from ratoon.rollout.validate import validate_groups
from ratoon.train.spec import NO_HOOKS
from ratoon_proto.codec import decode_tensor
from ratoon_proto.types import (
    BadRolloutAction,
    KeepRollouts,
    LogprobsOf,
    LossConfig,
    LossKind,
    StalenessAction,
    StalenessConfig,
    StepResult,
)
from ratoon_proto.v1.training_pb2 import ForwardOutput
from tests.tiny_models import write_folder
from tests.train.trainer_runs import (
    FROM_FORWARD,
    SHORT,
    assert_equal,
    bad_groups,
    gradients_of,
    make_batch,
    make_trainer,
)


def _task(
    operation_id: str,
    command: Command,
    paths: PolicyPaths,
    old_logprobs: str = NO_FORWARD,
    old_version: int | None = None,
) -> Task:
    return Task(
        operation_id=operation_id,
        seq=0,
        command=command,
        choices=Choices(old_logprobs=old_logprobs, old_version=old_version),
        paths=paths,
        started_at=None,
    )


def _forward_file(
    runner: TaskRunner, digest: str, paths: PolicyPaths, *, with_entropy: bool
) -> str:
    command = ForwardCommand(
        with_entropy=with_entropy,
        use_reference=False,
        expected_version=None,
        body_digest=digest,
    )
    planned = runner.plan(_task(f"p.{with_entropy}", command, paths))
    result = planned.run(NO_HOOKS)
    assert isinstance(result, ForwardResult)
    assert result.version == 0
    return f"{result.digest}.{with_entropy}"


def test_a_forward_that_on_policy_spares_is_warned_about(tmp_path: Path) -> None:
    """One of the same version and of these rollouts alone: not one that other parts have too."""
    trainer = make_trainer(FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3"))))
    runner, paths = TaskRunner(trainer.spec, trainer), policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    # Both batches have one seed: the part is the first three of the four groups.
    whole, part = (batch_to_bytes(make_batch(2, num_groups=number)) for number in (4, 3))
    digests = [hashlib.sha256(data).hexdigest() for data in (whole, part)]
    for digest, data in zip(digests, (whole, part), strict=True):
        paths.body(digest).write_bytes(data)
    source = _forward_file(runner, digests[0], paths, with_entropy=True)

    def spares(digest: str, old_version: int | None, share: float | None = None) -> bool:
        loss = LossConfig(kind=LossKind.IPO, old_logprobs=FROM_FORWARD, top_entropy_share=share)
        command = ForwardBackwardCommand(loss=loss, expected_version=None, body_digest=digest)
        planned = runner.plan(_task("p.2", command, paths, source, old_version))
        result = planned.run(NO_HOOKS)
        trainer.discard_gradients()
        assert isinstance(result, StepResult)
        return any(each.kind == "needless_forward" for each in result.report.warnings)

    assert spares(digests[0], 0)
    assert not spares(digests[0], 1)
    assert not spares(digests[0], None)
    assert not spares(digests[0], 0, share=0.2)
    assert not spares(digests[1], 0)


def test_a_batch_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned is what is run; the seconds of the plan are those of all of that."""
    trainer = make_trainer(FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3"))))
    runner, paths = TaskRunner(trainer.spec, trainer), policy_paths(tmp_path, "p")
    data = batch_to_bytes(make_batch(2))
    make_policy_folders(paths)
    digest = hashlib.sha256(data).hexdigest()
    paths.body(digest).write_bytes(data)
    sorted_sizes: list[int] = []

    def sort(batch: RolloutBatch) -> SortedPrefixes:
        sorted_sizes.append(batch.num_sequences)
        return sort_sequences(batch)

    monkeypatch.setattr("ratoon.train.prepare.sort_sequences", sort)
    loss = LossConfig(kind=LossKind.IPO)
    command = ForwardBackwardCommand(loss=loss, expected_version=None, body_digest=digest)
    planned = runner.plan(_task("p.1", command, paths))
    result = planned.run(NO_HOOKS)
    assert len(sorted_sizes) == 1
    assert isinstance(result, StepResult)
    assert trainer.found is not None
    prepared = trainer.found.prepared
    assert planned.task.choices.plan == prepared.plan
    assert result.report.seconds.plan == prepared.seconds > 0


def test_tokens_of_most_entropy_are_those_of_a_forward(tmp_path: Path) -> None:
    """A fifth of the tokens has a smaller gradient; a Forward without entropies is refused."""
    trainer = make_trainer(FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3"))))
    runner = TaskRunner(trainer.spec, trainer)
    data, paths = batch_to_bytes(make_batch(2)), policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    digest = hashlib.sha256(data).hexdigest()
    paths.body(digest).write_bytes(data)
    bare = _forward_file(runner, digest, paths, with_entropy=False)
    source = _forward_file(runner, digest, paths, with_entropy=True)

    def norm(share: float | None, source: str) -> float:
        loss = LossConfig(kind=LossKind.IPO, old_logprobs=FROM_FORWARD, top_entropy_share=share)
        command = ForwardBackwardCommand(loss=loss, expected_version=None, body_digest=digest)
        runner.plan(_task("p.2", command, paths, source)).run(NO_HOOKS)
        total = sum(float(gradient.norm() ** 2) for gradient in gradients_of(trainer).values())
        trainer.discard_gradients()
        return total**0.5

    whole = norm(None, source)
    assert norm(None, bare) == whole
    assert norm(1.0, source) == whole
    assert 0 < norm(0.2, source) < whole
    with pytest.raises(RatoonError) as caught:
        norm(0.2, bare)
    assert caught.value.field == "loss.top_entropy_share"


def test_what_a_call_drops_keeps_its_place_in_what_is_answered(tmp_path: Path) -> None:
    """Log-probs and kept rollouts are those of the request; a replay of the journaled plan and body
    drops the same, and computes the same bits as the call without what was dropped."""
    trainer = make_trainer(FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3"))))
    trainer.version = 10
    spec = replace(trainer.spec, keep_rollouts=KeepRollouts.ALL, keep_rollouts_bytes=1 << 20)
    runner = TaskRunner(spec, trainer)
    paths = policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    sent, left = bad_groups()
    commands: list[ForwardBackwardCommand] = []
    for groups in (sent, left):
        data = batch_to_bytes(validate_groups(groups, SHORT, drops_bad=True))
        digest = hashlib.sha256(data).hexdigest()
        paths.body(digest).write_bytes(data)
        staleness = StalenessConfig(max_versions=2, action=StalenessAction.REFUSE)
        command = ForwardBackwardCommand(
            loss=LossConfig(kind=LossKind.GRPO, staleness=staleness),
            expected_version=None,
            body_digest=digest,
            with_logprobs=LogprobsOf.ALL,
            on_bad_rollout=BadRolloutAction.DROP,
        )
        commands.append(command)
    refuses = replace(commands[0], on_bad_rollout=BadRolloutAction.REFUSE)
    with pytest.raises(RatoonError, match=r"groups\[3\].rollouts\[0\].policy_version"):
        runner.plan(_task("p.1", refuses, paths))
    outputs, gradients, reports = [], [], []
    for command in commands:
        planned = runner.plan(_task("p.1", command, paths))
        again = runner.plan(planned.task)
        for each in (planned, again):
            result = each.run(NO_HOOKS)
            assert isinstance(result, StepResult)
            gradients.append(gradients_of(trainer))
            reports.append(result.report)
            trainer.discard_gradients()
            if each is planned:
                assert result.file is not None
                data = (paths.results / result.file.digest).read_bytes()
                outputs.append(ForwardOutput.FromString(data))
        places = [(each.group, each.rollout) for each in read_rollouts(paths.rollouts, 0).rollouts]
        bad = {(each.group, each.rollout) for each in result.report.bad_rollouts}
        groups = sent if command is commands[0] else left
        assert places == [
            (g, r)
            for g, each in enumerate(groups)
            for r in range(len(each.rollouts))
            if (g, r) not in bad
        ]
    for other in gradients[1:]:
        assert_equal(gradients[0], other)
    assert reports[0].bad_rollouts == reports[1].bad_rollouts
    assert (len(reports[0].bad_rollouts), reports[2].bad_rollouts) == (8, ())
    values, offsets = (
        [decode_tensor(getattr(each, name), max_bytes=10**6) for each in outputs]
        for name in ("logprobs", "offsets")
    )
    lengths = [len(raw.segments[0].tokens) for each in sent for raw in each.rollouts]
    np.testing.assert_array_equal(np.diff(offsets[0]), lengths)
    bad = {(each.group, each.rollout) for each in reports[0].bad_rollouts}
    is_bad = [(g, r) in bad for g, each in enumerate(sent) for r in range(len(each.rollouts))]
    is_bad_J = np.repeat(is_bad, lengths)
    assert np.isnan(values[0][is_bad_J]).all()
    np.testing.assert_array_equal(values[0][~is_bad_J], values[1])
