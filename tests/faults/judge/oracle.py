"""The accepted history run without faults: one plain trainer in this process, one call at a time.

It computes how each operation must have ended and the bits of the weights. Of `ratoon.engine` it
uses only the result types and the words of a warning. A call that the journal has as cancelled
counts as absent, as its caller was told.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.files.results import read_old_logprobs, write_forward_output
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.types import ForwardResult
from ratoon.engine.worker.runner import NEEDLESS_FORWARD
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.questions import Answer, answered_batch, asked_batch, questions
from ratoon.stream.files import digest_file
from ratoon.stream.versions import list_versions, read_manifest
from ratoon.train.checkpoint import states_name
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss, OptimStep
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.prepare import Prepared
from ratoon.train.saved_state import MANIFEST_NAME
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    ImportResult,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    ReferenceKind,
    StepReport,
    StepResult,
    StepWarning,
    Teacher,
)
from tests.faults.judge.calls import (
    LEARNING_RATE,
    NAME,
    POLICY,
    WEIGHTS_FILE,
    Call,
    Kind,
    batch_of,
    write_import,
)
from tests.faults.judge.history import Entry, Notes, Verdict, judge_acks, plain

DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How an operation ends without faults; `result` as `plain` has it, None: not compared."""

    end: str
    version: int
    result: object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A ForwardBackward of the open window."""

    seq: int
    call: Call
    has_failed: bool


class Oracle:
    """Owns a trainer that is new, its window and its checkpoints below `folder`.

    `digests`: by version, of the file of its weights. `named`: the version that has the name.
    """

    def __init__(self, trainer: Trainer, seed: int, folder: Path) -> None:
        self.trainer = trainer
        self._seed, self._folder = seed, folder
        self._window: list[_Part] = []
        self._seqs: dict[int, int] = {}
        self._operations: dict[int, str] = {}
        self._results: dict[int, Path] = {}
        self._forward_versions: dict[int, int] = {}
        self._max_version = 0
        self.digests: dict[int, str] = {}
        self.named: int | None = None
        folder.mkdir(parents=True)
        self._export()

    def run(self, entry: Entry) -> Expected:
        """The next operation of the history."""
        call, seq = entry.call, entry.record.seq
        self._seqs[call.number] = seq
        self._operations[call.number] = entry.record.operation_id
        if entry.end == "cancelled":
            return Expected(end="cancelled", version=self.trainer.version, result=None)
        if call.is_refused:
            if call.kind is Kind.FORWARD_BACKWARD:
                self._window.append(_Part(seq=seq, call=call, has_failed=True))
            return self._failed("VERSION_MISMATCH")
        match call.kind:
            case Kind.UPDATE:
                return self._update(call)
            case Kind.FORWARD_BACKWARD:
                report = self._forward_backward(call)
                self._window.append(_Part(seq=seq, call=call, has_failed=False))
                version = self.trainer.version
                teachers = (Teacher(POLICY, version=version),) if call.is_taught else ()
                return self._done(StepResult(version=version, report=report, teachers=teachers))
            case Kind.OPTIM_STEP:
                return self._optim_step(call)
            case Kind.DISCARD_GRADIENTS:
                self._clear()
                return self._done(None)
            case Kind.FORWARD:
                return self._forward(entry)
            case Kind.SAVE_CHECKPOINT if call.is_without_store:
                return self._failed("UNAVAILABLE")
            case Kind.SAVE_CHECKPOINT:
                return self._save(entry)
            case Kind.LOAD_CHECKPOINT:
                return self._load(call)
            case Kind.IMPORT_WEIGHTS:
                return self._import(call)
            case Kind.PUBLISH_VERSION:
                self.named = self.trainer.version
                return self._done({"name": NAME, "version": self.named})

    def checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint that was saved under this name."""
        return self._folder / f"checkpoint-{name}"

    def _update(self, call: Call) -> Expected:
        if self._window:
            return self._failed("WINDOW_OPEN")
        batch = batch_of(call, self._seed)
        loss = _loss(call, self._operations, batch)
        prepared = self._prepared(call, batch, loss)
        return self._stepped(self.trainer.update(prepared, _step(self.trainer, loss)))

    def _prepared(self, call: Call, batch: RolloutBatch, loss: Loss) -> Prepared:
        old = self._old_logprobs(call, batch)
        prepared = self.trainer.prepare(batch, loss, old_logprobs_J=old)
        warnings = self._needless_forward(call)
        return replace(prepared, warnings=(*prepared.warnings, *warnings))

    def _forward_backward(self, call: Call) -> StepReport:
        batch = self._answered(call, batch_of(call, self._seed))
        loss = _loss(call, self._operations, batch)
        return self.trainer.forward_backward(self._prepared(call, batch, loss))

    def _answered(self, call: Call, batch: RolloutBatch) -> RolloutBatch:
        """The batch with what the policy itself says of it, where it is asked."""
        asked = questions(loss_request(call, self._operations), batch)
        answers: list[Answer] = []
        for question in asked:
            prepared = self.trainer.prepare_forward(asked_batch(batch, question.asked_G))
            arrays = self.trainer.forward(prepared, with_entropy=False, use_reference=False)
            answers.append(Answer(logprobs=arrays.logprobs, tokens=None, token_logprobs=None))
        return answered_batch(batch, asked, answers)

    def _optim_step(self, call: Call) -> Expected:
        applied = [part for part in self._window if not part.has_failed]
        if not call.includes:
            if len(applied) < len(self._window):
                return self._failed("WINDOW_POISONED")
            if not applied:
                return self._failed("WINDOW_EMPTY")
            chosen = applied
        else:
            wanted = {self._seqs.get(number) for number in call.includes}
            if wanted & {part.seq for part in self._window if part.has_failed}:
                return self._failed("WINDOW_POISONED")
            if not wanted <= {part.seq for part in applied}:
                return self._failed("INVALID_ARGUMENT")
            chosen = [part for part in applied if part.seq in wanted]
        if chosen != applied:
            self.trainer.discard_gradients()
            for part in chosen:
                self._forward_backward(part.call)
        step = resolve_optim(
            OptimStepConfig(learning_rate=LEARNING_RATE),
            self.trainer.normalisation,
            self.trainer.spec.optimizer,
        )
        expected = self._stepped(self.trainer.optim_step(step))
        self._clear()
        return expected

    def _forward(self, entry: Entry) -> Expected:
        batch = batch_of(entry.call, self._seed)
        arrays = self.trainer.forward(
            self.trainer.prepare_forward(batch), with_entropy=True, use_reference=False
        )
        results = self._folder / "results"
        results.mkdir(exist_ok=True)
        digest, size_bytes = write_forward_output(
            results,
            entry.record.operation_id,
            batch,
            arrays.logprobs,
            arrays.entropy,
            is_reference=False,
        )
        suffix = entry.record.operation_id.rpartition(".")[2]
        self._results[entry.call.number] = results / f"{digest}.{suffix}"
        self._forward_versions[entry.call.number] = self.trainer.version
        result = ForwardResult(
            version=self.trainer.version,
            digest=digest,
            size_bytes=size_bytes,
            report=arrays.report,
        )
        return self._done(result)

    def _save(self, entry: Entry) -> Expected:
        call, seq = entry.call, entry.record.seq
        self.trainer.snapshot().write(self.checkpoint(call.checkpoint_id))
        replay_from_seq = self._window[0].seq if self._window else seq + 1
        facts = {
            "checkpoint_id": call.checkpoint_id,
            "version": self.trainer.version,
            "seq": seq,
            "replay_from_seq": replay_from_seq,
        }
        return Expected(end=DONE, version=self.trainer.version, result=facts)

    def _load(self, call: Call) -> Expected:
        folder = self.checkpoint(call.checkpoint_id)
        if not folder.exists():
            return self._failed("CHECKPOINT_NOT_FOUND")
        self._clear()
        self.trainer.load_checkpoint(folder)
        return Expected(end=DONE, version=self.trainer.version, result=None)

    def _import(self, call: Call) -> Expected:
        if self._window:
            return self._failed("WINDOW_OPEN")
        base = self.trainer.spec.model.base
        assert isinstance(base, FolderBase)
        folder = write_import(call, self._seed, Path(base.folder), self._folder)
        weights = self.trainer.read_weights(folder, "")
        self.trainer.import_weights(weights, adds=not call.replaces, resets_optimizer=call.resets)
        return self._done(
            ImportResult(
                version=self._next_version(),
                num_tensors=weights.num_tensors,
                size_bytes=weights.size_bytes,
                dtypes=weights.dtypes,
                digest=weights.digest,
            )
        )

    def _old_logprobs(self, call: Call, batch: RolloutBatch) -> NDArray[np.floating] | None:
        if not call.from_forward:
            return None
        return read_old_logprobs(self._results[call.from_forward], batch)

    def _needless_forward(self, call: Call) -> tuple[StepWarning, ...]:
        """A Forward that a call names is of the batch that it trains, and of that alone."""
        is_needless = self._forward_versions.get(call.from_forward) == self.trainer.version
        return (NEEDLESS_FORWARD,) if is_needless else ()

    def _stepped(self, report: StepReport) -> Expected:
        version = self.trainer.version if report.skipped else self._next_version()
        return self._done(StepResult(version=version, report=report))

    def _next_version(self) -> int:
        """Numbers are never given twice."""
        self._max_version += 1
        self.trainer.version = self._max_version
        self._export()
        return self._max_version

    def _export(self) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            export_weights(self.trainer.model, Path(folder))
            self.digests[self.trainer.version] = digest_file(Path(folder) / WEIGHTS_FILE)

    def _clear(self) -> None:
        self._window = []
        self.trainer.discard_gradients()

    def _done(self, result: object) -> Expected:
        return Expected(end=DONE, version=self.trainer.version, result=plain(result))

    def _failed(self, code: str) -> Expected:
        return Expected(end=code, version=self.trainer.version, result=None)


