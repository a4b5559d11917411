"""What a worker needs of a trainer; `train.trainer.Trainer` implements it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ratoon.model.spec import ModelInfo
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.selection import Counters
from ratoon.train.loss.spec import Loss, Normalisation, OptimStep
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import StepReport

OnProgress = Callable[[int, int, int], None]
IsCancelled = Callable[[], bool]


class PreparedPort(Protocol):
    @property
    def plan(self) -> UpdatePlan: ...


class ForwardArraysPort(Protocol):
    @property
    def logprobs(self) -> NDArray[np.floating]: ...
    @property
    def entropy(self) -> NDArray[np.floating] | None: ...
    @property
    def report(self) -> StepReport: ...


class SnapshotPort(Protocol):
    """A trainer's state between two steps; later steps do not change it."""

    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...

    def write(self, folder: Path, as_of: AsOf) -> int:
        """Write a checkpoint; its size in bytes. Thread-safe. Raises `FileExistsError`."""
        ...

    def verify(self, folder: Path) -> None:
        """Read it back. Thread-safe. Raises `RatoonError` where it is damaged."""
        ...


class WeightsCopyPort(Protocol):
    """A trainer's weights between two steps; later steps do not change it."""

    def write(self, folder: Path) -> Mapping[str, str]:
        """Write model or adapter files, over those of the folder; digests by name. Thread-safe."""
        ...


class ImportedWeightsPort(Protocol):
    """A folder's weights in memory, checked; `digest`: of its files."""

    @property
    def digest(self) -> str: ...
    @property
    def num_tensors(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...


class TrainerPort(Protocol):
    version: int

    @property
    def normalisation(self) -> Normalisation: ...

    def info(self) -> ModelInfo: ...

    def fingerprint(self) -> dict[str, str]: ...

    def state_digest(self) -> str: ...

    def prepare(self, batch: RolloutBatch, loss: Loss) -> PreparedPort: ...

    def plan_forward(self, batch: RolloutBatch) -> UpdatePlan: ...

    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: Loss,
        plan: UpdatePlan,
        *,
        old_logprobs_J: NDArray[np.floating] | None,
        entropy_J: NDArray[np.floating] | None,
        on_progress: OnProgress,
        is_cancelled: IsCancelled,
    ) -> StepReport: ...

    def optim_step(self, step: OptimStep) -> StepReport: ...

    def update(
        self,
        batch: RolloutBatch,
        loss: Loss,
        step: OptimStep,
        plan: UpdatePlan,
        *,
        old_logprobs_J: NDArray[np.floating] | None,
        entropy_J: NDArray[np.floating] | None,
        on_progress: OnProgress,
        is_cancelled: IsCancelled,
    ) -> StepReport: ...

    def discard_gradients(self) -> None: ...

    @property
    def is_window_empty(self) -> bool: ...
    @property
    def window_counters(self) -> Counters: ...

    def gradient_bytes(self, names: Sequence[str]) -> int: ...

    def write_gradients(self, path: Path, names: Sequence[str]) -> None: ...

    def forward(
        self,
        batch: RolloutBatch,
        plan: UpdatePlan,
        *,
        with_entropy: bool,
        use_reference: bool,
        on_progress: OnProgress,
        is_cancelled: IsCancelled,
    ) -> ForwardArraysPort: ...

    def snapshot(self) -> SnapshotPort: ...

    def copy_weights(self) -> WeightsCopyPort:
        """Replaces what an earlier call gave."""
        ...

    def load_checkpoint(self, folder: Path) -> None: ...

    def read_weights(self, folder: Path, digest: str) -> ImportedWeightsPort: ...

    def import_weights(self, weights: Any, *, adds: bool, resets_optimizer: bool) -> None:
        """Apply what `read_weights` gave."""
        ...


CreateTrainer = Callable[[TrainerSpec], TrainerPort]
