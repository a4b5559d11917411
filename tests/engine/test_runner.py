"""Tasks on a real trainer: what a loss takes from a Forward's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ratoon.engine.runner import TaskRunner
from ratoon.engine.tasks import ForwardBackwardTask, ForwardTask, FromForwardFile, FromGiven
from ratoon.engine.types import ForwardBackwardCommand, ForwardCommand, ForwardResult
from ratoon.errors import RatoonError
from ratoon.model.spec import FolderBase
from ratoon.rollout.serial import batch_to_bytes
from ratoon.train.config import LossKind, LossRequest
from tests.tiny_models import write_folder
from tests.train.trainer_runs import FROM_FORWARD, gradients_of, make_batch, make_trainer


def _no_progress(_done: int, _planned: int, _tokens: int) -> None:
    pass


def _never() -> bool:
    return False


def _forward_file(
    runner: TaskRunner, body: Path, results: Path, *, with_entropy: bool
) -> FromForwardFile:
    command = ForwardCommand(
        with_entropy=with_entropy,
        use_reference=False,
        expected_version=None,
        body_digest=body.name,
    )
    task = ForwardTask(
        operation_id=f"p.{with_entropy}",
        seq=0,
        command=command,
        body_path=str(body),
        plan=runner.prepare(command, body, FromGiven()),
        results_folder=str(results),
    )
    result = runner.run(task, _no_progress, _never).result
    assert isinstance(result, ForwardResult)
    assert result.version == 0
    return FromForwardFile(path=str(results / f"{result.digest}.{with_entropy}"))


def test_tokens_of_most_entropy_are_those_of_a_forward(tmp_path: Path) -> None:
    """A fifth of the tokens has a smaller gradient; a Forward without entropies is refused."""
    trainer = make_trainer(FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3"))))
    runner = TaskRunner(trainer.spec, trainer)
    data = batch_to_bytes(make_batch(2))
    body = tmp_path / hashlib.sha256(data).hexdigest()
    body.write_bytes(data)
    results = tmp_path / "results"
    results.mkdir()
    bare = _forward_file(runner, body, results, with_entropy=False)
    source = _forward_file(runner, body, results, with_entropy=True)

    def norm(share: float | None, source: FromForwardFile) -> float:
        loss = LossRequest(kind=LossKind.IPO, old_logprobs=FROM_FORWARD, top_entropy_share=share)
        command = ForwardBackwardCommand(loss=loss, expected_version=None, body_digest=body.name)
        task = ForwardBackwardTask(
            operation_id="p.2",
            seq=1,
            command=command,
            body_path=str(body),
            old_logprobs=source,
            plan=runner.prepare(command, body, source),
        )
        runner.run(task, _no_progress, _never)
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
