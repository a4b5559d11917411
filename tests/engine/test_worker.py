"""The worker's own fences: tokens, seqs, stored outcomes, what a task may leave behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratoon.engine.commands import Command
from ratoon.engine.crash_points import never
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.types import FailedResult, version_of
from ratoon.engine.worker.tasks import (
    Choices,
    FencedError,
    InitialWeights,
    LoadRequest,
    Outcome,
    Task,
    WorkerLostError,
)
from ratoon.engine.worker.worker import WorkerCore, WorkerOrderError
from ratoon.errors import CopyFailedError, ErrorCode, RatoonError
from ratoon_proto.types import EmptyResult, OperationState, StepResult
from tests.engine.fake_trainer import FakeTrainer, Faults, as_trainer, number_body
from tests.engine.harness import (
    DISCARD,
    RATE,
    code_of,
    digest_of,
    forward_backward,
    optim_step,
    policy_spec,
    trainer_spec,
    update,
)
from tests.engine.refusals import raises

if TYPE_CHECKING:
    from ratoon.train.trainer import Trainer


class Bench:
    """A loaded worker at seq 0 and version 0, its bodies below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults = folder, Faults()
        self.paths = policy_paths(folder, "p")
        self.trainers: list[FakeTrainer] = []
        self.core = WorkerCore(self.create, never)
        self.core.load(1, "p", load_request())

    def create(self, _spec: object) -> Trainer:
        self.trainers.append(FakeTrainer(self.faults))
        return as_trainer(self.trainers[-1])

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    def body(self, number: float) -> Path:
        path = self.paths.body(digest_of(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number_body(number))
        return path

    def task(self, seq: int, command: Command, next_version: int = 0) -> Task:
        choices = Choices(next_version=next_version)
        return Task(
            operation_id=f"p.{seq}",
            seq=seq,
            command=command,
            choices=choices,
            paths=self.paths,
            started_at=float(seq),
        )

    def update(self, seq: int, number: float, next_version: int = 1) -> Task:
        self.body(number)
        return self.task(seq, update(number), next_version)

    def forward_backward(self, seq: int, number: float) -> Task:
        self.body(number)
        return self.task(seq, forward_backward(number))

    def step(self, seq: int) -> Task:
        return self.task(seq, optim_step(), 1)


def load_request(last_seq: int = 0, version: int = 0) -> LoadRequest:
    return LoadRequest(
        trainer=trainer_spec(policy_spec()),
        source=InitialWeights(),
        version=version,
        last_seq=last_seq,
        digests=True,
    )


SKIPPED = Outcome(operation_id="skipped", state=OperationState.CANCELLED, result=EmptyResult())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_older_token_is_refused_before_anything_is_touched(bench: Bench) -> None:
    task = bench.update(1, 1)
    bench.core.fence(2)
    for call in (
        lambda: bench.core.apply(1, task),
        lambda: bench.core.skip(1, 1, SKIPPED),
        lambda: bench.core.restore(1, ()),
        lambda: bench.core.load(1, "p", load_request()),
        lambda: bench.core.hold(1, 0),
        lambda: bench.core.publish(1, 0, str(bench.folder / "weights"), 0.0),
        lambda: bench.core.fence(1),
    ):
        with pytest.raises(FencedError):
            call()
    assert (bench.trainer.weights, len(bench.trainers)) == ([], 1)
    assert bench.core.apply(2, task).state is OperationState.DONE


def test_the_last_seq_is_answered_with_its_stored_outcome(bench: Bench) -> None:
    """Trap 9: a repeated call is a second step."""
    first = bench.core.apply(1, bench.update(1, 1))
    assert bench.core.apply(1, bench.update(1, 1)) is first
    assert bench.trainer.weights == [([1.0], RATE)]
    status = bench.core.status()
    assert (status.last_seq, status.last_outcome, status.version) == (1, first, 1)


@pytest.mark.parametrize("seq", [0, 2, 7])
def test_a_seq_that_is_not_the_next_is_refused(bench: Bench, seq: int) -> None:
    with pytest.raises(WorkerOrderError):
        bench.core.apply(1, bench.update(seq, 1))
    assert bench.trainer.weights == []
    assert bench.core.apply(1, bench.update(1, 1)).state is OperationState.DONE


def test_a_skipped_seq_is_counted_once(bench: Bench) -> None:
    bench.core.skip(1, 1, SKIPPED)
    bench.core.skip(1, 1, SKIPPED)
    assert bench.core.status().last_outcome == SKIPPED
    with pytest.raises(WorkerOrderError):
        bench.core.skip(1, 3, SKIPPED)
    assert bench.core.apply(1, bench.update(2, 2)).state is OperationState.DONE


def test_a_bare_worker_refuses_to_work(bench: Bench) -> None:
    core = WorkerCore(lambda _spec: as_trainer(FakeTrainer(Faults())), never)
    assert not core.status().is_loaded
    with pytest.raises(WorkerLostError):
        core.apply(1, bench.task(1, DISCARD))


def test_versions_are_named_by_the_controller(bench: Bench) -> None:
    """Numbers of versions that were rolled back are not given again."""
    outcome = bench.core.apply(1, bench.update(1, 1, next_version=8))
    assert version_of(outcome.result) == 8
    bench.core.hold(1, 8)
    manifest = bench.core.publish(1, 8, str(bench.folder / "weights"), 1.0)
    assert (manifest.version, [file.name for file in manifest.files]) == (8, ["model.json"])
    bench.faults.skips.add(2.0)
    skipped = bench.core.apply(1, bench.update(2, 2, next_version=9))
    assert isinstance(skipped.result, StepResult)
    assert (skipped.result.version, bench.trainer.version) == (8, 8)


def test_a_repeated_call_gives_what_the_first_has_written(bench: Bench) -> None:
    root = str(bench.folder / "weights")
    bench.core.hold(1, 0)
    first = bench.core.publish(1, 0, root, 1.0)
    assert bench.core.publish(1, 0, root, 2.0) is first
    with pytest.raises(RatoonError, match="no copy of version 1"):
        bench.core.publish(1, 1, root, 2.0)


def test_a_broken_forward_backward_asks_for_the_window_back(bench: Bench) -> None:
    whole = bench.forward_backward(1, 1)
    bench.core.apply(1, whole)
    bench.faults.breaks.add(2.0)
    broken = bench.core.apply(1, bench.forward_backward(2, 2))
    assert (broken.state, broken.must_restore) == (OperationState.FAILED, True)
    assert isinstance(broken.result, FailedResult)
    assert broken.result.error["message"] == "RuntimeError: broken on purpose"
    bench.core.restore(1, (whole,))
    bench.core.apply(1, bench.step(3))
    assert bench.trainer.weights == [([1.0], RATE)]


def test_a_broken_update_needs_no_restore(bench: Bench) -> None:
    bench.faults.breaks.add(1.0)
    outcome = bench.core.apply(1, bench.update(1, 1))
    assert (outcome.state, outcome.must_restore) == (OperationState.FAILED, False)
    assert bench.trainer.gradients == []


def test_a_window_that_cannot_be_restored_is_a_lost_worker(bench: Bench) -> None:
    task = bench.forward_backward(1, 1)
    bench.core.apply(1, task)
    bench.faults.breaks.add(1.0)
    with pytest.raises(WorkerLostError):
        bench.core.restore(1, (task,))
    assert_lost(bench)


def test_a_loaded_worker_begins_where_it_is_told(bench: Bench) -> None:
    bench.core.load(1, "p", load_request(last_seq=5, version=3))
    status = bench.core.status()
    assert (status.last_seq, status.version, status.last_outcome) == (5, 3, None)


def test_a_trainer_of_before_is_gone_when_the_next_is_made() -> None:
    """What it still held of a device would be missing in the plans of the next one."""
    made: list[weakref.ref[CyclicTrainer]] = []

    def create(_spec: object) -> Trainer:
        assert [one() for one in made] == [None] * len(made)
        trainer = CyclicTrainer()
        made.append(weakref.ref(trainer))
        return as_trainer(trainer)

    core = WorkerCore(create, never)
    for _ in range(3):
        core.load(1, "p", load_request())
    assert len(made) == 3


class CyclicTrainer(FakeTrainer):
    """Refers to itself, as the layers of a model do whose calls are taken over."""

    def __init__(self) -> None:
        super().__init__(Faults())
        self.itself = self


class OutOfMemoryError(RuntimeError):
    """Torch's has the same name."""


def test_a_model_that_does_not_fit_is_refused_by_name() -> None:
    def create(_spec: object) -> Trainer:
        raise OutOfMemoryError("tried to allocate 9 GiB")

    core = WorkerCore(create, never)
    with raises(ErrorCode.RESOURCE_EXHAUSTED, match="9 GiB") as caught:
        core.load(1, "p", load_request())
    assert caught.value.details == {"resource": "memory"}
    with pytest.raises(WorkerLostError):
        core.fence(1)


def assert_lost(bench: Bench) -> None:
    """The worker refuses everything, a load too: what is wrong may be its process's."""
    assert not bench.core.status().is_loaded
    for call in (
        lambda: bench.core.fence(9),
        lambda: bench.core.load(9, "p", load_request()),
        lambda: bench.core.apply(9, bench.task(9, DISCARD)),
        lambda: bench.core.snapshot(9),
    ):
        with pytest.raises(WorkerLostError):
            call()


@pytest.mark.parametrize(
    ("fault", "reason"), [("tears", "middle of a step"), ("kills_device", "cannot be read")]
)
def test_what_leaves_the_trainer_in_doubt_loses_the_worker(
    bench: Bench, fault: str, reason: str
) -> None:
    """A step that stopped half way has neither the weights before nor those after."""
    bench.core.apply(1, bench.update(1, 1))
    getattr(bench.faults, fault)[2.0] = 1
    task = bench.update(2, 2)
    with pytest.raises(WorkerLostError, match=reason):
        bench.core.apply(1, task)
    assert_lost(bench)


def test_so_does_a_broken_way_to_another_rank(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the trainer is as it was: it exchanges nothing any more."""

    def broken(*_args: object, **_options: object) -> None:
        raise CopyFailedError("a copy between ranks failed")

    monkeypatch.setattr(FakeTrainer, "update", broken)
    with pytest.raises(WorkerLostError, match="between ranks"):
        bench.core.apply(1, bench.update(1, 1))
    assert_lost(bench)


def test_so_does_a_step_of_a_window(bench: Bench) -> None:
    bench.core.apply(1, bench.forward_backward(1, 1))
    bench.faults.tears[1.0] = 1
    with pytest.raises(WorkerLostError, match="middle of a step"):
        bench.core.apply(1, bench.step(2))
    assert_lost(bench)


@pytest.mark.parametrize("call", [lambda core: core.hold(1, 0), lambda core: core.snapshot(1)])
def test_whatever_finds_a_device_dead_loses_the_worker(
    bench: Bench, call: Callable[[WorkerCore], object]
) -> None:
    bench.trainer.is_device_dead = True
    with pytest.raises(WorkerLostError, match="cannot be read"):
        call(bench.core)
    assert_lost(bench)


def test_a_step_whose_digest_cannot_be_taken_is_not_taken_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would say that it is where it was before."""

    def broken(_trainer: FakeTrainer) -> str:
        raise MemoryError("no room for a digest")

    task = bench.update(1, 1)
    monkeypatch.setattr(FakeTrainer, "state_digest", broken)
    with pytest.raises(WorkerLostError):
        bench.core.apply(1, task)
    assert bench.trainer.weights == [([1.0], RATE)]
    assert_lost(bench)


def test_a_state_that_a_failure_has_changed_is_a_lost_worker(bench: Bench) -> None:
    bench.faults.breaks.add(1.0)
    task = bench.update(1, 1)
    bench.trainer.weights.append(([9.0], RATE))
    with pytest.raises(WorkerLostError, match="has changed"):
        bench.core.apply(1, task)
    assert_lost(bench)


def test_without_digests_a_failure_before_the_step_loses_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.core.load(1, "p", replace(load_request(), digests=False))
    bench.faults.breaks.add(1.0)
    assert bench.core.apply(1, bench.update(1, 1)).state is OperationState.FAILED
    assert bench.core.apply(1, bench.update(2, 2)).state is OperationState.DONE
    bench.faults.tears[3.0] = 1
    task = bench.update(3, 3)
    with pytest.raises(WorkerLostError):
        bench.core.apply(1, task)


def test_what_the_memory_has_no_room_for_is_refused_by_that_name(bench: Bench) -> None:
    bench.faults.no_memory.add(1.0)
    outcome = bench.core.apply(1, bench.update(1, 1))
    assert (outcome.state, outcome.must_restore) == (OperationState.FAILED, False)
    assert isinstance(outcome.result, FailedResult)
    assert outcome.result.error["code"] == ErrorCode.RESOURCE_EXHAUSTED
    assert "2.32 GiB" in str(outcome.result.error["message"])
    assert bench.core.apply(1, bench.update(2, 2)).state is OperationState.DONE
    assert bench.trainer.weights == [([2.0], RATE)]


def test_a_cancel_that_comes_first_stops_the_task(bench: Bench) -> None:
    bench.faults.holds[1.0] = threading.Event()
    task = bench.update(1, 1)
    bench.core.cancel("p.1")
    outcome = bench.core.apply(1, task)
    assert outcome.state is OperationState.CANCELLED
    assert code_of(outcome) == ErrorCode.CANCELLED
    assert bench.core.apply(1, bench.update(2, 2)).state is OperationState.DONE


def test_what_is_refused_by_its_plan_has_touched_no_window(bench: Bench) -> None:
    """To restore a window is to run it again."""
    bench.core.apply(1, bench.forward_backward(1, 1))
    gone, stale = bench.forward_backward(2, 2), bench.forward_backward(3, 3)
    bench.paths.body(digest_of(2)).unlink()
    bench.faults.refuses.add(3.0)
    for task, code in ((gone, ErrorCode.INTERNAL), (stale, ErrorCode.STALE_ROLLOUTS)):
        outcome = bench.core.apply(1, task)
        assert code_of(outcome) == code
        assert (outcome.state, outcome.must_restore) == (OperationState.FAILED, False)
    assert bench.trainer.gradients == [1.0]


def test_a_plan_is_made_once_and_comes_with_the_outcome(bench: Bench) -> None:
    """One that the journal has is kept, whatever would be chosen by now."""
    task = bench.update(1, 1)
    choices = bench.core.apply(1, task).choices
    assert choices is not None
    assert choices.plan is not None
    assert replace(choices, plan=None) == task.choices
    status = bench.core.status()
    assert status.last_outcome is not None
    assert (status.last_outcome.choices, status.last_outcome.started_at) == (choices, 1.0)
    bench.faults.plan_tokens = 32
    bench.core.load(1, "p", load_request())
    again = bench.core.apply(1, replace(task, choices=choices))
    assert again.choices == choices
    assert [plan.micro_batch_tokens for plan in bench.trainer.plans] == [64]


def test_progress_counts_micro_batches_of_the_running_task(bench: Bench) -> None:
    bench.core.apply(1, bench.update(1, 1))
    progress = bench.core.progress()
    assert (progress.micro_batches_done, progress.micro_batches_planned) == (2, 2)
    assert progress.eta_s == 0.0


@pytest.mark.parametrize(
    "error", [RatoonError(ErrorCode.UNSUPPORTED, "sliding window"), CopyFailedError("no memory")]
)
def test_a_load_that_fails_leaves_nothing_of_the_policy_before(
    tmp_path: Path, error: Exception
) -> None:
    """The status had seq, outcome and digest of a trainer that was gone."""
    bench = Bench(tmp_path)
    bare = WorkerCore(bench.create, never).status()  # pyright: ignore[reportArgumentType]
    bench.core.apply(1, bench.update(1, 1))
    assert bench.core.status() != bare

    def fail(_spec: object) -> FakeTrainer:
        raise error

    bench.core._create_trainer = fail  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises((RatoonError, WorkerLostError)):
        bench.core.load(1, "p", load_request())
    assert bench.core.status() == bare
