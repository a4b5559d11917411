"""The trainer of one policy: what a worker runs operations on, on one device or on several.

It decides, and has the ranks of its group run what it decided: the rank of its own device, and
those of other processes.

Weights, moments and version change in `optim_step`, `update`, `load_checkpoint` and
`import_weights` alone, each whole or not at all.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.device_costs import DeviceRates
from ratoon.model.folder import ModelFolder
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelInfo
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.selection import Counters
from ratoon.rollout.sharing import planned_prefixes
from ratoon.shards.copies import Copies
from ratoon.train import prepare
from ratoon.train.checkpoint import Snapshot, check_digest, read_manifest
from ratoon.train.config import Shard
from ratoon.train.forward_arrays import ForwardArrays, check_forward_logprobs
from ratoon.train.gradient_window import GradientWindow, Totals, WindowState
from ratoon.train.imported import ImportedWeights, read_weights
from ratoon.train.loss.spec import Loss, Normalisation, OptimStep
from ratoon.train.micro_batches import PassHooks, never_cancelled, no_progress
from ratoon.train.named_gradients import NamedGradients
from ratoon.train.numerics import (
    numerics_fingerprint,
    peak_memory_bytes,
)
from ratoon.train.optim.adamw import norm_of_blocks
from ratoon.train.optim.choice import rounding_warning
from ratoon.train.optim.digest import digest_of_sums
from ratoon.train.optim.step_bounds import StateBounds
from ratoon.train.optim.step_guard import WARNINGS, reason_in_norm, reason_in_sums
from ratoon.train.optim.tensor_norms import tensor_norms
from ratoon.train.passes import ForwardColumns, PassTotals
from ratoon.train.planning import cpu_planner, group_sizes
from ratoon.train.prepare import Prepared
from ratoon.train.ranks.group import HeldWeights, Peer, RankGroup
from ratoon.train.ranks.layout import load
from ratoon.train.ranks.lending import lend_activations
from ratoon.train.ranks.rank import Rank
from ratoon.train.rates import rates_of
from ratoon.train.report import batch_sums
from ratoon.train.report import build as report_builder
from ratoon.train.report.clock import DeviceClock
from ratoon.train.report.step_report import (
    PhaseSeconds,
    SkipReason,
    StepReport,
    TensorGradNorm,
)
from ratoon.train.report.usage import UsageMeter
from ratoon.train.self_check import SelfCheckOutcome, is_due, run_self_check
from ratoon.train.spec import TrainerSpec


class Trainer:
    """Owns a policy's model, gradient window and optimizer state.

    States: those of `GradientWindow`. `version` counts optimizer steps; the engine may rename it
    where a number was retired. Not thread-safe: one call at a time.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        model: PolicyModel,
        copies: Copies | None = None,
        peers: Sequence[Peer] = (),
        rates: DeviceRates | None = None,
    ) -> None:
        """`peers`: ranks 1 and above, whose tensors `copies` brings; none for one device alone.
        `rates`: of a GPU, before `limit_activations`.

        Raises what `group_sizes` raises.
        """
        assert spec.num_workers == 1 + len(peers)
        self._group_sizes = group_sizes(spec.parallel, model.sizes.num_heads)
        self.spec = spec
        self.model = model
        self.version = 0
        self.ranks = RankGroup(Rank(spec, model, copies or Copies()), peers)
        self.ranks.all(Rank.connect_groups, self._group_sizes)
        if spec.shard is Shard.WEIGHTS:
            self.ranks.all(Rank.open_memory, self.ranks.all(Rank.handles))
        self._named = NamedGradients(model)
        self._num_trained = sum(p.numel() for p in model.named_trainable().values())
        self._rates = rates
        self._planner = cpu_planner(
            spec.micro_batch_tokens, num_ranks=self.ranks.size, group_sizes=self._group_sizes
        )
        self._window = GradientWindow()
        self._meter = UsageMeter(model, self.ranks.size)
        self._snapshot_numbers = count()
        # Those that somebody has, whose states the ranks hold until they are written.
        self._snapshots = WeakValueDictionary[int, Snapshot]()

    @classmethod
    def create(
        cls, spec: TrainerSpec, peers: Sequence[Peer] = (), rates_folder: Path | None = None
    ) -> Trainer:
        """Configure torch for this process and load the model, as the `peers` have done theirs.

        With peers, all ranks are processes that have joined. In `rates_folder` are the rates of
        GPUs that were measured. Raises what `load` raises, and UNSUPPORTED where ranks have
        different devices.
        """
        # Of a GPU that nothing is on yet.
        rates = rates_of(spec, rates_folder)
        spec, model = load(spec)
        trainer = cls(spec, model, Copies.joined(), peers, rates)
        trainer.ranks.check_devices()
        trainer.limit_activations()
        trainer.ranks.are_created = True
        return trainer

    def limit_activations(self) -> None:
        """Lend a GPU's memory to activations (`lend_activations`); plans are within it from now on.

        To be called once all that stays is there.
        """
        self._planner = lend_activations(
            self.spec, self.model, self.ranks, self._group_sizes, self._rates
        )

    def info(self) -> ModelInfo:
        kept = {"optimizer_states": self.spec.kept_states.value, "shard": self.spec.shard.value}
        return replace(self.model.info(), **kept)

    def fingerprint(self) -> dict[str, str]:
        """What the bits depend on outside of model, batch and plan."""
        return numerics_fingerprint(self.spec, self.info().attention_backend)

    def state_digest(self) -> str:
        """Of weights, moments and the number of steps, 32 hexadecimal digits; not of the window."""
        sums = self.ranks.all(Rank.digest_sums)
        return digest_of_sums(sums, self.ranks.own.optimizer.state().num_steps)

    @property
    def window_state(self) -> WindowState:
        return self._window.state

    @property
    def is_window_empty(self) -> bool:
        return self._window.state is WindowState.EMPTY

    @property
    def normalisation(self) -> Normalisation:
        """Of the open window, for `resolve_optim`. Raises WINDOW_EMPTY or WINDOW_POISONED."""
        return self._window.normalisation

    @property
    def window_counters(self) -> Counters:
        """Of the open window: what divides its sums. Raises WINDOW_EMPTY or WINDOW_POISONED."""
        self._window.require_open()
        return self._window.counters

    def prepare(self, batch: RolloutBatch, loss: Loss) -> Prepared:
        """Decide drops, advantages, counters and cuts; touches no state.

        Raises `RatoonError` STALE_ROLLOUTS, and where the loss cannot join the open window or
        balances experts that the model has not.
        """
        self._window.check(loss)
        coefficient = loss.router_aux_loss_coefficient
        if coefficient and not self.model.routes.num_layers:
            raise invalid("loss.router_aux_loss_coefficient", coefficient, "0: there is no router")
        run = partial(prepare.prepare, version=self.version, planner=self._planner)
        return run(batch, loss, is_first=self.is_window_empty)

    def plan_forward(self, batch: RolloutBatch) -> UpdatePlan:
        """Cuts of a Forward: the same as of an update that drops nothing."""
        is_run_S = prepare.has_trained_tokens(batch)
        is_first = self.is_window_empty
        return self._planner.plan(batch, sort_sequences(batch), is_run_S, is_first=is_first)

    def forward_backward(
        self,
        batch: RolloutBatch,
        loss: Loss,
        plan: UpdatePlan,
        *,
        old_logprobs_J: NDArray[np.floating] | None = None,
        entropy_J: NDArray[np.floating] | None = None,
        on_progress: Callable[[int, int, int], None] = no_progress,
        is_cancelled: Callable[[], bool] = never_cancelled,
    ) -> StepReport:
        """Add the gradient sum of the batch's loss to the window, cut as `plan` says.

        `old_logprobs_J`: `ForwardArrays.logprobs` of the operation that a `from_forward` loss
        names, else None; `entropy_J`: its entropies, for a loss with `top_entropy_share`.
        `on_progress(done, planned, tokens)` and `is_cancelled` are called between micro-batches;
        tokens are replicated ones.

        Raises `RatoonError` CANCELLED: whatever raises once the first micro-batch has begun leaves
        the window TORN, and the caller must call `discard_gradients` (and run the window's earlier
        forward-backwards again, if it wants them back).
        """
        started = time.perf_counter()
        check_forward_logprobs(batch, loss, old_logprobs_J, entropy_J)
        prepared = prepare.prepare_planned(batch, loss, plan, version=self.version)
        if entropy_J is not None:
            prepared = prepare.keep_top_entropy(prepared, entropy_J)
        plan_s = time.perf_counter() - started
        self_check = self._self_check(prepared, old_logprobs_J, is_cancelled)
        is_only = self.is_window_empty and plan.is_one_backward
        self._window.begin(loss)
        hooks = PassHooks(on_progress=on_progress, is_cancelled=is_cancelled)
        ranks = self.ranks.run_pass(
            hooks, Rank.forward_backward, prepared, old_logprobs_J, is_only=is_only
        )
        done = PassTotals.over(ranks)
        totals = Totals(
            counters=prepared.counters,
            sums=done.sums,
            routes=done.routes,
            batch=batch_sums.of_prepared(prepared, self.version),
            has_kl=loss.kl is not None,
        )
        self._window.complete(prepared, totals)
        report = report_builder.forward_backward_report(
            prepared,
            totals,
            PhaseSeconds(plan=plan_s, forward=done.forward_s, backward=done.backward_s),
            self._meter.training(batch, plan, done),
        )
        report = report_builder.with_ranks(report, plan, done.rank_seconds)
        return report_builder.with_self_check(report, self_check)

    def optim_step(self, step: OptimStep) -> StepReport:
        """Divide the window's gradient, clip, step; the window is empty afterwards.

        The report's means are over the window. Where no token counts, the gradient is zero, a
        number is not finite or would not be after the step, or one of the spec's guard is above its
        limit, the step is skipped: the window is discarded, weights and version stay. Raises
        `RatoonError` WINDOW_EMPTY or WINDOW_POISONED.
        """
        return self._step(step, StepReport())

    def update(
        self,
        batch: RolloutBatch,
        loss: Loss,
        step: OptimStep,
        plan: UpdatePlan,
        *,
        old_logprobs_J: NDArray[np.floating] | None = None,
        entropy_J: NDArray[np.floating] | None = None,
        on_progress: Callable[[int, int, int], None] = no_progress,
        is_cancelled: Callable[[], bool] = never_cancelled,
    ) -> StepReport:
        """One forward-backward and its optimizer step, in one report.

        Whatever it raises, CANCELLED too, leaves the trainer as it was. Raises `RatoonError`
        WINDOW_OPEN where there are gradients already.
        """
        self._check_closed()
        try:
            report = self.forward_backward(
                batch,
                loss,
                plan,
                old_logprobs_J=old_logprobs_J,
                entropy_J=entropy_J,
                on_progress=on_progress,
                is_cancelled=is_cancelled,
            )
        except BaseException:
            self.discard_gradients()
            raise
        return self._step(step, report)

    def discard_gradients(self) -> None:
        """Empty the window, TORN or not."""
        self.ranks.all(Rank.clear)
        self._window.clear()

    def forward(
        self,
        batch: RolloutBatch,
        plan: UpdatePlan,
        *,
        with_entropy: bool,
        use_reference: bool,
        on_progress: Callable[[int, int, int], None] = no_progress,
        is_cancelled: Callable[[], bool] = never_cancelled,
    ) -> ForwardArrays:
        """Log-probs of the batch's trained tokens, by the policy or its frozen reference.

        Changes nothing. Raises `RatoonError` CANCELLED, INVALID_ARGUMENT without a reference,
        INTERNAL where the plan is of another batch.
        """
        started = time.perf_counter()
        prefixes = planned_prefixes(sort_sequences(batch), plan)
        plan_s = time.perf_counter() - started
        hooks = PassHooks(on_progress=on_progress, is_cancelled=is_cancelled)
        columns = ForwardColumns.over(
            self.ranks.run_pass(
                hooks, Rank.forward, batch, prefixes, plan, use_reference=use_reference
            )
        )
        seconds = PhaseSeconds(plan=plan_s, forward=columns.forward_s)
        usage = self._meter.forward(batch, plan, columns)
        report = report_builder.forward_report(batch, plan, columns, seconds, usage)
        return ForwardArrays(
            logprobs=columns.logprob_J,
            entropy=columns.entropy_J if with_entropy else None,
            report=report_builder.with_ranks(report, plan, columns.rank_seconds),
        )

    def snapshot(self) -> Snapshot:
        """A copy on the host, which any thread may write; gradients are not in it."""
        digest, number = self.state_digest(), next(self._snapshot_numbers)
        self.ranks.all(Rank.hold_states, number, [*self._snapshots])
        self._snapshots[number] = snapshot = Snapshot(
            write_files=lambda folder: self.ranks.all(Rank.write_states, number, str(folder)),
            kind=self.spec.kept_states,
            num_steps=self.ranks.own.optimizer.state().num_steps,
            model=self.spec.model,
            version=self.version,
            digest=digest,
        )
        return snapshot

    def save_checkpoint(self, folder: Path) -> int:
        """Write a snapshot of now. Returns the size in bytes. Raises `FileExistsError`."""
        return self.snapshot().write(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Become the state of a checkpoint, version included, and empty the window.

        The frozen reference stays. Nothing is touched where the folder is not whole: raises what
        `read_manifest` and `read_states` raise, INTERNAL where the digest is another.
        """
        manifest = read_manifest(folder, self.spec.kept_states, self.spec.model)
        with self._discarding_staged():
            sums = self.ranks.all(Rank.read_states, str(folder), manifest)
            check_digest(folder, manifest, digest_of_sums(sums, manifest.num_steps))
        self.discard_gradients()
        self.ranks.all(Rank.take_states)
        self.version = manifest.version

    def read_weights(self, folder: Path, digest: str) -> ImportedWeights:
        """A folder's weights, for `import_weights`; changes nothing.

        Raises what `ModelFolder.of` and `imported.read_weights` raise.
        """
        return read_weights(self.model, ModelFolder.of(folder, self.spec.models_root), digest)

    def import_weights(
        self, weights: ImportedWeights, *, adds: bool, resets_optimizer: bool
    ) -> None:
        """Replace the weights, or add to them, as the next version.

        The frozen reference stays; so do moments and step count, unless the optimizer is reset.
        Raises `RatoonError` WINDOW_OPEN, and INVALID_ARGUMENT where a sum is not finite; nothing
        has changed then.
        """
        self._check_closed()
        with self._discarding_staged():
            self.ranks.call_with_leader_value(Rank.take_values, weights.values, adds=adds)
        key = f"import {self.version + 1}"
        self.ranks.all(Rank.set_values, key, adds=adds, resets_optimizer=resets_optimizer)
        self.version += 1

    def copy_weights(self) -> HeldWeights:
        """The weights of now on the hosts, which any thread may write until the next call."""
        self.ranks.all(Rank.hold_weights)
        return HeldWeights(self.ranks)

    def gradient_bytes(self, names: Sequence[str]) -> int:
        """Size of the gradient sums of these tensors, named as in exported weights.

        Raises INVALID_ARGUMENT for a name that is none of theirs.
        """
        return self._named.size_bytes(names)

    def write_gradients(self, path: Path, names: Sequence[str]) -> None:
        """Write the open window's sums of these tensors as a new safetensors file.

        They are float32 at least, and not divided. Changes nothing. Raises WINDOW_EMPTY,
        WINDOW_POISONED.
        """
        self._window.require_open()
        parameters = self._named.parameters(names)
        ranks = self.ranks.all(Rank.sums_of, parameters)
        sums = [reduce(operator.add, each) for each in zip(*ranks, strict=True)]
        self._named.write(path, names, dict(zip(parameters, sums, strict=True)))

    @contextmanager
    def _discarding_staged(self) -> Iterator[None]:
        """If any rank fails, every rank discards what it staged."""
        try:
            yield
        except Exception:
            self.ranks.all(Rank.discard_staged)
            raise

    def _check_closed(self) -> None:
        if not self.is_window_empty:
            raise RatoonError(
                ErrorCode.WINDOW_OPEN, "ForwardBackwards of the window are not stepped or discarded"
            )

    def _self_check(
        self,
        prepared: Prepared,
        old_logprobs_J: NDArray[np.floating] | None,
        is_cancelled: Callable[[], bool],
    ) -> SelfCheckOutcome:
        """That of a due version's first forward-backward: it borrows the empty gradient sums."""
        if not (self.is_window_empty and is_due(self.version, self.spec.self_check_every)):
            return SelfCheckOutcome(report=None, warnings=())
        gradients = self.ranks.own.gradients
        run = partial(run_self_check, self.model, gradients, prepared, old_logprobs_J)
        with self.ranks.own.reading():
            return run(version=self.version, is_cancelled=is_cancelled)

    def _step(self, step: OptimStep, base: StepReport) -> StepReport:
        clock = DeviceClock(self.model.device)
        divisor, totals = self._window.divisor(step.divisor), self._window.totals
        reason, grad_norm = self._judge(step, divisor)
        norms = self._tensor_norms(divisor) if step.tensor_grad_norms and divisor else ()
        warnings, changed = base.warnings, None
        peaks = [peak_memory_bytes(self.model.device)]
        planned = [self.ranks.own.planned_memory_bytes]
        if reason is None:
            assert grad_norm is not None, "it was measured before a step is taken"
            stepped = self.ranks.all(Rank.step, grad_norm, divisor, step)
            peaks = [each.peak_memory_bytes for each in stepped]
            planned = [each.planned_memory_bytes for each in stepped]
            counts = [each.changed for each in stepped if each.changed is not None]
            if step.changed_share and len(counts) == len(stepped):
                changed = sum(counts) / self._num_trained
            self.version += 1
            warnings += rounding_warning(self.spec.kept_states, step.learning_rate)
        else:
            warnings += (f"{WARNINGS[reason]}: the step was skipped",)
        self.discard_gradients()
        clock.lap("optimizer")
        base = replace(
            base,
            grad_norm=grad_norm,
            tensor_grad_norms=norms,
            changed_share=changed,
            skipped=reason is not None,
            skip_reason=reason,
            warnings=warnings,
            peak_memory_bytes=max(peaks),
            planned_memory_bytes=max((each for each in planned if each is not None), default=None),
        )
        return report_builder.step_report(base, totals, divisor, seconds=clock.seconds())

    def _judge(self, step: OptimStep, divisor: float) -> tuple[SkipReason | None, float | None]:
        """Why the window is not stepped on, and its gradient's norm after division, if it was
        measured. Nothing of the state is written before it is known on all ranks."""
        reason = reason_in_sums(self._window.totals.sums, divisor, self.spec.guard)
        if not divisor:
            return reason, None
        bounds = StateBounds.over(self.ranks.all(Rank.reduce_sums))
        if reason is not None:
            return reason, None
        norm = self._grad_norm(divisor)
        reason = reason_in_norm(norm, step, self.spec.guard)
        optimizer = self.ranks.own.optimizer
        if reason is None and optimizer.bounds_after(bounds, norm, step) is None:
            is_finite = all(self.ranks.all(Rank.stays_finite, norm, divisor, step))
            reason = None if is_finite else SkipReason.NON_FINITE_STEP
        return reason, norm

    def _tensor_norms(self, divisor: float) -> tuple[TensorGradNorm, ...]:
        parts = self.ranks.own.shares.in_order(self.ranks.all(Rank.part_norms))
        return tensor_norms(parts, self._named.by_parameter(), divisor)

    def _grad_norm(self, divisor: float) -> float:
        """Of the sums that were added up, after division; infinite where the sums' dtype holds no
        such number."""
        in_order = self.ranks.own.shares.in_order
        norm = norm_of_blocks(lambda exactly: in_order(self.ranks.all(Rank.norms, exactly)))
        norm /= divisor
        return math.inf if norm > self.ranks.own.optimizer.max_norm else norm
