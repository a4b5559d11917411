"""The trainer of one policy, which a worker runs operations on.

An update is, from top to bottom:

1. `prepare` decides all that the model has no part in: advantages, drops, counters, and the plan
   that cuts the batch into micro-batches, which the journal keeps.
2. `forward_backward` has every rank add the gradients of its micro-batches to the window's sums.
3. `optim_step` divides the sums by the window's counters, clips and steps, or says why it does not.
4. `copy_weights` copies the new version to the hosts, where it is written while updates go on.

`update` is the second and the third of these in one. The trainer decides; the ranks of its group,
its own device's and those of other processes, run what it decided.

Only `optim_step`, `update`, `load_checkpoint` and `import_weights` change weights, moments and
version, each wholly or not at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.folder import ModelFolder
from ratoon.model.layers import most_tokens
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelInfo
from ratoon.planner.device_costs import DeviceRates
from ratoon.planner.plan import check_plan
from ratoon.planner.planning import Planner, cpu_planner, group_sizes
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.selection import Counters
from ratoon.shards.copies import Copies
from ratoon.train.checkpoint import Snapshot, check_digest, read_manifest
from ratoon.train.clock import DeviceClock
from ratoon.train.gradient_window import GradientWindow, Totals, WindowState
from ratoon.train.imported import ImportedWeights, read_weights
from ratoon.train.loss.spec import Loss, Normalisation, OptimStep
from ratoon.train.named_gradients import NamedGradients
from ratoon.train.numerics import numerics_fingerprint
from ratoon.train.optim.digest import digest_of_sums
from ratoon.train.optim.resolve import check_patterns
from ratoon.train.optimizer_step import run_optimizer_step
from ratoon.train.passes import ForwardArrays, ForwardColumns, PassTotals
from ratoon.train.prepare import (
    Prepared,
    PreparedForward,
    check_forward_logprobs,
    prepare,
    prepare_forward,
)
from ratoon.train.ranks.group import ALONE, HeldWeights, Others, RankGroup
from ratoon.train.ranks.layout import lend_activations, load
from ratoon.train.ranks.rank import Rank
from ratoon.train.rates import rates_of
from ratoon.train.report import UsageMeter, forward_backward_report, forward_report, step_report
from ratoon.train.rollout_figures import FoundRollouts
from ratoon.train.self_check import NOT_CHECKED, SelfCheckOutcome, is_due, run_self_check
from ratoon.train.spec import NO_HOOKS, PassHooks, TrainerSpec
from ratoon.train.step_probe import probe_of
from ratoon.train.verdicts import step_warnings
from ratoon_proto.types import LogprobsOf, LossKind, Shard, StepReport


class Trainer:
    """Owns a policy's trained weights, gradient window and optimizer state.

    It has the model that runs them to itself, or, if an adapter is trained, may share it with
    trainers of other policies (`beside`), each of which binds its own adapter before it runs.

    It has the states of `GradientWindow`. `version` counts optimizer steps; the engine renames it
    after a number was retired. Not thread-safe: one call at a time.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        model: PolicyModel,
        copies: Copies | None = None,
        others: Others = ALONE,
        rates: DeviceRates | None = None,
    ) -> None:
        """Put the model and its optimizer states on the ranks.

        Args:
            spec: The policy.
            model: Its model, on this process's device.
            copies: What brings the tensors of other ranks; None: there are none.
            others: Ranks 1 and above.
            rates: Speeds of a GPU, before `limit_activations`.

        Raises:
            RatoonError: What `group_sizes` raises.
        """
        assert spec.num_workers == 1 + len(others.peers)
        self._group_sizes = group_sizes(spec.parallel, model.sizes.num_heads)
        self.spec = spec
        self.model = model
        self.version = 0
        self.ranks = RankGroup(Rank(spec, model, copies or Copies()), others)
        self.ranks.all(Rank.connect_groups, self._group_sizes)
        if spec.shard is Shard.WEIGHTS:
            self.ranks.all(Rank.open_memory, self.ranks.all(Rank.handles))
        self._named = NamedGradients(model)
        self._rates = rates
        self._planner = cpu_planner(
            spec.micro_batch_tokens, num_ranks=self.ranks.size, group_sizes=self._group_sizes
        )
        self._window = GradientWindow()
        # What the last forward-backward found of its rollouts; None: none has run.
        self.found: FoundRollouts | None = None
        self._meter = UsageMeter(model, self.ranks.size)
        self._snapshot_numbers = count()
        # Snapshots that somebody has; the ranks hold their states until they are written.
        self._snapshots = WeakValueDictionary[int, Snapshot]()
        # Tokens of the largest micro-batch that was run whole by each range of graphs, by the
        # range; the range that was run last comes last.
        self.run_tokens: dict[int, int] = {}

    @classmethod
    def create(
        cls, spec: TrainerSpec, others: Others = ALONE, rates_folder: Path | None = None
    ) -> Trainer:
        """Configure torch for this process and load the model; the `others` have loaded theirs.

        Args:
            spec: The policy.
            others: Ranks 1 and above, whose processes have joined this one.
            rates_folder: Where measured rates of GPUs are kept.

        Raises:
            RatoonError: What `load` raises; UNSUPPORTED if ranks have different devices.
        """
        # Measured before anything is on the GPU.
        rates = rates_of(spec, rates_folder)
        spec, model = load(spec)
        trainer = cls(spec, model, Copies.joined(), others, rates)
        trainer.ranks.check_devices()
        trainer.limit_activations()
        trainer.ranks.are_created = True
        return trainer

    def beside(self, spec: TrainerSpec) -> Trainer:
        """A trainer of another policy over the model of this one, with a fresh adapter of its own.

        Calls of the two may alternate in any order, with windows open across; neither changes a bit
        of the other's. The base stays as long as either does.

        `spec`: with the `host_key` of this one's. Raises INVALID_ARGUMENT for a pattern of its
        parameter groups.
        """
        assert spec.host_key, "it trains an adapter on one device"
        assert spec.host_key == self.spec.host_key
        groups = spec.optimizer.groups
        check_patterns("spec.optimizer.groups", groups, self.model.named_trainable())
        states = spec.optimizer_states or self.spec.kept_states
        self.model.bind(self.model.new_adapter(spec.model.seed))
        other = Trainer(replace(spec, optimizer_states=states), self.model, rates=self._rates)
        other._lend(is_beside=True)
        other.ranks.are_created = True
        return other

    def warm_up(self, num_tokens: int) -> None:
        """Compile what runs a micro-batch of so many tokens on one device; changes nothing. The
        window must be empty. Raises RESOURCE_EXHAUSTED for more tokens than fit the device.
        """
        self.ranks.all(Rank.warm_up, num_tokens)

    def compile_ahead(self, tokens: Sequence[int]) -> None:
        """Begin to `warm_up` for one number of tokens after the other, beside other calls.

        The next call that needs the model or its gradients waits for what is being compiled then,
        and no more is. A failure is logged: what is not compiled ahead is compiled in its turn.
        """
        self.ranks.all(Rank.compile_ahead, list(tokens))

    @property
    def is_compiling(self) -> bool:
        """Whether this process is compiling something ahead."""
        return self.ranks.own.is_compiling

    def await_compiler(self) -> None:
        """Wait for what this process compiles ahead; nothing more is then."""
        self.ranks.own.await_compiler()

    def limit_activations(self) -> None:
        """Lend the GPU's free memory to activations; later plans stay within it.

        Call it once everything that stays on the device is there.
        """
        self._lend(is_beside=False)

    def _lend(self, *, is_beside: bool) -> None:
        self._planner = lend_activations(
            self.spec,
            self.model,
            self.ranks,
            self._group_sizes,
            self._rates,
            is_beside=is_beside,
        )

    def prepare(
        self,
        batch: RolloutBatch,
        loss: Loss,
        plan: UpdatePlan | None = None,
        *,
        old_logprobs_J: NDArray[np.floating] | None = None,
        entropy_J: NDArray[np.floating] | None = None,
        logprobs_of: LogprobsOf | None = None,
    ) -> Prepared:
        """Decide advantages, drops, counters and cuts of a forward-backward; touches no state.

        Args:
            batch: The rollouts, J response tokens in all.
            loss: The loss, resolved against `batch`.
            plan: The plan that the journal kept of an earlier run; None: choose one.
            old_logprobs_J: `ForwardArrays.logprobs` of the operation that a `from_forward` loss
                names, else None.
            entropy_J: The entropies of that operation, for a loss with `top_entropy_share`.
            logprobs_of: Tokens whose log-probs are answered, in `FoundRollouts.answers_2J`.

        Raises:
            RatoonError: STALE_ROLLOUTS; INVALID_ARGUMENT if the loss cannot join the open window,
                balances experts that the model has not, or names a Forward of another batch;
                WINDOW_POISONED; INTERNAL if `plan` is of another batch.
        """
        self._window.check(loss)
        coefficient = loss.router_aux_loss_coefficient
        if coefficient and not self.model.routes.num_layers:
            raise invalid("loss.router_aux_loss_coefficient", coefficient, "0: there is no router")
        check_forward_logprobs(batch, loss, old_logprobs_J, entropy_J)
        return prepare(
            batch,
            loss,
            version=self.version,
            plan=self._plan_or_planner(plan, batch),
            old_logprobs_J=old_logprobs_J,
            entropy_J=entropy_J,
            logprobs_of=logprobs_of,
        )

    def forward_backward(
        self,
        prepared: Prepared,
        hooks: PassHooks = NO_HOOKS,
    ) -> StepReport:
        """Add the gradient sum of the batch's loss to the window, cut as the plan says.

        Whatever raises once the first micro-batch has begun leaves the window TORN: the caller must
        call `discard_gradients` (and run the window's earlier forward-backwards again, if it wants
        them back).

        Args:
            prepared: What `prepare` made on this version.
            hooks: Called between micro-batches.

        Raises:
            RatoonError: CANCELLED, and what `GradientWindow.check` raises.
        """
        assert prepared.version == self.version, "prepared on another version"
        self_check = self._self_check(prepared, hooks.is_cancelled)
        is_only = self.is_window_empty and prepared.plan.is_one_backward
        self._window.begin(prepared.loss)
        ranks = self.ranks.run_pass(hooks, Rank.forward_backward, prepared, is_only=is_only)
        done = PassTotals.over(ranks)
        totals = Totals.of_pass(prepared, done)
        self.found = FoundRollouts.of(prepared, done.tokens)
        self._window.complete(prepared, totals)
        self._note_tokens(prepared.plan)
        return forward_backward_report(self.found, totals, done, self._meter, self_check)

    def optim_step(self, step: OptimStep) -> StepReport:
        """Divide the window's gradient, clip it and step; the window is empty afterwards.

        The step is skipped, so that weights and version stay, if no token counts, the gradient is
        zero, a number is not finite or would not be after the step, or a limit of the spec's guard
        is exceeded; with `step.allow_empty` the first two are no reason. The report's means are
        over the window.

        Raises:
            RatoonError: WINDOW_EMPTY, unless it may be, or WINDOW_POISONED.
        """
        return self._optimizer_step(step, StepReport())

    def update(
        self, prepared: Prepared, step: OptimStep, hooks: PassHooks = NO_HOOKS
    ) -> StepReport:
        """Run `forward_backward`, with its arguments, and its optimizer step, in one report.

        Whatever it raises, CANCELLED too, leaves the trainer as it was. Raises `RatoonError`:
        CANCELLED, and WINDOW_OPEN if there are gradients already.
        """
        self._require_empty_window()
        try:
            report = self.forward_backward(prepared, hooks)
        except BaseException:
            self.discard_gradients()
            raise
        return self._optimizer_step(step, report)

    def discard_gradients(self) -> None:
        """Empty the window, TORN or not."""
        self.ranks.all(Rank.clear)
        self._window.clear()

    def check_before_publication(self) -> SelfCheckOutcome:
        """Run the self-check of a version that is to be published on request, where it is due and
        no forward-backward has run it yet: on the rollouts of the last one, if there are any.

        Changes nothing. A window that is open has had the check in its first forward-backward.
        """
        if self.found is None:
            return NOT_CHECKED
        return self._self_check(self.found.prepared, NO_HOOKS.is_cancelled)

    def copy_weights(self) -> HeldWeights:
        """Copy the weights to the hosts; any thread may write the copy until the next call."""
        self.ranks.all(Rank.hold_weights)
        return HeldWeights(self.ranks)

    def prepare_forward(
        self,
        batch: RolloutBatch,
        plan: UpdatePlan | None = None,
        *,
        num_best: int = 0,
        with_teacher: bool = False,
    ) -> PreparedForward:
        """Sort and cut the rollouts of a Forward, as those of an update that drops nothing.

        `plan`: as for `prepare`; `num_best` and `with_teacher`: as for `prepare.prepare_forward`.
        Raises `RatoonError` INTERNAL if the plan is of another batch.
        """
        return prepare_forward(
            batch,
            self._plan_or_planner(plan, batch),
            num_best=num_best,
            with_teacher=with_teacher,
        )

    def forward(
        self,
        prepared: PreparedForward,
        hooks: PassHooks = NO_HOOKS,
        *,
        with_entropy: bool,
        use_reference: bool,
    ) -> ForwardArrays:
        """Compute log-probs of the batch's trained tokens; changes nothing.

        Args:
            prepared: What `prepare_forward` made.
            hooks: Called between micro-batches.
            with_entropy: Whether to return entropies as well.
            use_reference: Whether the frozen reference computes them, not the policy.

        Raises:
            RatoonError: CANCELLED; INVALID_ARGUMENT without a reference; INTERNAL if the plan is of
                another batch.
        """
        ranks = self.ranks.run_pass(hooks, Rank.forward, prepared, use_reference=use_reference)
        columns = ForwardColumns.over(ranks)
        report = forward_report(prepared, columns, self._meter)
        return ForwardArrays.of(prepared, columns, report, with_entropy=with_entropy)

    @property
    def window_state(self) -> WindowState:
        return self._window.state

    @property
    def is_window_empty(self) -> bool:
        return self._window.state is WindowState.EMPTY

    @property
    def normalisation(self) -> Normalisation:
        """How the open window's sums were weighted, for `resolve_optim`.

        Raises:
            RatoonError: WINDOW_EMPTY or WINDOW_POISONED.
        """
        return self._window.normalisation

    @property
    def window_counters(self) -> Counters:
        """Counters of the open window, which divide its sums.

        Raises:
            RatoonError: WINDOW_EMPTY or WINDOW_POISONED.
        """
        self._window.require_open()
        return self._window.counters

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

    @property
    def num_steps(self) -> int:
        """Steps that the optimizer has taken, those before a checkpoint that it began from too."""
        return self.ranks.own.optimizer.state().num_steps

    def snapshot(self) -> Snapshot:
        """Copy weights and moments to the host; any thread may write the copy. No gradients."""
        digest, number = self.state_digest(), next(self._snapshot_numbers)
        self.ranks.all(Rank.hold_states, number, [*self._snapshots])
        self._snapshots[number] = snapshot = Snapshot(
            write_files=lambda folder: self.ranks.all(Rank.write_states, number, str(folder)),
            kind=self.spec.kept_states,
            num_steps=self.num_steps,
            model=self.spec.model,
            version=self.version,
            digest=digest,
        )
        return snapshot

    def load_checkpoint(self, folder: Path) -> None:
        """Take over the state of a checkpoint, version included, and empty the window.

        The frozen reference stays. Nothing has changed if this raises.

        Raises:
            RatoonError: What `read_manifest` and `read_states` raise; INTERNAL if the digest of
                what was read is another than the checkpoint's.
        """
        manifest = read_manifest(folder, self.spec.kept_states, self.spec.model)
        with self._discarding_staged():
            sums = self.ranks.all(Rank.read_states, str(folder), manifest)
            check_digest(folder, manifest, digest_of_sums(sums, manifest.num_steps))
        self.discard_gradients()
        self.ranks.exchange(Rank.take_states)
        self.version = manifest.version

    def read_weights(self, folder: Path, digest: str, *, adds: bool = False) -> ImportedWeights:
        """Read a folder's weights, for `import_weights`; changes nothing.

        Raises:
            RatoonError: What `ModelFolder.of` and `imported.read_weights` raise.
        """
        place = ModelFolder.of(folder, self.spec.models_root)
        return read_weights(self.model, place, digest, adds=adds)

    def import_weights(
        self, weights: ImportedWeights, *, adds: bool, resets_optimizer: bool
    ) -> None:
        """Replace the weights, or add to them, as the next version.

        The frozen reference stays; so do moments and step count, unless the optimizer is reset.
        Nothing has changed if this raises.

        Raises:
            RatoonError: WINDOW_OPEN; INVALID_ARGUMENT if a sum is not finite.
        """
        self._require_empty_window()
        self.ranks.exchange_leader_value(Rank.take_values, weights.values)
        if adds:
            with self._discarding_staged():
                self.ranks.all(Rank.check_sums)
        key = f"import {self.version + 1}"
        self.ranks.exchange(Rank.set_values, key, adds=adds, resets_optimizer=resets_optimizer)
        self.version += 1

    def reset_optimizer(self) -> None:
        """Moments and step count begin anew; the weights stay. Raises WINDOW_OPEN."""
        self._require_empty_window()
        self.ranks.all(Rank.reset_optimizer)

    def info(self) -> ModelInfo:
        """Describe the model and how its states are kept."""
        return replace(
            self.model.info(),
            optimizer_states=self.spec.kept_states.value,
            shard=self.spec.shard.value,
            num_nodes=self.spec.num_nodes,
        )

    def fingerprint(self) -> dict[str, str]:
        """Everything besides model, batch and plan that the bits depend on, by name."""
        return numerics_fingerprint(self.spec, self.info().attention_backend)

    def graphs(self) -> dict[str, str]:
        """What the graphs of the layers depend on, besides plans and versions, by name."""
        spec = self.spec
        return {
            "attention_backend": self.info().attention_backend,
            "config": self.model.config.to_json_string(use_diff=False),
            "deterministic": str(spec.deterministic),
            "dtype": spec.model.dtype.value,
            "tuning": repr(spec.model.tuning),
        }

    def state_digest(self) -> str:
        """Digest of weights, moments and step count, 32 hexadecimal digits; not of the window."""
        sums = self.ranks.all(Rank.digest_sums)
        return digest_of_sums(sums, self.ranks.own.optimizer.state().num_steps)

    def _plan_or_planner(
        self, plan: UpdatePlan | None, batch: RolloutBatch
    ) -> UpdatePlan | Planner:
        """A journaled plan, once it is known to be of this batch; else this window's planner."""
        if plan is None:
            return self._planner if self.is_window_empty else self._planner.beside_sums()
        check_plan(plan, batch.num_sequences, self.ranks.size)
        return plan

    def _self_check(self, prepared: Prepared, is_cancelled: Callable[[], bool]) -> SelfCheckOutcome:
        """Run the self-check of a due version, in the empty sums."""
        if not (self.is_window_empty and is_due(self.version, self.spec.self_check_every)):
            return NOT_CHECKED
        with self.ranks.own.reading():
            return run_self_check(
                self.model,
                self.ranks.own.gradients,
                replace(prepared, version=self.version),
                seed=self.spec.model.seed,
                is_cancelled=is_cancelled,
            )

    def _note_tokens(self, plan: UpdatePlan) -> None:
        for each in plan.micro_batches if plan.sequence_ranks == 1 else ():
            if not each.stages:
                most = most_tokens(each.packed_tokens)
                tokens = max(each.packed_tokens, self.run_tokens.pop(most, 0))
                self.run_tokens[most] = tokens

    def _require_empty_window(self) -> None:
        if not self.is_window_empty:
            raise RatoonError(
                ErrorCode.WINDOW_OPEN, "ForwardBackwards of the window are not stepped or discarded"
            )

    def _optimizer_step(self, step: OptimStep, base: StepReport) -> StepReport:
        clock, found = DeviceClock(self.model.device), self.found
        totals = self._window.totals
        if step.allow_empty and self.is_window_empty:
            divisor, found = 0.0, None
        else:
            divisor = self._window.divisor(step.divisor)
        # Sums of nothing are zeros, whatever divides them.
        by = divisor or (1.0 if step.allow_empty else 0.0)
        report = run_optimizer_step(
            self.ranks, self._named, self.spec, step, totals.sums, by, base, found
        )
        if not report.skipped:
            self.version += 1
        self.discard_gradients()
        if not report.skipped and found is not None:
            report = replace(report, **self._probe(found, report))
        report = replace(report, warnings=(*report.warnings, *step_warnings(report)))
        clock.lap("optimizer")
        return step_report(report, totals, divisor, clock.seconds()["optimizer"])

    def _probe(self, found: FoundRollouts, report: StepReport) -> dict[str, float | int | None]:
        """Run some of a window's tokens again after its step; nothing where there is no memory, and
        of a critic, whose log-probs nobody samples by."""
        probe = probe_of(found, report)
        if probe is None or found.prepared.loss.kind is LossKind.VALUE:
            return {}
        try:
            prepared = self.prepare_forward(probe.batch)
            arrays = self.forward(prepared, with_entropy=False, use_reference=False)
        except (torch.OutOfMemoryError, RatoonError) as err:
            if isinstance(err, RatoonError) and err.code is not ErrorCode.RESOURCE_EXHAUSTED:
                raise
            return {}
        return probe.figures(arrays.logprobs)

    @contextmanager
    def _discarding_staged(self) -> Iterator[None]:
        """If any rank fails, every rank discards what it staged."""
        try:
            yield
        except Exception:
            self.ranks.all(Rank.discard_staged)
            raise
