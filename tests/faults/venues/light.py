"""A fault run on two processes without Ray: callers, crash points, and the verdict.

Every call is retried as a client retries it, and whatever was acknowledged is judged.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.commands import (
    Command,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    OperationKey,
    OptimStepCommand,
    PublishVersionCommand,
    RequestKey,
    SaveCheckpointCommand,
    SeqKey,
    Submission,
    UpdateCommand,
)
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import open_database
from ratoon.engine.types import FailedResult, Operation, PolicySpec
from ratoon.errors import RatoonError
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.rollout.serial import batch_to_bytes
from ratoon.sole_service import free_port
from ratoon.train.spec import ONE_DEVICE, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    FullTuning,
    ImportMode,
    ImportResult,
    OnChangedNumerics,
    OperationKind,
    OptimStepConfig,
    PublishConfig,
    PublishKind,
    Recovery,
    ReferencePolicy,
    Sequencing,
    StepResult,
)
from tests.faults.judge.calls import (
    LEARNING_RATE,
    NAME,
    NO_VERSION,
    POLICY,
    Call,
    Kind,
    batch_of,
    import_folder,
    in_any_order,
    segments,
    write_import,
)
from tests.faults.judge.history import Notes, Told, Verdict, read_journal
from tests.faults.judge.oracle import Oracle, judge, loss_request
from tests.faults.venues.pair import Pair
from tests.faults.venues.processes import Settings
from tests.faults.venues.rpc import PeerLostError

NUM_CLIENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LightOptions:
    """`model_folder`: a small Hugging Face model.

    `inference_url`: of an engine that gets each version, "": none.
    """

    seed: int
    model_folder: Path
    sequencing: Sequencing = Sequencing.CLIENT
    build: str = ""
    has_power_cuts: bool = False
    has_store: bool = False
    inference_url: str = ""
    patience_s: float = 600.0


class LightRun:
    """One policy on a `Pair`, its callers' notes and the calls still to be made."""

    def __init__(self, options: LightOptions, root: Path) -> None:
        self.options, self.root = options, root
        self.spec = _policy_spec(options)
        self.trainer = _trainer_spec(self.spec)
        self.settings = Settings(
            root=root,
            spec=self.spec,
            trainer=self.trainer,
            limits=LimitsConfig(gap_wait_s=5.0),
            # Often: bodies go as soon as they may, and a recovery seldom begins at the start.
            checkpoints=CheckpointConfig(every_operations=7, keep=1),
            build=options.build,
            has_power_cuts=options.has_power_cuts,
            has_store=options.has_store,
            inference_url=options.inference_url,
            http_port=free_port(),
        )
        self.paths = policy_paths(self.settings.data_root, POLICY)
        self.notes = Notes()
        self.segments = segments(options.seed)
        self.rng = random.Random(options.seed)
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._next_seq = 1
        _make_policy(self.settings)
        self.pair = Pair(self.settings, options.patience_s)

    def play_segment(self) -> None:
        self.play(next(self.segments))

    def take_seqs(self, count: int) -> int:
        """The first of `count` seqs that no other call gets."""
        first = self._next_seq
        self._next_seq += count
        return first

    def play(self, calls: list[Call]) -> None:
        """Make the calls, each with the seq of its place, and wait for all of their ends."""
        first = self.take_seqs(len(calls))
        keys = {call.number: first + index for index, call in enumerate(calls)}
        for call in calls:
            if call.kind is Kind.IMPORT_WEIGHTS:
                seed, model = self.options.seed, self.options.model_folder
                write_import(call, seed, model, self.paths.models_root)
        for block in in_any_order(calls):
            arrivals = [*block, *self.rng.sample(block, len(block) // 3)]
            self.rng.shuffle(arrivals)
            list(self._pool.map(lambda call: self.submit(call, keys[call.number]), arrivals))
        list(self._pool.map(self.wait, calls))

    def finish(self) -> Verdict:
        """Save the last checkpoint, stop everything and judge."""
        final = Call(number=1 << 30, kind=Kind.SAVE_CHECKPOINT, checkpoint_id="final")
        self.play([final])
        self.pair.stop()
        self.notes.errors += self.pair.failures
        records = read_journal(self.settings.database, POLICY)
        return judge(self.notes, records, self.oracle, self.paths)

    @cached_property
    def oracle(self) -> Oracle:
        trainer = Trainer.create(self.trainer)
        return Oracle(trainer, self.options.seed, self.root / "oracle")

    def submit(self, call: Call, place: int) -> None:
        """Make one call, and cancel it at once where it says so."""
        try:
            operation = self.pair.submit(self.submission(call, place))
            self.notes.acknowledged(call, operation.operation_id, operation.seq)
            if call.is_cancelled:
                self.pair.cancel(operation.operation_id)
        except (RatoonError, PeerLostError) as error:
            self.notes.errors.append(f"call {call.number} ({call.kind}) was refused: {error!r}")
            return

    def wait(self, call: Call) -> None:
        """Until the call has ended; note how."""
        for operation_id in sorted(self.notes.operations.get(call.number, ())):
            try:
                operation = self.pair.end(operation_id)
            except (RatoonError, PeerLostError, TimeoutError) as error:
                self.notes.errors.append(f"call {call.number} ({call.kind}) has no end: {error!r}")
                continue
            self.notes.told[operation_id] = told(operation)

    def submission(self, call: Call, place: int) -> Submission:
        body = bytes(batch_to_bytes(batch_of(call, self.options.seed))) if call.has_batch else b""
        key: OperationKey = SeqKey(seq=place)
        if self.options.sequencing is Sequencing.SERVER:
            key = RequestKey(request_id=f"call-{call.number}")
        return Submission(policy_id=POLICY, key=key, command=self._command(call, body), body=body)

    def _command(self, call: Call, body: bytes) -> Command:
        digest = hashlib.sha256(body).hexdigest()
        expected = NO_VERSION if call.is_refused else None
        optim = OptimStepConfig(learning_rate=LEARNING_RATE)
        forwards = (
            {call.from_forward: self.notes.first(call.from_forward)} if call.from_forward else {}
        )
        seqs = self.notes.seqs
        match call.kind:
            case Kind.UPDATE:
                return UpdateCommand(
                    loss=loss_request(call, forwards),
                    optim=optim,
                    expected_version=expected,
                    body_digest=digest,
                )
            case Kind.FORWARD_BACKWARD:
                return ForwardBackwardCommand(
                    loss=loss_request(call, forwards),
                    expected_version=expected,
                    body_digest=digest,
                )
            case Kind.OPTIM_STEP:
                return OptimStepCommand(
                    optim=optim,
                    expected_version=expected,
                    include_seqs=tuple(seqs[number] for number in call.includes if number in seqs),
                )
            case Kind.DISCARD_GRADIENTS:
                return DiscardGradientsCommand()
            case Kind.FORWARD:
                return ForwardCommand(
                    with_entropy=True,
                    use_reference=False,
                    expected_version=expected,
                    body_digest=digest,
                )
            case Kind.SAVE_CHECKPOINT:
                return SaveCheckpointCommand(checkpoint_id=call.checkpoint_id)
            case Kind.LOAD_CHECKPOINT:
                return LoadCheckpointCommand(checkpoint_id=call.checkpoint_id)
            case Kind.IMPORT_WEIGHTS:
                return ImportWeightsCommand(
                    folder=import_folder(call, self.options.seed),
                    mode=ImportMode.FULL if call.replaces else ImportMode.DELTA,
                    reset_optimizer=call.resets,
                    expected_version=expected,
                )
            case Kind.PUBLISH_VERSION:
                return PublishVersionCommand(name=NAME, overwrite=True)


@contextmanager
def light_run(options: LightOptions) -> Iterator[LightRun]:
    """A run in a folder of its own, which goes with it; its processes are up."""
    with tempfile.TemporaryDirectory(prefix="rt-faults-") as folder:
        run = LightRun(options, Path(folder))
        with run.pair:
            yield run


def told(operation: Operation) -> Told:
    """What a caller knows of an operation that has ended."""
    end = str(operation.state)
    if isinstance(operation.result, FailedResult) and end != "cancelled":
        end = str(operation.result.error["code"])
    result = operation.result
    version = result.version if isinstance(result, StepResult | ImportResult) else None
    return Told(operation_id=operation.operation_id, end=end, version=version)


def _policy_spec(options: LightOptions) -> PolicySpec:
    return PolicySpec(
        policy_id=POLICY,
        model=ModelSpec(
            base=FolderBase(folder=str(options.model_folder)),
            tuning=FullTuning(),
            dtype=ModelDtype.FLOAT32,
            seed=1,
        ),
        optimizer=AdamWConfig(),
        sequencing=options.sequencing,
        deterministic=True,
        recovery=Recovery.REPLAY,
        on_changed_numerics=OnChangedNumerics.STOP,
        publish=PublishConfig(
            kind=PublishKind.EVERY, every_n=1, deltas=bool(options.inference_url)
        ),
        keep_versions=2,
        micro_batch_tokens=24,
        reference=ReferencePolicy.NONE,
        parallel=ONE_DEVICE,
        attention_backend="reference",
    )


def _trainer_spec(spec: PolicySpec) -> TrainerSpec:
    return TrainerSpec(
        model=spec.model,
        optimizer=spec.optimizer,
        deterministic=True,
        micro_batch_tokens=spec.micro_batch_tokens,
        keep_reference=False,
        attention_backend=spec.attention_backend,
        device="cpu",
        num_threads=1,
    )


def _make_policy(settings: Settings) -> None:
    """What the engine writes when a policy is created."""
    settings.data_root.mkdir(parents=True)
    engine = open_database(f"sqlite:///{settings.database}")
    record = OperationRecord(
        operation_id=f"{POLICY}.create",
        policy_id=POLICY,
        kind=OperationKind.CREATE_POLICY,
        seq=0,
        request_id="",
        payload_hash="",
        command=None,
        body_digest="",
        body_bytes=0,
        key_id="",
        state=JournalState.APPLIED,
        choices=None,
        result=None,
        version=None,
        weights_digest="",
        numerics="",
        created_at=0.0,
        started_at=None,
        finished_at=0.0,
    )
    SqlStore(engine).insert_policy(settings.spec, record)
    engine.dispose()
