"""A whole engine of one policy in this process: real controller, worker and store, fake trainer.

Enter numbers, leave operations. `Machine.crash_controller` and `crash_worker` lose what a killed
process loses: everything but the database and the files.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ratoon.config import LimitsConfig
from ratoon.engine.controller import Controller
from ratoon.engine.crash_points import never
from ratoon.engine.fenced import FencedStore
from ratoon.engine.files import BodyFiles, policy_paths
from ratoon.engine.journal import (
    JournalState,
    OperationEnd,
    OperationRecord,
    PolicyHistory,
    RollBack,
)
from ratoon.engine.policy_run import PolicyRun, Ports
from ratoon.engine.store import SqlStore
from ratoon.engine.tables import open_database
from ratoon.engine.tasks import (
    BatchCommand,
    ForwardBackwardTask,
    ForwardTask,
    LoadRequest,
    OldLogprobsSource,
    Outcome,
    WorkerLostError,
    WorkerStatus,
    WorkerTask,
)
from ratoon.engine.types import (
    CheckpointInfo,
    Command,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    LoadCheckpointCommand,
    NoKey,
    OnChangedNumerics,
    Operation,
    OperationKey,
    OperationKind,
    OperationResult,
    OptimStepCommand,
    PolicySpec,
    PolicyState,
    Progress,
    PublishConfig,
    PublishKind,
    Recovery,
    ReferencePolicy,
    RequestKey,
    SaveCheckpointCommand,
    SeqKey,
    Sequencing,
    Submission,
    UpdateCommand,
)
from ratoon.engine.worker import WorkerCore
from ratoon.metrics import Change
from ratoon.model.spec import FullTuning, ModelDtype, ModelInfo, ModelSpec, PresetBase
from ratoon.stream.manifest import WeightManifest
from ratoon.train.config import (
    AdamWConfig,
    LossKind,
    LossRequest,
    OldLogprobs,
    OldLogprobsKind,
    OptimRequest,
)
from ratoon.train.spec import TrainerSpec
from tests.engine.fake_trainer import FakeTrainer, Faults, export_fake, number_body

T = TypeVar("T")
POLICY = "p"


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
        num_workers=1,
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
        seq=0,
        request_id="",
        payload_hash="",
        command=None,
        body_digest="",
        state=JournalState.ACCEPTED,
        plan=None,
        result=None,
        version=None,
        weights_digest="",
        created_at=1.0,
        started_at=None,
        finished_at=None,
    )


class LocalJournal:
    """`Journal` over the real store. `lost` writes happen and are not answered, once each."""

    def __init__(self, url: str) -> None:
        engine = open_database(url)
        self.store, self.fenced = SqlStore(engine), FencedStore(engine)
        self.lost: set[str] = set()

    async def acquire(self, policy_id: str) -> int:
        return self.fenced.acquire(policy_id)

    async def history(self, policy_id: str) -> PolicyHistory:
        return self.store.history(policy_id)

    async def find_key(self, policy_id: str, key: OperationKey) -> OperationRecord | None:
        return self.store.find_key(policy_id, key)

    async def find_operation(self, operation_id: str) -> OperationRecord | None:
        return self.store.find_operation(operation_id)

    async def accept(self, token: int, record: OperationRecord, next_seq: int) -> None:
        self.fenced.accept(token, record, next_seq)
        self._answer("accept")

    async def begin(
        self, token: int, operation_id: str, started_at: float, plan: dict[str, object] | None
    ) -> None:
        self.fenced.begin(token, operation_id, started_at, plan)
        self._answer("begin")

    async def end(self, token: int, policy_id: str, end: OperationEnd) -> None:
        if "before end" in self.lost:
            self._answer("before end")
        self.fenced.end(token, policy_id, end)
        self._answer("end")

    async def amend(self, token: int, operation_id: str, result: OperationResult) -> None:
        self.fenced.amend(token, operation_id, result)
        self._answer("amend")

    async def set_published(self, token: int, policy_id: str, published: tuple[int, ...]) -> None:
        self.fenced.set_published(token, policy_id, published)

    async def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        self.fenced.set_policy(token, policy_id, state, info)

    async def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        return self.fenced.roll_back(token, policy_id, roll_back)

    async def checkpoints(self, policy_id: str) -> tuple[CheckpointInfo, ...]:
        return self.store.checkpoints(policy_id)

    def _answer(self, name: str) -> None:
        if name in self.lost:
            self.lost.remove(name)
            raise ConnectionError(f"the answer to {name} was lost")


class LocalWorker:
    """`WorkerPort` over the real core on one thread, and what a kill does to it.

    `loses_restore`: the next call of `restore` never arrives.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.trainers: list[FakeTrainer] = []
        self.is_dead = False
        self.loses_restore = False
        self._start()

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    def _start(self) -> None:
        self._compute = ThreadPoolExecutor(1)
        self.core = WorkerCore(self._create, export_fake, never)  # pyright: ignore[reportArgumentType]

    def _create(self, _spec: TrainerSpec) -> FakeTrainer:
        self.trainers.append(FakeTrainer(self._faults))
        return self.trainer

    async def _run(self, call: Callable[[], T]) -> T:
        if self.is_dead:
            raise WorkerLostError("dead")
        result = await asyncio.get_running_loop().run_in_executor(self._compute, call)
        if self.is_dead:
            raise WorkerLostError("died meanwhile")
        return result

    async def replace(self) -> None:
        self._start()
        self.is_dead = False

    async def fence(self, token: int) -> WorkerStatus:
        if not self.is_dead:
            self.core.fence(token)
        return await self._run(self.core.status)

    async def load(self, token: int, request: LoadRequest) -> ModelInfo:
        return await self._run(lambda: self.core.load(token, POLICY, request))

    async def prepare(
        self, token: int, command: BatchCommand, body_path: str, old_logprobs: OldLogprobsSource
    ) -> dict[str, object]:
        return await self._run(lambda: self.core.prepare(token, command, body_path, old_logprobs))

    async def apply(self, token: int, task: WorkerTask) -> Outcome:
        return await self._run(lambda: self.core.apply(token, task))

    async def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        await self._run(lambda: self.core.skip(token, seq, outcome))

    async def forward(self, token: int, task: ForwardTask) -> Outcome:
        return await self._run(lambda: self.core.forward(token, task))

    async def restore(self, token: int, tasks: tuple[ForwardBackwardTask, ...]) -> None:
        if self.loses_restore:
            self.loses_restore = False
            raise ConnectionError("the call was lost")
        await self._run(lambda: self.core.restore(token, tasks))

    async def publish(
        self, token: int, version: int, weights_root: str, created_at: float
    ) -> WeightManifest:
        return await self._run(lambda: self.core.publish(token, version, weights_root, created_at))

    async def progress(self) -> Progress:
        if self.is_dead:
            raise WorkerLostError("dead")
        return self.core.progress()

    async def cancel(self, operation_id: str) -> None:
        self.core.cancel(operation_id)


