"""A whole engine of one policy in this process: real controller, worker and store, fake trainer.

Enter numbers, leave operations. `Machine.crash_controller` and `crash_worker` lose what a killed
process loses: everything but the database and the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.commands import (
    Command,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    NoKey,
    OperationKey,
    OptimStepCommand,
    PublishVersionCommand,
    RequestKey,
    SaveCheckpointCommand,
    SeqKey,
    Submission,
    UpdateCommand,
)
from ratoon.engine.files.paths import BodyFiles, policy_paths
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.policy.controller import Controller
from ratoon.engine.policy.limits import Claims
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.refusals import policy_not_found
from ratoon.engine.types import FailedResult, Operation, Policy, PolicySpec
from ratoon.engine.worker.tasks import Outcome
from ratoon.metrics import Change
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.train.spec import ONE_DEVICE, TrainerSpec
from ratoon_proto.types import (
    AdamWConfig,
    DistillationConfig,
    Divergence,
    FullTuning,
    ImportMode,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OnChangedNumerics,
    OperationKind,
    OperationState,
    OptimStepConfig,
    PublishConfig,
    PublishKind,
    Recovery,
    ReferencePolicy,
    Sequencing,
    Teacher,
)
from tests.engine.fake_trainer import IMPORTED_NAME, Faults, number_body
from tests.engine.local_ports import IN_MEMORY, POLICY, Crash, Crashes, LocalJournal, LocalWorker


def policy_spec(policy_id: str = POLICY, **changes: object) -> PolicySpec:
    spec = PolicySpec(
        policy_id=policy_id,
        model=ModelSpec(
            base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=1
        ),
        optimizer=AdamWConfig(),
        sequencing=Sequencing.CLIENT,
        deterministic=True,
        recovery=Recovery.FAIL,
        on_changed_numerics=OnChangedNumerics.STOP,
        publish=PublishConfig(kind=PublishKind.EVERY, every_n=1),
        keep_versions=2,
        micro_batch_tokens=64,
        reference=ReferencePolicy.NONE,
        parallel=ONE_DEVICE,
        attention_backend="",
    )
    return replace(spec, **changes)


def trainer_spec(spec: PolicySpec) -> TrainerSpec:
    return TrainerSpec(
        model=spec.model,
        optimizer=spec.optimizer,
        deterministic=spec.deterministic,
        micro_batch_tokens=spec.micro_batch_tokens,
        keep_reference=spec.reference is not ReferencePolicy.NONE,
        attention_backend="",
        device="cpu",
        num_threads=1,
    )


def life_record(
    policy_id: str, operation_id: str, kind: OperationKind = OperationKind.CREATE_POLICY
) -> OperationRecord:
    return OperationRecord(
        operation_id=operation_id,
        policy_id=policy_id,
        kind=kind,
        payload_hash="",
        created_at=1.0,
    )


@dataclass
class ListSink:
    changes: list[Change] = field(default_factory=list[Change])

    def send(self, changes: Sequence[Change]) -> None:
        self.changes.extend(changes)


# Only what hangs takes that long, on a busy machine too.
PATIENCE_S = 240.0
# Automatic checkpoints would come in between.
NO_CHECKPOINTS = CheckpointConfig(every_operations=0, every_s=0, every_bytes=0)


class Machine:
    """One policy and its processes; a database at `url` may have it already."""

    def __init__(
        self,
        root: Path,
        spec: PolicySpec,
        limits: LimitsConfig,
        url: str = IN_MEMORY,
        make_worker: Callable[[Faults], LocalWorker] = LocalWorker,
        checkpoints: CheckpointConfig = NO_CHECKPOINTS,
    ) -> None:
        self.spec, self.limits, self.root = spec, limits, root
        self.checkpoints = checkpoints
        self.faults, self.crashes = Faults(), Crashes()
        self.journal = LocalJournal(url)
        if self.journal.store.policy(spec.policy_id) is None:
            self.journal.store.insert_policy(spec, life_record(spec.policy_id, "p.create"))
        self.worker = make_worker(self.faults)
        self.worker.reach = self.crashes.reach
        self.metrics = ListSink()
        self.claims = Claims(root, max_total_bytes=limits.max_total_queued_bytes)
        self.paths = policy_paths(root, spec.policy_id)
        self.controller = self._controller()

    def _controller(self) -> Controller:
        self.run = PolicyRun(
            spec=self.spec,
            trainer=trainer_spec(self.spec),
            journal=self.journal,
            worker=self.worker,
            metrics=self.metrics,
            policies=OnePolicy(self),
            now=time.time,
            limits=self.limits,
            checkpoints=self.checkpoints,
            paths=self.paths,
            bodies=BodyFiles(self.paths),
            claims=self.claims,
            reach=self.crashes.reach,
        )
        return Controller(self.run)

    async def start(self) -> Machine:
        """Ready, its first version published."""
        await self.controller.start()
        await self.landed()
        return self

    async def restart_controller(self) -> None:
        """A new controller over the same journal and worker, as after a kill of the old one."""
        with contextlib.suppress(Crash):
            await self.controller._turns.stop(0.0)
        with contextlib.suppress(Crash):
            await self.controller._turns._checkpointer.stop()
        self.claims = Claims(self.root, max_total_bytes=self.limits.max_total_queued_bytes)
        self.controller = self._controller()
        await self.controller.start()

    async def submit(self, key: int | str | None, command: Command, number: float) -> Operation:
        if isinstance(command, ImportWeightsCommand):
            self.put_folder(command.folder, number)
        return await self.controller.submit(
            Submission(
                policy_id=self.spec.policy_id,
                key=_key(key),
                command=command,
                body=number_body(number) if command.body_digest else b"",
            )
        )

    async def update(self, key: int | str, number: float, **changes: object) -> Operation:
        return await self.submit(key, update(number, **changes), number)

    async def updates(self, *seqs: int) -> None:
        """Updates with the number of their seq, each to its end."""
        for seq in seqs:
            await self.end(await self.update(seq, seq))

    async def running(self, number: float, seq: int = 1) -> Operation:
        """An update that runs until its hold is set."""
        self.faults.holds[number] = threading.Event()
        operation = await self.update(seq, number)
        await started(self, operation)
        return operation

    async def forward_backward(self, seq: int, number: float, **changes: object) -> Operation:
        return await self.submit(seq, forward_backward(number, **changes), number)

    async def step(self, seq: int, *include_seqs: int, **changes: object) -> Operation:
        return await self.submit(seq, optim_step(*include_seqs, **changes), 0)

    async def end(self, operation: Operation) -> Operation:
        """The operation once it has ended; while a controller recovers, answers come early."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                ended = await self.controller.get_operation(operation.operation_id, PATIENCE_S)
                if ended.state.is_final:
                    return ended

    async def landed(self) -> None:
        """Until no publication is under way."""
        await self.controller._turns._publisher.landed()

    def put_folder(self, name: str, number: float) -> Path:
        """A folder to import; one that is there stays as it is. Returns its only file."""
        path = self.paths.models_root / name / IMPORTED_NAME
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(number))
        return path

    @property
    def weights(self) -> list[tuple[list[float], float]]:
        return self.worker.trainer.weights

    @property
    def bodies(self) -> set[str]:
        return {path.name for path in self.paths.bodies.iterdir()}