def judge(
    notes: Notes, records: Sequence[OperationRecord], oracle: Oracle, paths: PolicyPaths
) -> Verdict:
    """The verdict on a run whose last call saved a checkpoint."""
    verdict, entries = judge_acks(notes.acks(), notes.told, records)
    verdict.lost += notes.errors
    if verdict.is_good:
        last = entries[-1].call.checkpoint_id
        verdict.add(judge_history(entries, oracle, paths.checkpoint(last)))
        _judge_published(verdict, paths.weights, oracle)
    return verdict


def judge_served(served: Sequence[str], digests: Mapping[int, str]) -> Verdict:
    """What an engine sampled with, by digest and in order: whole versions, each newer, to the last.

    `digests`: by version, of a history in which no LoadCheckpoint goes back.
    """
    verdict, last = Verdict(), -1
    versions = {digest: version for version, digest in digests.items()}
    for digest in served:
        version = versions.get(digest)
        if version is None:
            verdict.lost.append(f"weights {digest} were served, after version {last}: no version's")
        elif version < last:
            verdict.lost.append(f"version {version} was served after version {last}")
        last = last if version is None else version
    if last != max(digests):
        verdict.lost.append(f"version {last} is served, of {max(digests)}")
    return verdict


def judge_history(entries: Sequence[Entry], oracle: Oracle, final: Path | None) -> Verdict:
    """Every operation ended as without faults, in the oracle's state, whose bits `final` has.

    `final`: the folder of a checkpoint that the last operation of the history saved.
    """
    verdict = Verdict()
    for entry in entries:
        expected = oracle.run(entry)
        verdict.lost += [
            f"seq {entry.record.seq} ({entry.call.kind}, call {entry.call.number}): {difference}"
            for difference in _differences(entry, expected, oracle.trainer.state_digest())
        ]
    if final is not None:
        expected = oracle.checkpoint(entries[-1].call.checkpoint_id)
        _judge_bits(verdict, final, expected, oracle.trainer.ranks.size)
    return verdict