@dataclass
class ListSink:
    changes: list[Change] = field(default_factory=list[Change])

    def send(self, changes: Sequence[Change]) -> None:
        self.changes.extend(changes)


class Machine:
    """One policy and its processes; a database at `url` may have it already."""

    def __init__(
        self,
        root: Path,
        spec: PolicySpec,
        limits: LimitsConfig,
        url: str = "sqlite://",
        make_worker: Callable[[Faults], LocalWorker] = LocalWorker,
    ) -> None:
        self.spec, self.limits, self.root = spec, limits, root
        self.faults = Faults()
        self.journal = LocalJournal(url)
        if self.journal.store.policy(spec.policy_id) is None:
            self.journal.store.insert_policy(spec, life_record(spec.policy_id, "p.create"))
        self.worker = make_worker(self.faults)
        self.metrics = ListSink()
        self.paths = policy_paths(root, spec.policy_id)
        self.controller = self._controller()

    def _controller(self) -> Controller:
        self.run = PolicyRun(
            spec=self.spec,
            trainer=trainer_spec(self.spec),
            ports=Ports(
                journal=self.journal, worker=self.worker, metrics=self.metrics, now=time.time
            ),
            limits=self.limits,
            paths=self.paths,
            bodies=BodyFiles(self.paths),
            reach=never,
        )
        return Controller(self.run)

    async def start(self) -> Machine:
        await self.controller.start()
        return self

    async def restart_controller(self) -> None:
        """A new controller over the same journal and worker, as after a kill of the old one."""
        await self.controller._turns.stop(0.0)
        self.controller = self._controller()
        await self.controller.start()

    async def submit(self, key: int | str | None, command: Command, number: float) -> Operation:
        return await self.controller.submit(
            Submission(
                policy_id=self.spec.policy_id,
                key=_key(key),
                command=command,
                body=number_body(number) if hasattr(command, "body_digest") else b"",
            )
        )

    async def update(self, key: int | str, number: float, **changes: object) -> Operation:
        return await self.submit(key, update(number, **changes), number)

    async def forward_backward(self, seq: int, number: float) -> Operation:
        return await self.submit(seq, forward_backward(number), number)

    async def step(self, seq: int, *include_seqs: int) -> Operation:
        return await self.submit(seq, optim_step(*include_seqs), 0)

    async def end(self, operation: Operation) -> Operation:
        """The operation once it has ended."""
        ended = await self.controller.get_operation(operation.operation_id, 10.0)
        assert ended.state.is_final, ended
        return ended

    @property
    def weights(self) -> list[tuple[list[float], float]]:
        return self.worker.trainer.weights

    @property
    def bodies(self) -> set[str]:
        return {path.name for path in self.paths.bodies.iterdir()}