class OnePolicy:
    """`Policies` where there is one, which may teach itself."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def policy(self, policy_id: str) -> Policy:
        row = self._machine.journal.store.policy(policy_id)
        if row is None:
            raise policy_not_found(policy_id)
        return row.to_policy()

    async def submit(self, submission: Submission) -> Operation:
        return await self._machine.controller.submit(submission)

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        return await self._machine.controller.get_operation(operation_id, wait_s)

    async def cancel_operation(self, operation_id: str) -> Operation:
        return await self._machine.controller.cancel_operation(operation_id)

    async def read_output(self, policy_id: str, digest: str) -> bytes:
        assert policy_id == self._machine.spec.policy_id
        return (self._machine.paths.results / digest).read_bytes()


RATE = 0.5


def digest_of(number: float) -> str:
    return hashlib.sha256(number_body(number)).hexdigest()


def update(number: float, **changes: object) -> UpdateCommand:
    """An update that makes a version, whatever its loss clips."""
    command = UpdateCommand(
        loss=LossConfig(kind=LossKind.GRPO),
        optim=OptimStepConfig(learning_rate=RATE, step_on_zero_gradient=True),
        expected_version=None,
        body_digest=digest_of(number),
    )
    return replace(command, **changes)


def forward_backward(number: float, **changes: object) -> ForwardBackwardCommand:
    command = ForwardBackwardCommand(
        loss=LossConfig(kind=LossKind.GRPO), expected_version=None, body_digest=digest_of(number)
    )
    return replace(command, **changes)


def taught(*teachers: Teacher, num_tokens: int = 3) -> LossConfig:
    """A loss that distils what these say of its batch."""
    distillation = DistillationConfig(
        Divergence.FORWARD_KL, teachers=teachers, num_teacher_tokens=num_tokens
    )
    return LossConfig(kind=LossKind.GRPO, distillation=distillation)


def from_forward(operation: Operation) -> LossConfig:
    old = OldLogprobs(
        kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id=operation.operation_id
    )
    return LossConfig(kind=LossKind.GRPO, old_logprobs=old)


def optim_step(*include_seqs: int, **changes: object) -> OptimStepCommand:
    command = OptimStepCommand(
        optim=OptimStepConfig(learning_rate=RATE), expected_version=None, include_seqs=include_seqs
    )
    return replace(command, **changes)


def forward(number: float) -> ForwardCommand:
    return ForwardCommand(
        with_entropy=False,
        use_reference=False,
        expected_version=None,
        body_digest=digest_of(number),
    )


DISCARD = DiscardGradientsCommand()
SAVE = SaveCheckpointCommand(checkpoint_id="")


def save(checkpoint_id: str, **options: Any) -> SaveCheckpointCommand:
    return SaveCheckpointCommand(checkpoint_id=checkpoint_id, **options)


def publish(name: str, **options: Any) -> PublishVersionCommand:
    return PublishVersionCommand(name=name, **options)


def load(checkpoint_id: str) -> LoadCheckpointCommand:
    return LoadCheckpointCommand(checkpoint_id=checkpoint_id)


def import_weights(number: float, **changes: object) -> ImportWeightsCommand:
    """Import of the folder with this number, which a machine makes when the command is
    submitted."""
    command = ImportWeightsCommand(
        folder=f"outer-{number:g}",
        mode=ImportMode.DELTA,
        reset_optimizer=False,
        expected_version=None,
    )
    return replace(command, **changes)


def _key(key: int | str | None) -> OperationKey:
    match key:
        case int():
            return SeqKey(seq=key)
        case str():
            return RequestKey(request_id=key)
        case None:
            return NoKey()


def code_of(operation: Operation | Outcome) -> str:
    assert isinstance(operation.result, FailedResult), operation
    return str(operation.result.error["code"])


async def started(machine: Machine, operation: Operation) -> None:
    """Until the operation's forward-backward has begun."""
    while True:
        now = await machine.controller.get_operation(operation.operation_id, 0.0)
        assert not now.state.is_final, now
        if now.state is OperationState.RUNNING and now.progress.micro_batches_done == 1:
            return
        await asyncio.sleep(0.005)