def _differences(entry: Entry, expected: Expected, digest: str) -> list[str]:
    """`digest`: of the state that the operation must have left."""
    if entry.end != expected.end:
        return [f"ended as {entry.end}, expected {expected.end}"]
    if entry.record.weights_digest not in ("", digest):
        return ["left another state"]
    if expected.result is None:
        return []
    got = plain(entry.record.result)
    wanted = expected.result
    if entry.call.kind in (Kind.SAVE_CHECKPOINT, Kind.PUBLISH_VERSION):
        assert isinstance(wanted, dict)
        got = {name: got.get(name) for name in wanted}
    return [] if got == wanted else [f"result {_first_difference(got, wanted)}"]


def _first_difference(got: object, wanted: object) -> str:
    if isinstance(got, dict) and isinstance(wanted, dict):
        for name in wanted:
            if got.get(name) != wanted[name]:
                return f"{name}: {_first_difference(got.get(name), wanted[name])}"
    return f"{got}, expected {wanted}"


def _judge_published(verdict: Verdict, weights: Path, oracle: Oracle) -> None:
    """Each version that is still there has the oracle's weights, and the named one is there."""
    versions = list_versions(weights)
    if oracle.named is not None and oracle.named not in versions:
        verdict.lost.append(f"version {oracle.named} has a name, and is gone")
    for version in versions:
        digests = {file.name: file.digest for file in read_manifest(weights, version).files}
        if digests[WEIGHTS_FILE] != oracle.digests.get(version):
            verdict.lost.append(f"version {version} was published with other weights")


