"""Tasks on a real trainer: what a loss takes from a Forward's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ratoon.engine.commands import Command, ForwardBackwardCommand, ForwardCommand
from ratoon.engine.files.paths import PolicyPaths, make_policy_folders, policy_paths
from ratoon.engine.types import ForwardResult
from ratoon.engine.worker.runner import TaskRunner
from ratoon.engine.worker.tasks import NO_FORWARD, Choices, Task
from ratoon.errors import RatoonError
from ratoon.model.spec import FolderBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.prefixes import SortedPrefixes, sort_sequences
from ratoon.rollout.serial import batch_to_bytes
from ratoon_proto.types import LossConfig, LossKind, StepResult
from tests.tiny_models import write_folder
from tests.train.trainer_runs import FROM_FORWARD, gradients_of, make_batch, make_trainer


def _no_progress(_done: int, _planned: int, _tokens: int) -> None:
    pass


def _never() -> bool:
    return False


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
    result = runner.run(planned, _no_progress, _never)
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
        result = runner.run(planned, _no_progress, _never)
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
    result = runner.run(planned, _no_progress, _never)
    assert len(sorted_sizes) == 1
    assert isinstance(result, StepResult)
    assert planned.prepared is not None
    assert planned.task.choices.plan == planned.prepared.plan
    assert result.report.seconds.plan == planned.prepared.seconds > 0


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
        runner.run(runner.plan(_task("p.2", command, paths, source)), _no_progress, _never)
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
