"""The accepted history once more, by a plain Hugging Face model and torch's AdamW in float64.

It measures how far our trainer, in float64 too, is from that. The loop here shares only the order
of the calls and their batches with the service; it runs one forward and one backward per rollout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ratoon.model.spec import ModelDtype
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from tests.equivalence import paths_of, relative_errors
from tests.faults.judge.calls import LEARNING_RATE, Call, Kind, batch_of, imported_values
from tests.faults.judge.history import Entry
from tests.faults.judge.oracle import Oracle
from tests.oracle import hf
from tests.oracle.adamw import OracleTrainer
from tests.oracle.paths import Path as RolloutPath
from tests.oracle.paths import default_loss

TOLERANCE = 1e-10


class Reference:
    """States: the window's calls, run when they are stepped on."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        self.trainer = OracleTrainer(hf.load(model_folder, dtype=torch.float64))
        self._seed, self._model_folder = seed, model_folder
        self._window: list[Call] = []
        self._forwards: dict[int, list[RolloutPath]] = {}
        self._checkpoints: dict[str, OracleTrainer] = {}

    def run(self, entry: Entry) -> None:
        """One operation; what did not end well changed nothing."""
        call = entry.call
        if entry.end != "done":
            return
        match call.kind:
            case Kind.UPDATE:
                self._step([call])
            case Kind.FORWARD_BACKWARD:
                self._window.append(call)
            case Kind.OPTIM_STEP:
                parts = self._window
                self._step([p for p in parts if not call.includes or p.number in call.includes])
                self._window = []
            case Kind.DISCARD_GRADIENTS:
                self._window = []
            case Kind.FORWARD:
                self._forwards[call.number] = self._with_logprobs(call)
            case Kind.SAVE_CHECKPOINT:
                self._checkpoints[call.checkpoint_id] = copy.deepcopy(self.trainer)
            case Kind.LOAD_CHECKPOINT:
                self.trainer = copy.deepcopy(self._checkpoints[call.checkpoint_id])
                self._window = []
            case Kind.IMPORT_WEIGHTS:
                self._import(call)

    def _step(self, calls: Sequence[Call]) -> None:
        totals: list[float] = []
        for call in calls:
            old = "given" if call.from_forward else "sampler"
            paths = self._forwards.get(call.from_forward) or paths_of(batch_of(call, self._seed))
            bonus = call.entropy_coefficient
            loss = default_loss("grpo", old=old, entropy_coefficient=bonus)
            totals.append(self.trainer.forward_backward(paths, loss).total)
        if all(map(math.isfinite, totals)):
            self.trainer.optim_step(learning_rate=LEARNING_RATE, divide_by="sequences")
        else:
            self.trainer.discard()

    @torch.no_grad()
    def _import(self, call: Call) -> None:
        parameters = self.trainer.parameters()
        values = imported_values(call, self._seed, self._model_folder)
        assert values.keys() == parameters.keys()
        for name, parameter in parameters.items():
            value = torch.from_numpy(values[name]).to(parameter.dtype)
            parameter.copy_(value if call.replaces else parameter + value)
        if call.resets:
            self.trainer.forget_moments()

    def _with_logprobs(self, call: Call) -> list[RolloutPath]:
        """The batch with the log-probs of now as its old ones."""
        paths = paths_of(batch_of(call, self._seed))
        own = hf.all_logprobs(self.trainer.model, paths)
        return [
            replace(path, old=logprob.numpy())
            for path, (logprob, _) in zip(paths, own, strict=True)
        ]


def worst_difference(
    entries: Sequence[Entry], spec: TrainerSpec, model_folder: Path, seed: int, folder: Path
) -> float:
    """The largest rel-L2, over parameters, of how far each side moved them: ours in float64."""
    double = replace(spec, model=replace(spec.model, dtype=ModelDtype.FLOAT64))
    ours, plain = Oracle(Trainer.create(double), seed, folder), Reference(model_folder, seed)
    first = {name: p.detach().clone() for name, p in plain.trainer.parameters().items()}
    for entry in entries:
        ours.run(entry)
        plain.run(entry)
    got = {name: p - first[name] for name, p in ours.trainer.model.named_trainable().items()}
    wanted = {name: p - first[name] for name, p in plain.trainer.parameters().items()}
    return max(relative_errors(got, wanted).values())
