"""One policy over real files: journal in SQLite, controller and worker here, a real CPU trainer.

Enters a data root, which may be what a crash left, leaves operations and digests of weights.
Invariant: everything that is to survive is below the data root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import open_database
from ratoon.engine.types import PolicySpec
from ratoon.engine.worker.tasks import Outcome, Task
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.stream.files import make_folder
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    FullTuning,
    LogprobsOf,
    OnChangedNumerics,
    PublishConfig,
    PublishKind,
    Recovery,
)
from tests.engine.fake_trainer import Faults
from tests.engine.harness import (
    DISCARD,
    Machine,
    forward,
    forward_backward,
    load,
    optim_step,
    policy_spec,
    publish,
    save,
    update,
)
from tests.engine.local_ports import LocalWorker

DATABASE_NAME = "ratoon.sqlite"


def spec_of(base: Path) -> PolicySpec:
    """A policy of the model folder `base`, of which two versions are published."""
    model = ModelSpec(
        base=FolderBase(folder=str(base)), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=1
    )
    return policy_spec(
        model=model,
        recovery=Recovery.REPLAY,
        on_changed_numerics=OnChangedNumerics.STOP,
        publish=PublishConfig(kind=PublishKind.EVERY, every_n=1),
        keep_versions=2,
    )


class PolicyGoneError(Exception):
    """The journal does not know the policy."""


class TrainingWorker(LocalWorker):
    """`LocalWorker` with a real trainer; `digests` are those after each seq."""

    def __init__(self, faults: Faults) -> None:
        self.digests: dict[int, tuple[str, str]] = {}
        self.real: list[Trainer] = []
        super().__init__(faults)

    def _create(self, spec: TrainerSpec) -> Any:
        self.real.append(Trainer.create(spec))
        return self.real[-1]

    async def apply(self, token: int, task: Task) -> Outcome:
        def apply() -> Outcome:
            outcome = self.core.apply(token, task)
            self.digests[task.seq] = digests_of(self.real[-1])
            return outcome

        return await self._run(apply)

    async def skip(self, token: int, seq: int, outcome: Outcome) -> Outcome:
        skipped = await super().skip(token, seq, outcome)
        self.digests[seq] = await self._run(lambda: digests_of(self.real[-1]))
        return skipped


class DurableMachine(Machine):
    """A `Machine` that is lost and started again as often as one likes."""

    def __init__(self, root: Path, spec: PolicySpec, *, creates: bool, keep: int = 1) -> None:
        """With automatic checkpoints between those that are asked for, of which `keep` are kept.

        Raises `PolicyGoneError` where the policy is not there and this does not create it."""
        make_folder(root)
        url = f"sqlite:///{root / DATABASE_NAME}"
        if not creates:
            _require_policy(url, spec.policy_id)
        checkpoints = CheckpointConfig(every_operations=4, every_s=0, every_bytes=0, keep=keep)
        super().__init__(root, spec, LimitsConfig(), url, TrainingWorker, checkpoints)

    @property
    def training(self) -> TrainingWorker:
        return cast("TrainingWorker", self.worker)

    async def abandon(self, *, closes: bool) -> None:
        """Stop without a word, as a crash would; the database is closed or left as it is."""
        await self.controller._turns.stop(0.0)
        self.worker._compute.shutdown()
        if closes:
            self.journal.store._engine.dispose()


def commands() -> Mapping[int, tuple[Any, float]]:
    """What is asked of the policy, by seq: (command, number of its batch)."""
    calls: tuple[tuple[Callable[[float], Any] | object, float], ...] = (
        (update, 1),
        (update, 2),
        (forward_backward, 3),
        (partial(forward_backward, with_logprobs=LogprobsOf.ALL), 4),
        (save("first"), 0),
        (forward_backward, 6),
        (optim_step(), 0),
        (forward, 8),
        (update, 9),
        (forward_backward, 10),
        (DISCARD, 0),
        (save("first", overwrite=True, keep_last=1), 0),
        (update, 13),
        (forward_backward, 14),
        (load("first"), 0),
        (update, 16),
        (forward_backward, 17),
        (update, 18),
        (optim_step(), 0),
        (update, 20),
        (update, 21),
        # Behind a checkpoint: its body is needed still.
        (update, 22),
        (forward_backward, 23),
        (partial(forward_backward, expected_version=99), 24),
        (optim_step(discard_on_poison=True), 0),
        (forward_backward, 26),
        (optim_step(), 0),
        (publish("kept"), 0),
        (update, 29),
        (update, 30),
        (publish("gone"), 0),
    )
    return {
        seq: (call(number) if callable(call) else call, number)
        for seq, (call, number) in enumerate(calls, start=1)
    }


def digests_of(trainer: Trainer) -> tuple[str, str]:
    """Digests of weights, moments and the counter, and of the gradients of the open window."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(trainer.ranks.own.gradients.sums().items()):
        hasher.update(name.encode())
        hasher.update(tensor.detach().numpy().tobytes())
    return trainer.state_digest(), hasher.hexdigest()


def _require_policy(url: str, policy_id: str) -> None:
    engine = open_database(url)
    is_there = SqlStore(engine).policy(policy_id) is not None
    engine.dispose()
    if not is_there:
        raise PolicyGoneError(policy_id)