RATE = 0.5


def digest_of(number: float) -> str:
    return hashlib.sha256(number_body(number)).hexdigest()


def update(number: float, **changes: object) -> UpdateCommand:
    command = UpdateCommand(
        loss=LossRequest(kind=LossKind.GRPO),
        optim=OptimRequest(learning_rate=RATE),
        expected_version=None,
        body_digest=digest_of(number),
    )
    return replace(command, **changes)


def forward_backward(number: float) -> ForwardBackwardCommand:
    return ForwardBackwardCommand(
        loss=LossRequest(kind=LossKind.GRPO), expected_version=None, body_digest=digest_of(number)
    )


def from_forward(operation: Operation) -> LossRequest:
    old = OldLogprobs(
        kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id=operation.operation_id
    )
    return LossRequest(kind=LossKind.GRPO, old_logprobs=old)


def optim_step(*include_seqs: int) -> OptimStepCommand:
    return OptimStepCommand(
        optim=OptimRequest(learning_rate=RATE), expected_version=None, include_seqs=include_seqs
    )


def forward(number: float) -> ForwardCommand:
    return ForwardCommand(
        with_entropy=False,
        use_reference=False,
        expected_version=None,
        body_digest=digest_of(number),
    )


DISCARD = DiscardGradientsCommand()
SAVE = SaveCheckpointCommand(checkpoint_id="")


def save(checkpoint_id: str) -> SaveCheckpointCommand:
    return SaveCheckpointCommand(checkpoint_id=checkpoint_id)


def load(checkpoint_id: str) -> LoadCheckpointCommand:
    return LoadCheckpointCommand(checkpoint_id=checkpoint_id)


def _key(key: int | str | None) -> OperationKey:
    match key:
        case int():
            return SeqKey(seq=key)
        case str():
            return RequestKey(request_id=key)
        case None:
            return NoKey()
