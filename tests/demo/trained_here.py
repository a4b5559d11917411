"""A trainer of this process behind the client's methods that the demo's loop calls.

What is sent is encoded and judged as the service does it, and what is answered is decoded as the
client does it; `Fault` says which part of the loss this one leaves out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.api.convert.checks import read, write
from ratoon.api.convert.groups import raw_groups
from ratoon.api.submissions import loss_request
from ratoon.engine.files.results import read_old_logprobs, write_forward_output
from ratoon.model.export import export_weights
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_client import Group, Loss, Optim, StepReport
from ratoon_client.wire import decode, group_messages, loss_message, optim_message
from ratoon_proto.types import (
    AdamWConfig,
    FullTuning,
    LossConfig,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
)
from ratoon_proto.v1 import training_pb2
from tests import builders


class Fault(Enum):
    """What a service may leave out without failing: the call is answered all the same."""

    NONE = auto()
    NO_CLIP = auto()
    NO_CORRECTION = auto()
    ON_POLICY = auto()
    OTHER_ROLLOUTS = auto()
    NO_STALENESS = auto()


@dataclass(frozen=True)
class Step:
    version: int
    report: StepReport


@dataclass(frozen=True)
class Done:
    """A handle whose operation has ended."""

    operation_id: str
    value: Any

    def result(self) -> Any:
        return self.value


@dataclass(frozen=True)
class Pulled:
    folder: Path
    version: int


@dataclass(frozen=True)
class ForwardValue:
    logprobs: tuple[np.ndarray, ...]


class TrainedHere:
    """Client and session in one; every version's weights stay in `folder`."""

    def __init__(
        self, folder: Path, *, preset: str = "tiny", seed: int = 0, fault: Fault = Fault.NONE
    ) -> None:
        self._folder = folder
        self._fault = fault
        self._trainer = Trainer.create(
            TrainerSpec(
                model=ModelSpec(
                    base=PresetBase(name=preset),
                    tuning=FullTuning(),
                    dtype=ModelDtype.FLOAT32,
                    seed=seed,
                ),
                optimizer=AdamWConfig(),
                deterministic=True,
                micro_batch_tokens=16_384,
                keep_reference=False,
                attention_backend="",
                device="cpu",
                num_threads=1,
            )
        )
        self._keys: dict[str, Path] = {}
        self._publish()

    def policy(self, _policy_id: str) -> TrainedHere:
        return self

    def pull_weights(self, _policy_id: str, _folder: Path, version: int | None = None) -> Pulled:
        version = self._trainer.version if version is None else version
        return Pulled(self._folder / f"version-{version}", version)

    def forward(self, groups: list[Group]) -> Done:
        batch = self._batch(groups)
        arrays = self._trainer.forward(
            self._trainer.prepare_forward(batch), with_entropy=False, use_reference=False
        )
        operation_id = f"p.f{len(self._keys)}"
        digest, _ = write_forward_output(
            self._folder, operation_id, batch, arrays.logprobs, None, is_reference=False
        )
        self._keys[operation_id] = self._folder / f"{digest}.{operation_id.split('.')[1]}"
        rows = [arrays.logprobs[a:b] for a, b in pairwise(batch.response_offsets)]
        return Done(operation_id, ForwardValue(tuple(rows)))

    def update(self, groups: list[Group], *, loss: Loss, optim: Optim) -> Done:
        batch = self._batch(groups)
        request = self._broken(loss_request(loss_message(loss)))
        old = None
        if (
            request.old_logprobs is not None
            and request.old_logprobs.kind is OldLogprobsKind.FROM_FORWARD
        ):
            old = read_old_logprobs(self._keys[request.old_logprobs.forward_operation_id], batch)
            if self._fault is Fault.OTHER_ROLLOUTS:
                old = np.roll(old, 1)
        resolved = resolve_loss(request, batch, has_frozen_reference=False)
        step = resolve_optim(
            read(optim_message(optim), OptimStepConfig, "optim"),
            resolved.normalisation,
            self._trainer.spec.optimizer,
        )
        report = self._trainer.update(
            self._trainer.prepare(batch, resolved, old_logprobs_J=old), step
        )
        self._publish()
        value = Step(
            self._trainer.version, decode(write(training_pb2.StepReport(), report), StepReport)
        )
        return Done("p.u", value)

    def _publish(self) -> None:
        folder = self._folder / f"version-{self._trainer.version}"
        if not folder.exists():
            folder.mkdir(parents=True)
            export_weights(self._trainer.model, folder)

    def _batch(self, groups: list[Group]) -> RolloutBatch:
        limits = builders.limits(vocab_size=self._trainer.info().vocab_size)
        raw = raw_groups(group_messages(groups), max_tokens=limits.max_tokens)
        batch = validate_groups(raw, limits)
        if self._fault is Fault.NO_STALENESS:
            unsaid = np.full_like(batch.policy_version, self._trainer.version)
            return dataclasses.replace(batch, policy_version=unsaid)
        return batch

    def _broken(self, request: LossConfig) -> LossConfig:
        if request.correction is None:
            return request
        match self._fault:
            case Fault.NO_CLIP:
                return dataclasses.replace(request, clip_low=1.0, clip_high=1e9)
            case Fault.NO_CORRECTION:
                return dataclasses.replace(request, correction=None)
            case Fault.ON_POLICY:
                old = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
                return dataclasses.replace(request, old_logprobs=old)
            case _:
                return request
