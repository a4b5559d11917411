"""The state of a policy in memory, and the ports its controller acts through.

Filled from the journal at start, changed on the controller's event loop only. A field changes only
after the journal write that makes it true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.crash_points import Reach
from ratoon.engine.files.archive import Archive, NoArchive
from ratoon.engine.files.paths import BodyFiles, PolicyPaths
from ratoon.engine.files.position import Position, write_position
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import OperationEnd, OperationRecord
from ratoon.engine.policy.claims import Claims
from ratoon.engine.policy.ledger import Ledger
from ratoon.engine.policy.sequencer import Sequencer
from ratoon.engine.policy.window import Window
from ratoon.engine.types import PolicySpec
from ratoon.engine.worker.numerics import Numerics
from ratoon.engine.worker.tasks import Outcome, WorkerPort
from ratoon.metrics import Change, MetricsSink
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import PolicyState, Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The world outside the controller. `now` gives seconds since the epoch."""

    journal: Journal
    worker: WorkerPort
    metrics: MetricsSink
    now: Callable[[], float]


@dataclass(slots=True, kw_only=True)
class PolicyRun:
    """Mutable; see the module."""

    spec: PolicySpec
    trainer: TrainerSpec
    ports: Ports
    limits: LimitsConfig
    checkpoints: CheckpointConfig
    paths: PolicyPaths
    bodies: BodyFiles
    # Shared by all policies.
    claims: Claims
    reach: Reach
    archive: Archive = field(default_factory=NoArchive)
    state: PolicyState = PolicyState.CREATING
    # Why the policy failed.
    failure: str = ""
    token: int = 0
    version: int = 0
    max_version: int = 0
    published: tuple[int, ...] = ()
    # Optimizer steps skipped for their numbers since the last one taken.
    skipped_in_row: int = 0
    # Numerics of the worker.
    numerics: Numerics = field(default_factory=lambda: Numerics.of({}))
    window: Window = field(default_factory=Window)
    # The applied ForwardBackwards of the open window, by seq.
    window_records: dict[int, OperationRecord] = field(default_factory=dict[int, OperationRecord])
    sequencer: Sequencer = field(default_factory=lambda: Sequencer(turn=1))
    # The worker's last outcome, where the journal does not have it yet.
    stored_outcome: Outcome | None = None
    # Checkpoints in the archive that this start has compared with the journal.
    archived: frozenset[str] = frozenset()
    # What the position file says.
    position: Position = field(default_factory=Position)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(on_settled=self.claims.drop)

    @property
    def policy_id(self) -> str:
        return self.spec.policy_id

    @property
    def replays(self) -> bool:
        """Whether lost work is replayed, so that bodies are kept until a checkpoint covers them."""
        return self.spec.recovery is Recovery.REPLAY

    async def accept(self, record: OperationRecord, next_seq: int) -> None:
        """See `FencedStore.accept`."""
        count = await self.ports.journal.accept(self.token, record, next_seq)
        self.has_come_to(count, max_seq=record.seq)

    async def end(self, end: OperationEnd, seq: int = 0) -> None:
        """See `FencedStore.end`. `seq`: the operation's, where it ends in its turn."""
        count = await self.ports.journal.end(self.token, self.policy_id, end)
        self.has_come_to(count, last_seq=seq, version=end.version)

    def has_come_to(
        self, count: int, *, max_seq: int = 0, last_seq: int = 0, version: int = 0
    ) -> None:
        """The journal has a write that callers are told of next, or files are deleted by."""
        before = self.position
        self.position = Position(
            count=max(count, before.count),
            token=self.token,
            max_seq=max(max_seq, before.max_seq),
            last_seq=max(last_seq, before.last_seq),
            version=max(version, before.version),
        )
        write_position(self.paths.position, self.position)

    async def check_newest(self) -> None:
        """Raises `FencedError` where another controller has taken over."""
        await self.ports.journal.check_token(self.token, self.policy_id)

    def send(self, changes: Sequence[Change]) -> None:
        self.ports.metrics.send(changes)
