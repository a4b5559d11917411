"""A trainer whose weights are the list of the steps that made them, in place of torch.

A batch is one number, its only reward. Gradients are the numbers of the window in order, a step
adds (gradients, learning rate) to the weights; so two histories are equal only if every operation
was applied once and in the same order. A folder to import holds a number, which is added as a step
of the rate 0, or replaces all.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.spec import ModelInfo
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import MicroBatch, UpdatePlan
from ratoon.rollout.selection import Counters
from ratoon.rollout.serial import batch_to_bytes
from ratoon.stream.files import digest_bytes, seal_document
from ratoon.train.loss.spec import Loss, Normalisation, OptimStep
from ratoon.train.saved_state import (
    FORMAT,
    MANIFEST_NAME,
    OPTIMIZER_STATES,
    STATE_DIGEST,
    AsOf,
)
from ratoon.train.spec import PassHooks
from ratoon_proto.types import (
    DivideBy,
    LogprobsOf,
    SelfCheckReport,
    SkipReason,
    StepReport,
    StepWarning,
    TokenWeight,
)

if TYPE_CHECKING:
    from ratoon.train.trainer import Trainer

INFO = ModelInfo(
    num_parameters=1,
    num_trainable_parameters=1,
    vocab_size=256,
    max_sequence_tokens=64,
    attention_backend="fake",
    optimizer_states="bf16_split_8bit",
    shard="gradients",
)
_TORN = -1.0
# The number of what a teacher is asked, of which it sees no rewards.
ASKED = 0.5
# The rate of a step that stands for moments that began anew.
RESET = -2.0
# A folder to import has its number there.
IMPORTED_NAME = "number.json"


def number_batch(number: float) -> RolloutBatch:
    """One group of one rollout with reward `number`."""
    return RolloutBatch(
        group_ids=("g",),
        group_offsets=np.array([0, 1]),
        prompt_tokens=np.array([1], np.int32),
        prompt_offsets=np.array([0, 1]),
        response_tokens=np.array([2, 3], np.int32),
        response_offsets=np.array([0, 2]),
        loss_mask=np.array([True, True]),
        sampler_logprobs=np.array([-0.5, -0.5], np.float32),
        old_logprobs=None,
        reference_logprobs=None,
        rewards=np.array([number]),
        advantages=None,
        token_weights=None,
        temperature=np.ones(1, np.float32),
        sampler_is_raw=np.zeros(1, np.bool_),
        truncated=np.zeros(1, np.bool_),
        policy_version=np.zeros(1, np.int64),
        top_p=np.ones(1, np.float32),
        top_k=np.zeros(1, np.int32),
    )


@cache
def number_body(number: float) -> bytes:
    return bytes(batch_to_bytes(number_batch(number)))


@dataclass(frozen=True)
class FakePrepared:
    """`gradient`: what it adds to the window. A Forward has no loss."""

    batch: RolloutBatch
    plan: UpdatePlan
    loss: Loss | None = None
    gradient: float = 0.0
    warnings: tuple[StepWarning, ...] = ()
    logprobs_of: LogprobsOf | None = None
    num_best: int = 0


@dataclass(frozen=True)
class FakeFound:
    """`answers_2J` None: nothing was asked for."""

    prepared: FakePrepared
    answers_2J: NDArray[np.floating] | None


@dataclass(frozen=True)
class FakeForward:
    logprobs: NDArray[np.floating]
    entropy: NDArray[np.floating] | None
    report: StepReport
    teacher: tuple[NDArray[np.int32], NDArray[np.floating]] | None = None
    values: NDArray[np.floating] | None = None


@dataclass(frozen=True)
class FakeCheck:
    report: SelfCheckReport | None
    warnings: tuple[StepWarning, ...] = ()


@dataclass(frozen=True)
class FakeImport:
    number: float
    digest: str
    num_tensors: int = 1
    size_bytes: int = 8
    dtypes: tuple[str, ...] = ("F32",)


@dataclass(frozen=True)
class FakeSnapshot:
    """`text`: JSON of weights and version, which is what a checkpoint of it holds."""

    version: int
    digest: str
    text: str
    faults: Faults

    def write(self, folder: Path, as_of: AsOf) -> int:
        if self.faults.full_disk:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.faults.writes is not None:
            self.faults.writes.wait()
        folder.mkdir()
        manifest = {
            "format": FORMAT,
            "version": self.version,
            **asdict(as_of),
            STATE_DIGEST: self.digest,
            OPTIMIZER_STATES: INFO.optimizer_states,
        }
        (folder / MANIFEST_NAME).write_bytes(seal_document(manifest))
        return (folder / "state.json").write_text(self.text)

    def verify(self, folder: Path) -> None:
        if (folder / "state.json").read_text() != self.text:
            raise RatoonError(ErrorCode.INTERNAL, f"checkpoint {folder.name} is damaged")


@dataclass
class Faults:
    """What goes wrong, by the number of the batch. `holds` run until let go or cancelled.

    `tears` are stepped on half way, so many times; after one of `kills_device`, as many times,
    nothing works but a new trainer.
    `checks` has what a self-check before a publication finds, by version.
    `noise` is added to each gradient; snapshots are written once `writes` is set, folders to import
    are read once `reads` is.
    """

    breaks: set[float] = field(default_factory=set[float])
    refuses: set[float] = field(default_factory=set[float])
    skips: set[float] = field(default_factory=set[float])
    empties: set[float] = field(default_factory=set[float])
    tears: dict[float, int] = field(default_factory=dict[float, int])
    kills_device: dict[float, int] = field(default_factory=dict[float, int])
    no_memory: set[float] = field(default_factory=set[float])
    holds: dict[float, threading.Event] = field(default_factory=dict[float, threading.Event])
    checks: dict[int, SelfCheckReport] = field(default_factory=dict[int, SelfCheckReport])
    device: str = "fake"
    # Tokens of plans that are made from now on.
    plan_tokens: int = 64
    noise: float = 0.0
    full_disk: bool = False
    writes: threading.Event | None = None
    reads: threading.Event | None = None


class FakeTrainer:
    """One process's trainer; `Faults` are shared by those that come after it."""

    def __init__(self, faults: Faults) -> None:
        self.version = 0
        self.weights: list[tuple[list[float], float]] = []
        self.gradients: list[float] = []
        # Plans that were run.
        self.plans: list[UpdatePlan] = []
        self.found: FakeFound | None = None
        self.faults = faults
        self.is_device_dead = False

    def _use_device(self, number: float) -> None:
        self.is_device_dead = self.is_device_dead or _happens(self.faults.kills_device, number)
        self.check_device()

    def check_device(self) -> None:
        if self.is_device_dead:
            raise RuntimeError("an illegal memory access was encountered")

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(
            token_weight=TokenWeight.PER_SEQUENCE, default_divide_by=DivideBy.SEQUENCES
        )

    def info(self) -> ModelInfo:
        return INFO

    def fingerprint(self) -> dict[str, str]:
        return {"device": self.faults.device}

    def state_digest(self) -> str:
        self.check_device()
        return digest_bytes(json.dumps(self.weights).encode())

    def prepare(
        self,
        batch: RolloutBatch,
        loss: Loss,
        plan: UpdatePlan | None = None,
        *,
        old_logprobs_J: NDArray[np.floating] | None = None,
        entropy_J: NDArray[np.floating] | None = None,
        logprobs_of: LogprobsOf | None = None,
    ) -> FakePrepared:
        number = number_of(batch)
        if number in self.faults.refuses:
            raise RatoonError(ErrorCode.STALE_ROLLOUTS, "too old")
        if old_logprobs_J is not None:
            number = float(old_logprobs_J.sum())
        for said in (batch.teacher_logprobs, batch.reference_logprobs):
            number -= 0.0 if said is None else float(said.sum())
        plan = plan or self._plan()
        return FakePrepared(batch, plan, loss, number, logprobs_of=logprobs_of)

    def prepare_forward(
        self,
        batch: RolloutBatch,
        plan: UpdatePlan | None = None,
        *,
        num_best: int = 0,
        with_teacher: bool = False,
    ) -> FakePrepared:
        assert not with_teacher
        return FakePrepared(batch, plan or self._plan(), num_best=num_best)

    def _plan(self) -> UpdatePlan:
        return UpdatePlan(
            micro_batches=(MicroBatch(sequences=(0,), packed_tokens=3),),
            micro_batch_tokens=self.faults.plan_tokens,
            unshared_tokens=6,
            packed_tokens=3,
            replicated_pairs=6,
            packed_pairs=6,
        )

    def forward_backward(
        self,
        prepared: FakePrepared,
        hooks: PassHooks,
    ) -> StepReport:
        self.check_device()
        number = number_of(prepared.batch)
        self.plans.append(prepared.plan)
        hooks.on_progress(0, 2, 0)
        self.gradients.append(_TORN)
        hooks.on_progress(1, 2, 3)
        while number in self.faults.holds and not self.faults.holds[number].is_set():
            if hooks.is_cancelled():
                raise RatoonError(ErrorCode.CANCELLED, "cancelled")
            time.sleep(0.002)
        if number in self.faults.breaks:
            raise RuntimeError("broken on purpose")
        self._use_device(number)
        self.gradients[-1] = prepared.gradient + self.faults.noise
        hooks.on_progress(2, 2, 6)
        if number in self.faults.no_memory:
            # Another rank's, whose pass outlasts this one's.
            raise MemoryError("tried to allocate 2.32 GiB")
        answers_2J = np.full((2, len(prepared.batch.loss_mask)), -number, np.float32)
        is_asked = prepared.logprobs_of is not None
        self.found = FakeFound(prepared, answers_2J if is_asked else None)
        return StepReport(
            loss=number,
            num_micro_batches=2,
            trained_tokens=2,
            unshared_tokens=6,
            packed_tokens=3,
            token_reduction=2.0,
            warnings=prepared.warnings,
        )

    def optim_step(self, step: OptimStep) -> StepReport:
        if not self.gradients and not step.allow_empty:
            raise RatoonError(ErrorCode.WINDOW_EMPTY, "empty")
        reason = None
        if self.faults.skips.intersection(self.gradients):
            reason = SkipReason.NON_FINITE_LOSS
        elif self.gradients and self.faults.empties.issuperset(self.gradients):
            reason = SkipReason.NO_TOKENS
        skipped = reason is not None
        if any(_happens(self.faults.tears, number) for number in self.gradients):
            self.weights.append((self.gradients, -step.learning_rate))
            raise RuntimeError("torn on purpose")
        if not skipped:
            self.weights.append((self.gradients, step.learning_rate))
            self.version += 1
        self.gradients = []
        return StepReport(grad_norm=1.5, skipped=skipped, skip_reason=reason)

    def update(
        self,
        prepared: FakePrepared,
        step: OptimStep,
        hooks: PassHooks,
    ) -> StepReport:
        assert not self.gradients
        try:
            report = self.forward_backward(prepared, hooks)
        except BaseException:
            self.discard_gradients()
            raise
        stepped = self.optim_step(step)
        return replace(
            report,
            grad_norm=stepped.grad_norm,
            skipped=stepped.skipped,
            skip_reason=stepped.skip_reason,
        )

    def discard_gradients(self) -> None:
        self.gradients = []

    @property
    def num_steps(self) -> int:
        return len(self.weights)

    @property
    def is_window_empty(self) -> bool:
        return not self.gradients

    @property
    def window_counters(self) -> Counters:
        return Counters(tokens=2 * len(self.gradients), sequences=len(self.gradients), groups=1)

    def gradient_bytes(self, names: Sequence[str]) -> int:
        self.check_device()
        if set(names) - {"w", "b"}:
            raise invalid("names[0]", repr(names[0]), "a tensor of the policy's exported weights")
        return 1000 * len(names)

    def write_gradients(self, path: Path, names: Sequence[str]) -> None:
        """JSON of the window's numbers, by name."""
        if self.faults.full_disk:
            path.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_text(json.dumps(dict.fromkeys(names, self.gradients)))

    def forward(
        self,
        prepared: FakePrepared,
        hooks: PassHooks,
        *,
        with_entropy: bool,
        use_reference: bool,
    ) -> FakeForward:
        """Every token's log-prob is the version, negated; a likeliest one's is one less."""
        number = number_of(prepared.batch)
        self._use_device(number)
        hooks.on_progress(1, 2, 3)
        while number in self.faults.holds and not self.faults.holds[number].is_set():
            if hooks.is_cancelled():
                raise RatoonError(ErrorCode.CANCELLED, "cancelled")
            time.sleep(0.002)
        logprobs = np.full(len(prepared.batch.loss_mask), -float(self.version), np.float32)
        teacher = None
        if prepared.num_best:
            tokens_K = np.arange(prepared.num_best, dtype=np.int32)
            shape = len(logprobs), prepared.num_best
            teacher = np.tile(tokens_K, (len(logprobs), 1)), np.repeat(logprobs - 1, shape[1])
            teacher = teacher[0], teacher[1].reshape(shape)
        return FakeForward(logprobs, None, StepReport(num_micro_batches=1), teacher)

    def await_compiler(self) -> None:
        """Nothing is compiled."""

    def check_before_publication(self) -> FakeCheck:
        self.check_device()
        return FakeCheck(self.faults.checks.get(self.version))

    def copy_weights(self) -> FakeCopy:
        self.check_device()
        return FakeCopy(json.dumps([self.weights, self.version]))

    def snapshot(self) -> FakeSnapshot:
        self.check_device()
        text = json.dumps({"weights": self.weights, "version": self.version})
        return FakeSnapshot(self.version, self.state_digest(), text, self.faults)

    def read_weights(self, folder: Path, digest: str, *, adds: bool = False) -> FakeImport:
        if self.faults.reads is not None:
            self.faults.reads.wait()
        try:
            data = (folder / IMPORTED_NAME).read_bytes()
        except OSError as err:
            raise invalid("model_folder", "no file", IMPORTED_NAME) from err
        number, got = float(data), digest_bytes(data)
        if digest not in ("", got):
            raise invalid("model_folder", f"files of digest {got}", digest)
        if number in self.faults.breaks:
            raise invalid("model_folder[weight]", "NaN", "a number")
        return FakeImport(number, got)

    def import_weights(self, weights: FakeImport, *, adds: bool, resets_optimizer: bool) -> None:
        assert not self.gradients
        self.weights = [*(self.weights if adds else []), ([weights.number], 0.0)]
        if _happens(self.faults.tears, weights.number):
            raise RuntimeError("torn on purpose")
        self.version += 1

    def reset_optimizer(self) -> None:
        self.weights = [*self.weights, ([], RESET)]

    def load_checkpoint(self, folder: Path) -> None:
        try:
            state = json.loads((folder / "state.json").read_text())
        except (OSError, ValueError) as err:
            raise RatoonError(ErrorCode.INTERNAL, f"checkpoint {folder.name} is damaged") from err
        self.weights = [(list(numbers), rate) for numbers, rate in state["weights"]]
        self.version, self.gradients = state["version"], []


def _happens(times: dict[float, int], number: float) -> bool:
    """Whether what is left of so many times is one more."""
    times[number] = times.get(number, 0) - 1
    return times[number] >= 0


def number_of(batch: RolloutBatch) -> float:
    return ASKED if batch.rewards is None else float(batch.rewards[0])


@dataclass(frozen=True)
class FakeCopy:
    text: str

    def write(self, folder: Path) -> dict[str, str]:
        (folder / "model.json").write_text(self.text)
        return {}

    def write_rest(self, folder: Path) -> dict[str, str]:
        return {}

    def write_delta(self, path: Path, parents: Mapping[str, str]) -> None:
        """Nothing was compared."""


def as_trainer(fake: FakeTrainer) -> Trainer:
    """The fake where a worker takes a trainer, whose methods and fields it has."""
    return cast("Trainer", fake)
