"""One device's share of a policy: its weights, and the methods that the trainer calls on each rank.

A rank runs its own micro-batches, and keeps the optimizer states of its own parts of the
parameters. Its gradient sums cover all parameters over its micro-batches; where gradients are
shared out, a rank keeps of a decoder layer only the sums of its own parts. Where weights are shared
out too, it keeps only its parts of them and reads the others from their owners. A rank decides
nothing: `trainer` calls each method on every rank (`ranks.group`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from torch import Tensor

from ratoon.garbage import frozen_graphs
from ratoon.model.delta_runs import DeltaPart
from ratoon.model.export import WeightsCopy
from ratoon.model.policy_model import PolicyModel, muon_matrices
from ratoon.rollout.packed import UpdatePlan
from ratoon.shards.copies import Copies
from ratoon.shards.layer_shards import Handle
from ratoon.shards.parts import parts_of
from ratoon.shards.sequence_group import SequenceGroup, SequenceGroups
from ratoon.train.checkpoint import Manifest, StatesFile, read_states, write_states
from ratoon.train.loss.spec import OptimStep
from ratoon.train.named_gradients import PartNorm, part_norms
from ratoon.train.numerics import (
    activation_bytes,
    allocated_bytes,
    device_model,
    peak_memory_bytes,
)
from ratoon.train.optim.adamw import block_norms, num_blocks
from ratoon.train.optim.bf16_adamw import make_optimizer
from ratoon.train.optim.digest import StateDigest
from ratoon.train.optim.gradients import GradientSums
from ratoon.train.optim.state import OptimizerState, StateBounds
from ratoon.train.optim.step_size import StepSize, sampled_weights, step_size
from ratoon.train.passes import (
    ForwardColumns,
    PassTotals,
    forward_backward_pass,
    forward_pass,
)
from ratoon.train.prepare import Prepared, PreparedForward
from ratoon.train.ranks.sharded_sums import ShardedSums
from ratoon.train.ranks.shares import Outbox, Shares
from ratoon.train.spec import NO_HOOKS, PassHooks, TrainerSpec
from ratoon.train.warm_up import Compiling, few_rollouts
from ratoon_proto.types import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One rank's account of a step.

    `changed`: number of bfloat16 weights of its parts whose bits changed; None where nobody asked.
    `planned_memory_bytes`: None for a CPU.
    """

    changed: int | None
    size: StepSize
    peak_memory_bytes: int
    planned_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyBackward:
    """Memory limits for a window with a single backward: activation bytes, and bytes of one
    layer's gradients, which stay until the end of that backward."""

    device_bytes: int
    layer_gradient_bytes: int