def _judge_bits(verdict: Verdict, got: Path, expected: Path, num_ranks: int) -> None:
    """Weights, moments and the number of steps, bit for bit."""
    steps = [_num_steps(folder) for folder in (got, expected)]
    if steps[0] != steps[1]:
        counts = verdict.doubled if steps[0] > steps[1] else verdict.lost
        counts.append(f"{steps[0]} optimizer steps, expected {steps[1]}")
    for name in (states_name(rank, num_ranks) for rank in range(num_ranks)):
        keys = _names(expected / name)
        odd = [key for key in keys if _bits(got / name, key) != _bits(expected / name, key)]
        if odd:
            verdict.lost.append(f"{name}: {len(odd)} tensors have other bits, as {odd[0]}")


def _num_steps(folder: Path) -> int:
    return int(json.loads((folder / MANIFEST_NAME).read_text())["num_steps"])


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="np") as tensors:
        return sorted(tensors.keys())


def _bits(path: Path, key: str) -> bytes:
    with safe_open(path, framework="np") as tensors:
        return tensors.get_tensor(key).tobytes()


def _loss(call: Call, operations: dict[int, str], batch: RolloutBatch) -> Loss:
    return resolve_loss(loss_request(call, operations), batch, has_frozen_reference=False)


def loss_request(call: Call, operations: dict[int, str]) -> LossConfig:
    """GRPO on the sampler's log-probs, or on those of the Forward that the call names."""
    old = None
    if call.from_forward:
        old = OldLogprobs(
            kind=OldLogprobsKind.FROM_FORWARD,
            forward_operation_id=operations[call.from_forward],
        )
    kl = None
    if call.is_taught:
        kl = KlConfig(KlKind.K3, 0.0, ReferenceKind.TEACHER, teachers=[Teacher(POLICY)])
    return LossConfig(
        kind=LossKind.GRPO, old_logprobs=old, kl=kl, entropy_coefficient=call.entropy_coefficient
    )


def _step(trainer: Trainer, loss: Loss) -> OptimStep:
    request = OptimStepConfig(learning_rate=LEARNING_RATE)
    return resolve_optim(request, loss.normalisation, trainer.spec.optimizer)
