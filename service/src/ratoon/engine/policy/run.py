"""The state of a policy in memory, and the ports its controller acts through.

A start fills the state from the journal; afterwards each field has one writer, which the class
names. The state changes on the controller's event loop only, and a field changes only after the
journal write that makes it true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.crash_points import Reach
from ratoon.engine.files.archive import Archive
from ratoon.engine.files.losses import Position, write_position
from ratoon.engine.files.paths import BodyFiles, PolicyPaths
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import OperationEnd, OperationRecord
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.limits import Claims
from ratoon.engine.policy.queue import Ledger, LiveOperation, Sequencer, Window
from ratoon.engine.types import PolicySpec
from ratoon.engine.worker.tasks import Numerics, Outcome, RemoteWorker
from ratoon.metrics import Change, MetricsSink
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import PolicyState, Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The world outside the controller. `now` gives seconds since the epoch."""

    journal: Journal
    worker: RemoteWorker
    metrics: MetricsSink
    now: Callable[[], float]


@dataclass(slots=True, kw_only=True)
class PolicyRun:
    """The state that the parts of one controller share; see the module."""

    spec: PolicySpec
    # A start adds what the first load of the policy chose.
    trainer: TrainerSpec
    ports: Ports
    limits: LimitsConfig
    checkpoints: CheckpointConfig
    paths: PolicyPaths
    bodies: BodyFiles
    # Shared by all policies.
    claims: Claims
    reach: Reach
    archive: Archive = field(default_factory=Archive)

    # Written by each start alone: when the policy was created, the fencing token, the worker's
    # numerics, and the checkpoints in the archive that the start has compared with the journal.
    created_at: float = 0.0
    token: int = 0
    numerics: Numerics = field(default_factory=lambda: Numerics.of({}))
    archived: frozenset[str] = frozenset()
    # Filled by a start, then changed through their own methods.
    sequencer: Sequencer = field(default_factory=lambda: Sequencer(turn=1))
    ledger: Ledger = field(init=False)

    # Written by `enter`. `failure`: why the policy failed.
    state: PolicyState = PolicyState.CREATING
    failure: str = ""
    # Written by the executor: versions, and the open window.
    version: int = 0
    max_version: int = 0
    window: Window = field(default_factory=Window)
    # The worker's last outcome, where the journal does not have it yet; the executor completes it.
    stored_outcome: Outcome | None = None
    # Written by `set_published`: versions that can be fetched, in publication order.
    published: tuple[int, ...] = ()
    # Written by the breaker: optimizer steps skipped for their numbers since the last one taken.
    skipped_in_row: int = 0
    # Written by `has_come_to`: the content of the position file.
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        self.ledger = Ledger(on_settled=self.claims.drop)

    @property
    def policy_id(self) -> str:
        return self.spec.policy_id

    @property
    def replays(self) -> bool:
        """Whether lost work is replayed, so that bodies are kept until a checkpoint covers them."""
        return self.spec.recovery is Recovery.REPLAY

    def enter(self, state: PolicyState, failure: str = "") -> None:
        """Change the policy's state. `failure`: why it failed; "": it has not."""
        self.state, self.failure = state, failure

    async def set_published(self, published: tuple[int, ...]) -> None:
        """Change which versions can be fetched, in the journal first."""
        await self.ports.journal.set_published(self.token, self.policy_id, published)
        self.published = published

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
        """Note a write of the journal, before callers hear of it or files are deleted by it."""
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

    def settle(self, live: LiveOperation) -> None:
        """Report an operation that has ended to its callers and to the metrics."""
        self.ledger.settle(live)
        self.send(telemetry.entered(live.record, live.record.state))

    def send(self, changes: Sequence[Change]) -> None:
        self.ports.metrics.send(changes)