class Rank:
    """Not thread-safe, except for what writes held states and weights.

    All ranks get their calls in one order.
    """

    def __init__(self, spec: TrainerSpec, model: PolicyModel, copies: Copies) -> None:
        self.model = model
        self.copies = copies
        self._groups = SequenceGroups(copies, ())
        self._parameters = model.named_trainable()
        matrices = muon_matrices(spec.optimizer, model.module, self._parameters)
        self.shares = Shares(parts_of(self._parameters, matrices=matrices), copies)
        # Where weights are shared out, adapters are not: they are small.
        is_whole = spec.shard is Shard.STATES or (
            spec.shard is Shard.WEIGHTS and model.adapter is not None
        )
        # The ranks of this node, if they read each other's weights.
        self._neighbours: Sequence[int] = () if model.shards is None else copies.neighbours()
        # What other ranks of a node take gradients from.
        self._outbox: Outbox | None = None
        if is_whole:
            self.gradients = GradientSums(self._parameters)
        else:
            self.gradients = ShardedSums(
                self._parameters,
                model.named_layers(),
                self.shares,
                copies,
                self._neighbours,
            )
            self._outbox = self.gradients.outbox
        self.optimizer = make_optimizer(
            self._own_weights(), spec.optimizer, spec.kept_states, spec.model.seed, matrices
        )
        self._digest = StateDigest(model.device)
        # A pass reports its progress to these, and asks them whether it is cancelled.
        self.hooks = NO_HOOKS
        # Copies of optimizer states on the host, by the number of their snapshot.
        self._held: dict[int, OptimizerState] = {}
        self._read: OptimizerState | None = None
        self._values: dict[str, Tensor] = {}
        self._weights_copy = WeightsCopy(
            model,
            copies.rank,
            copies.size,
            is_merged=spec.publishes_merged,
            compares=spec.compares_versions,
        )
        # Bytes lent to activations, of the device and of the host.
        self._lent: tuple[int | None, int] = None, 0
        self._only: OnlyBackward | None = None
        self._compiling: Compiling | None = None
        # The most device memory that a forward-backward was planned to hold; None for a CPU.
        self.planned_memory_bytes: int | None = None

    def device_model(self) -> str:
        """Model name of this rank's device."""
        return device_model(self.model.device)

    def connect_groups(self, sizes: Sequence[int]) -> None:
        """Connect to the ranks that may share micro-batches with this one, in groups of `sizes`."""
        self._groups = SequenceGroups(self.copies, sizes)

    def handles(self) -> list[Handle]:
        """Handles of the memory that other ranks read: this rank's parts of the weights, then the
        room for its gradients. Empty where every rank has all weights."""
        shards, outbox = self.model.shards, self._outbox
        weights = [] if shards is None else shards.handles()
        return weights if outbox is None else [*weights, outbox.handle()]

    def open_memory(self, by_rank: Sequence[Sequence[Handle]]) -> None:
        """Map the memory behind the `handles` of this node's ranks, of those of all, once every
        rank has its parts."""
        shards, outbox = self.model.shards, self._outbox
        by_rank = [by_rank[rank] for rank in self._neighbours]
        if outbox is not None:
            outbox.open([own[-1] for own in by_rank])
            by_rank = [own[:-1] for own in by_rank]
        if shards is not None:
            shards.open(by_rank)

    def activation_bytes(self, set_aside: int = 0, *, is_only: bool = False) -> int | None:
        """Device memory that this rank has for activations; None for a CPU: no limit.

        `set_aside`: bytes for others. `is_only`: for a window's only backward, whose gradients
        become the sums.
        """
        taken = self._passing_bytes(is_only=is_only) + set_aside
        return activation_bytes(self.model.device, taken)

    def limit_activations(
        self, device_bytes: int | None, host_bytes: int, only: OnlyBackward | None = None
    ) -> None:
        """Lend these many bytes of the device and of the host to activations.

        `only`: the limits for a window's only backward; None: the same ones.
        """
        self.model.limit_activations(device_bytes, host_bytes=host_bytes)
        self._lent, self._only = (device_bytes, host_bytes), only

    def forward_backward(self, prepared: Prepared, *, is_only: bool = False) -> PassTotals:
        """Add the gradient of this rank's micro-batches to its sums.

        `is_only`: the sums are empty, and no parameter gets more than one gradient.
        """
        # Before the limits change, which it reads.
        self.await_compiler()
        only = self._only if is_only else None
        # First of all what tells the other ranks, who wait there, of whatever fails.
        with (
            self.gradients.of_pass(prepared.plan, self.hooks.is_cancelled),
            self._together(prepared.plan) as (group, hooks),
            frozen_graphs(),
            self._planned(only),
            self._lending(only),
            self.reading(),
        ):
            own = prepared.of_rank(self.copies.rank)
            return forward_backward_pass(self.model, own, hooks, group)

    def forward(self, prepared: PreparedForward, *, use_reference: bool) -> ForwardColumns:
        """Log-probs and entropies of this rank's micro-batches; 0 for the others'."""
        reference = self.model.reference() if use_reference else nullcontext()
        with (
            self._together(prepared.plan) as (group, hooks),
            frozen_graphs(),
            self.reading(),
            reference,
        ):
            own = prepared.of_rank(self.copies.rank)
            return forward_pass(self.model, own, hooks, group)

    def warm_up(self, num_tokens: int) -> None:
        """Run a few tokens by the layers' graphs for `num_tokens`, as a window's only backward; the
        sums must be empty, and are afterwards. Ranks need not run it together.

        Raises what a forward-backward of so many tokens raises.
        """
        try:
            with (
                frozen_graphs(),
                self._lending(self._only),
                self._reading(),
                self.model.run_as(num_tokens),
            ):
                forward_backward_pass(self.model, few_rollouts(), NO_HOOKS)
        finally:
            self.gradients.clear()

    def compile_ahead(self, tokens: Sequence[int]) -> None:
        """Begin to `warm_up` for one number of tokens after the other, in a thread of its own."""
        self._compiling = Compiling([partial(self.warm_up, each) for each in tokens])

    @property
    def is_compiling(self) -> bool:
        """Whether something is being compiled ahead."""
        return self._compiling is not None and self._compiling.is_running

    def await_compiler(self) -> None:
        """Wait for what is being compiled ahead, after which nothing more is."""
        if self._compiling is not None:
            self._compiling.end()
            self._compiling = None

    def clear(self) -> None:
        """Set the gradient sums to zero."""
        self.await_compiler()
        self.gradients.clear()

    def sums_of(self, parameters: list[str]) -> list[Tensor]:
        """This rank's gradient sums of some parameters, on the CPU."""
        return [self.gradients.sum_of(name).to("cpu") for name in parameters]

    def reduce_sums(self) -> StateBounds:
        """Add the other ranks' gradient sums to this rank's parts; only a step may follow.

        Returns bounds of the state of these parts.
        """
        if self.copies.size > 1:
            self.shares.reduce_sums(self.gradients.whole_sums())
        return self.optimizer.bounds()

    def norms(self, exactly: bool) -> dict[str, list[float]]:
        """`block_norms` of the reduced parts; called before a step."""
        self._weights_copy.finish()
        sums = self._own_sums()
        norms = iter(block_norms(sums.values(), exactly=exactly))
        return {name: [*islice(norms, num_blocks(each))] for name, each in sums.items()}

    def part_norms(self) -> dict[str, PartNorm]:
        """Norms of the reduced parts, by the names of parts."""
        return part_norms(self._own_sums())

    def stays_finite(self, norm: float, divisor: float, step: OptimStep) -> bool:
        """Whether a `step` would leave this rank's weights and moments finite; exact."""
        return self.optimizer.stays_finite(self._own_sums(), divisor, norm, step)

    def step(self, norm: float, divisor: float, step: OptimStep) -> Stepped:
        """Step this rank's parts, and get the other ranks' new weights.

        `norm`: the gradient's norm after division by `divisor`.
        """
        self._weights_copy.settle()
        before = sampled_weights(self.optimizer.state())
        changed = self.optimizer.apply(self._own_sums(), divisor, norm, step)
        size = step_size(before, self.optimizer.state())
        self._broadcast_weights()
        return Stepped(
            changed=None if changed is None else int(changed),
            size=size,
            peak_memory_bytes=peak_memory_bytes(self.model.device),
            planned_memory_bytes=self.planned_memory_bytes,
        )

    def digest_sums(self) -> tuple[int, int]:
        """The terms that this rank's parts add to the digest of the state."""
        return self._digest.sums(self.optimizer.state())

    def hold_states(self, number: int, wanted: Collection[int]) -> None:
        """Copy the states of this rank's parts to the host, for snapshot `number`.

        Copies of earlier snapshots are dropped, except for the `wanted` ones.
        """
        for old in self._held.keys() - {*wanted}:
            del self._held[old]
        self._held[number] = self.optimizer.state().on_host()

    def write_states(self, number: int, folder: str) -> StatesFile:
        """Write the states held for a snapshot, and drop them. Any thread may call it."""
        state = self._held.pop(number)
        return write_states(Path(folder), state, self.copies.rank, self.copies.size)

    def hold_weights(self) -> None:
        """Copy this rank's share of the weights to the host, for `write_weights`."""
        self.model.bind(self._parameters)
        self._weights_copy.take()

    def write_weights(self, folder: str) -> dict[str, str]:
        """Write the files of the held share; returns digests by name. Any thread may call it."""
        return self._weights_copy.write(Path(folder))

    def write_rest(self, folder: str) -> dict[str, str]:
        """Write the files that have no trained weights, as `WeightsCopy.write_rest` does."""
        return self._weights_copy.write_rest(Path(folder))

    def write_delta(
        self, path: str, parents: Mapping[str, str]
    ) -> tuple[DeltaPart, dict[str, str]] | None:
        """Write this rank's part of a delta, as `WeightsCopy.write_delta` does, beside `path`. Any
        thread may call it."""
        return self._weights_copy.write_delta(Path(f"{path}.{self.copies.rank}"), parents)

    def read_states(self, folder: str, manifest: Manifest) -> tuple[int, int]:
        """Stage this rank's parts of a checkpoint for `take_states`; returns their digest sums."""
        self.await_compiler()
        self._weights_copy.finish()
        like, place = self.optimizer.state(), (self.copies.rank, self.copies.size)
        self._read = read_states(Path(folder), manifest, like, *place)
        return self._digest.sums(self._read)

    def take_states(self) -> None:
        """Take over the staged states, and get the other ranks' weights."""
        assert self._read is not None
        self._weights_copy.settle()
        self.optimizer.load(self._read)
        self._read = None
        self._broadcast_weights()

    def discard_staged(self) -> None:
        """Discard states or weights that were staged but not applied."""
        self._read, self._values = None, {}

    def take_values(self, values: Mapping[str, Tensor] | None) -> None:
        """Stage this rank's parts of the `values` that rank 0 is given, for `set_values`.

        `values`: tensors by parameter on rank 0, None on the others.
        """
        self.await_compiler()
        self._weights_copy.finish()
        self._values = self.shares.deal(values)

    def check_sums(self) -> None:
        """Raise INVALID_ARGUMENT where a weight would not be finite with its staged value added."""
        self.optimizer.check_sums(self._values)

    def set_values(self, key: str, *, adds: bool, resets_optimizer: bool) -> None:
        """Replace the weights by the staged values, or add these, as `set_weights` does."""
        self._weights_copy.settle()
        self.optimizer.set_weights(self._values, adds=adds, key=key)
        self._values = {}
        if resets_optimizer:
            self.optimizer.reset()
        self._broadcast_weights()

    def reset_optimizer(self) -> None:
        """Forget the moments and the step count of this rank's parts."""
        self._weights_copy.settle()
        self.optimizer.reset()

    def _passing_bytes(self, *, is_only: bool) -> int:
        """Bytes that a forward-backward takes, besides activations and what is allocated before."""
        shards = self.model.shards
        ring_bytes = 0 if shards is None else shards.ring_bytes
        ring_bytes += self._weights_copy.device_bytes
        return ring_bytes + (0 if is_only else self.gradients.passing_bytes)

    @contextmanager
    def _planned(self, only: OnlyBackward | None) -> Iterator[None]:
        """Record the peak memory that the forwards inside the block are planned to need."""
        allocated = allocated_bytes(self.model.device)
        passing = self._passing_bytes(is_only=only is not None)
        self.model.planned_bytes = 0
        yield
        if allocated is not None:
            planned = allocated + passing + self.model.planned_bytes
            self.planned_memory_bytes = max(self.planned_memory_bytes or 0, planned)

    @contextmanager
    def _lending(self, only: OnlyBackward | None) -> Iterator[None]:
        """While the block runs, the limits of a window's only backward apply, if given."""
        if only is None:
            yield
            return
        device_bytes, host_bytes = self._lent
        self.model.limit_activations(
            only.device_bytes,
            host_bytes=host_bytes,
            layer_gradient_bytes=only.layer_gradient_bytes,
        )
        try:
            yield
        finally:
            self.model.limit_activations(device_bytes, host_bytes=host_bytes)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In the block the model has this rank's weights; whatever bound others since is undone.

        When it is left, in any way, this rank has stopped reading other ranks' weights. It begins
        once nothing is being compiled ahead.
        """
        self.await_compiler()
        with self._reading():
            yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self.model.bind(self._parameters)
        try:
            yield
        finally:
            if self.model.shards is not None:
                self.model.shards.settle()

    def _own_weights(self) -> dict[str, Tensor]:
        """This rank's parts of the trained weights, in order, live."""
        shards = self.model.shards
        if shards is None:
            return self.shares.own(self._parameters)
        whole = self.shares.own({n: p for n, p in self._parameters.items() if n not in shards})
        own = whole | shards.own()
        parts = self.shares.by_rank(self._parameters)[self.copies.rank]
        return {part.name: own[part.name] for part in parts}

    def _broadcast_weights(self) -> None:
        """Send this rank's changed parts to the ranks that keep them too.

        Every rank keeps the weights that are not shared out. Shared ones change in place: others of
        the node read them from here, once all ranks have answered; of each other node one rank, the
        counterpart of this one, keeps them too.
        """
        shards = self.model.shards
        if shards is None:
            self.shares.broadcast_weights(self._parameters)
            return
        whole = {n: p for n, p in self._parameters.items() if n not in shards}
        self.shares.broadcast_weights(whole)
        self.shares.broadcast_parts(shards.own(), self.copies.counterparts())
        shards.wait()

    @contextmanager
    def _together(self, plan: UpdatePlan) -> Iterator[tuple[SequenceGroup, PassHooks]]:
        """The ranks that share the plan's micro-batches with this one; all stop if one has to."""
        with self._groups.joined(plan.sequence_ranks) as group:
            is_cancelled = self.hooks.is_cancelled
            yield group, replace(self.hooks, is_cancelled=lambda: group.any(is_cancelled()))

    def _own_sums(self) -> dict[str, Tensor]:
        return self.shares.own(self.gradients.sums_of_step()) | self.gradients.shards()
