"""One device's share of a policy: its weights, and what it does with them.

A rank runs its micro-batches, and has the optimizer's states of its parts of the parameters. Its
gradient sums are those of its micro-batches, or in decoder layers those of its parts; so are its
weights, where it reads the others' from their owners. It decides
nothing: `trainer` asks the same of every rank (`rank_group`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ratoon.garbage import frozen_graphs
from ratoon.model.export import WeightsCopy
from ratoon.model.parts import parts_of
from ratoon.model.policy_model import PolicyModel
from ratoon.model.sequence_group import SequenceGroup
from ratoon.model.shared_memory import Handle
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes
from ratoon.train.checkpoint import Manifest, StatesFile, read_states, write_states
from ratoon.train.copies import Copies
from ratoon.train.loss.spec import OptimStep
from ratoon.train.micro_batches import PassHooks, never_cancelled, no_progress
from ratoon.train.numerics import (
    activation_bytes,
    allocated_bytes,
    device_model,
    peak_memory_bytes,
)
from ratoon.train.optim.adamw import block_norms
from ratoon.train.optim.choice import make_optimizer
from ratoon.train.optim.digest import StateDigest
from ratoon.train.optim.gradients import GradientSums
from ratoon.train.optim.parts import Shares
from ratoon.train.optim.sharded_sums import ShardedSums
from ratoon.train.optim.state import OptimizerState
from ratoon.train.optim.step_bounds import StateBounds
from ratoon.train.optim.tensor_norms import PartNorm, part_norms
from ratoon.train.passes import (
    ForwardColumns,
    PassTotals,
    forward_backward_pass,
    forward_pass,
)
from ratoon.train.prepare import Prepared
from ratoon.train.sequence_link import SequenceGroups
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """`changed`: bfloat16 weights of the rank's parts with other bits, where that was asked for.
    `planned_memory_bytes`: None for a CPU."""

    changed: int | None
    peak_memory_bytes: int
    planned_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyBackward:
    """Where no sums are beside it: the device's bytes for activations, and those of a layer's
    gradients, which stay until the end of the backward."""

    device_bytes: int
    layer_gradient_bytes: int


class Rank:
    """Not thread-safe, but for `write_states` and `write_weights`.

    Methods are called on all ranks in one order.
    """

    def __init__(self, spec: TrainerSpec, model: PolicyModel, copies: Copies) -> None:
        self.model = model
        self.copies = copies
        self._groups = SequenceGroups(copies, ())
        self._parameters = model.named_trainable()
        self.shares = Shares(parts_of(self._parameters), copies)
        # Where weights are shared out, adapters are not: they are small.
        is_whole = spec.shard is Shard.STATES or (
            spec.shard is Shard.WEIGHTS and model.adapter is not None
        )
        self.gradients = (
            GradientSums(self._parameters)
            if is_whole
            else ShardedSums(
                self._parameters,
                model.named_layers(),
                self.shares,
                copies,
                are_neighbours=model.shards is not None,
            )
        )
        self.optimizer = make_optimizer(
            self._own_weights(), spec.optimizer, spec.kept_states, spec.model.seed
        )
        self._digest = StateDigest(model.device)
        # What a pass tells and asks while it runs.
        self.hooks = PassHooks(on_progress=no_progress, is_cancelled=never_cancelled)
        # By the number of their snapshot.
        self._held: dict[int, OptimizerState] = {}
        self._read: OptimizerState | None = None
        self._values: dict[str, Tensor] = {}
        self._weights_copy = WeightsCopy(model, copies.rank, copies.size)
        # To activations, of the device and of the host.
        self._lent: tuple[int | None, int] = None, 0
        self._only: OnlyBackward | None = None
        # Most that a forward-backward was planned to hold of the device; None for a CPU.
        self.planned_memory_bytes: int | None = None

    def device_model(self) -> str:
        """What this rank's device is called."""
        return device_model(self.model.device)

    def meet(self, sizes: Sequence[int]) -> None:
        """Connect to the ranks that may run micro-batches with this one, groups of these sizes."""
        self._groups = SequenceGroups(self.copies, sizes)

    def handles(self) -> list[Handle]:
        """Of the memory that other ranks read: this rank's parts of the weights, and where it puts
        gradients; none where it has all weights."""
        shards, outbox = self.model.shards, self.gradients.outbox
        weights = [] if shards is None else shards.handles()
        return weights if outbox is None else [*weights, outbox.handle()]

    def open_memory(self, by_rank: Sequence[Sequence[Handle]]) -> None:
        """Map what all ranks have handles of, who have their parts by now."""
        shards, outbox = self.model.shards, self.gradients.outbox
        if outbox is not None:
            outbox.open([own[-1] for own in by_rank])
            by_rank = [own[:-1] for own in by_rank]
        if shards is not None:
            shards.open(by_rank)

    def activation_bytes(self, *, is_only: bool = False) -> int | None:
        """What this rank's device has for activations; None for a CPU: no limit.

        `is_only`: of a window's only backward, whose gradients are its sums.
        """
        return activation_bytes(self.model.device, self._passing_bytes(is_only=is_only))

    def limit_activations(
        self, device_bytes: int | None, host_bytes: int, only: OnlyBackward | None = None
    ) -> None:
        """Lend activations so much of the device and of the host. `only`: to those of a window's
        only backward; None: as much."""
        self.model.limit_activations(device_bytes, host_bytes=host_bytes)
        self._lent, self._only = (device_bytes, host_bytes), only

    def forward_backward(
        self,
        prepared: Prepared,
        forward_logprobs_J: NDArray[np.floating] | None,
        *,
        is_only: bool = False,
    ) -> PassTotals:
        """Add the gradient of this rank's micro-batches to its sums. `is_only`: there are none
        yet, and no parameter gets more than one gradient."""
        own = prepared.of_rank(self.copies.rank)
        only = self._only if is_only else None
        with (
            frozen_graphs(),
            self._planned(only),
            self._lending(only),
            self.reading(),
            self.gradients.of_pass(prepared.plan, self.hooks.is_cancelled),
            self._together(own.plan) as (group, hooks),
        ):
            return forward_backward_pass(self.model, own, forward_logprobs_J, hooks, group)

    def forward(
        self,
        batch: RolloutBatch,
        prefixes: SortedPrefixes,
        plan: UpdatePlan,
        *,
        use_reference: bool,
    ) -> ForwardColumns:
        """Log-probs and entropies of this rank's micro-batches; 0 for the others'."""
        own = plan.of_rank(self.copies.rank)
        reference = self.model.reference() if use_reference else nullcontext()
        with frozen_graphs(), self.reading(), reference, self._together(own) as (group, hooks):
            return forward_pass(self.model, batch, prefixes, own, hooks, group)

    def clear(self) -> None:
        """Forget the gradient sums."""
        self.gradients.clear()

    def sums_of(self, parameters: list[str]) -> list[Tensor]:
        """This rank's gradient sums of some parameters, on the CPU."""
        return [self.gradients.sum_of(name).to("cpu") for name in parameters]

    def add_up(self) -> StateBounds:
        """Make the sums of this rank's parts those over all ranks; only a step may follow.

        Returns bounds of the state of these parts.
        """
        if self.copies.size > 1:
            self.shares.add_up(self.gradients.whole_sums())
        return self.optimizer.bounds()

    def norms(self, exactly: bool) -> dict[str, float]:
        """`block_norms` of the parts that were added up, of one block each; before a step."""
        self._weights_copy.finish()
        sums = self._own_sums()
        return dict(zip(sums, block_norms(sums.values(), exactly=exactly), strict=True))

    def part_norms(self) -> dict[str, PartNorm]:
        """Of the parts that were added up."""
        return part_norms(self._own_sums())

    def stays_finite(self, norm: float, divisor: float, step: OptimStep) -> bool:
        """Whether a `step` would make finite weights and moments of this rank's parts; exact."""
        return self.optimizer.stays_finite(self._own_sums(), divisor, norm, step)

    def step(self, norm: float, divisor: float, step: OptimStep) -> Stepped:
        """Step this rank's parts, and get the others' new weights. `norm`: after division."""
        self._weights_copy.settle()
        changed = self.optimizer.apply(self._own_sums(), divisor, norm, step)
        self._hand_out()
        return Stepped(
            changed=None if changed is None else int(changed),
            peak_memory_bytes=peak_memory_bytes(self.model.device),
            planned_memory_bytes=self.planned_memory_bytes,
        )

    def digest_sums(self) -> tuple[int, int]:
        """What this rank's parts add to the digest of the state."""
        return self._digest.sums(self.optimizer.state())

    def hold_states(self, number: int, wanted: Collection[int]) -> None:
        """Copy the states of this rank's parts to the host, as those of a snapshot.

        Of those that are held none but the `wanted` stay.
        """
        for old in self._held.keys() - {*wanted}:
            del self._held[old]
        self._held[number] = self.optimizer.state().on_host()

    def write_states(self, number: int, folder: str) -> StatesFile:
        """Write what is held of a snapshot, and let it go. For any thread."""
        state = self._held.pop(number)
        return write_states(Path(folder), state, self.copies.rank, self.copies.size)

    def hold_weights(self) -> None:
        """Copy this rank's share of the weights to the host, for `write_weights`."""
        self._weights_copy.take()

    def write_weights(self, folder: str) -> dict[str, str]:
        """Write the files of the share that is held; their digests by name. For any thread."""
        return self._weights_copy.write(Path(folder))

    def read_states(self, folder: str, manifest: Manifest) -> tuple[int, int]:
        """Read this rank's parts of a checkpoint, for `take_states`; their `digest_sums`."""
        self._weights_copy.finish()
        like, place = self.optimizer.state(), (self.copies.rank, self.copies.size)
        self._read = read_states(Path(folder), manifest, like, *place)
        return self._digest.sums(self._read)

    def take_states(self) -> None:
        """Become what was read, and get the others' weights."""
        assert self._read is not None
        self._weights_copy.settle()
        self.optimizer.load(self._read)
        self._read = None
        self._hand_out()

    def let_go(self) -> None:
        """Of what was read or taken, and is not wanted after all."""
        self._read, self._values = None, {}

    def take_values(self, values: Mapping[str, Tensor] | None, *, adds: bool) -> None:
        """Get this rank's parts of the `values` that rank 0 has, for `set_values`.

        Raises INVALID_ARGUMENT where they are to be added and a sum is not finite.
        """
        self._weights_copy.finish()
        self._values = self.shares.deal(values)
        if adds:
            self.optimizer.check_sums(self._values)

    def set_values(self, key: str, *, adds: bool, resets_optimizer: bool) -> None:
        """Replace the weights by the values, or add them, on all ranks; as `set_weights` does."""
        self._weights_copy.settle()
        self.optimizer.set_weights(self._values, adds=adds, key=key)
        self._values = {}
        if resets_optimizer:
            self.optimizer.reset()
        self._hand_out()

    def _passing_bytes(self, *, is_only: bool) -> int:
        """What a forward-backward takes beside activations and what is there before it."""
        shards = self.model.shards
        ring_bytes = 0 if shards is None else shards.ring_bytes
        return ring_bytes + (0 if is_only else self.gradients.passing_bytes)

    @contextmanager
    def _planned(self, only: OnlyBackward | None) -> Iterator[None]:
        """Notes what the plans of the forwards inside come to."""
        allocated = allocated_bytes(self.model.device)
        passing = self._passing_bytes(is_only=only is not None)
        self.model.planned_bytes = 0
        yield
        if allocated is not None:
            planned = allocated + passing + self.model.planned_bytes
            self.planned_memory_bytes = max(self.planned_memory_bytes or 0, planned)

    @contextmanager
    def _lending(self, only: OnlyBackward | None) -> Iterator[None]:
        """Inside, a window's only backward has what is lent to it."""
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
        """However it is left, this rank reads no weights of others any more."""
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

    def _hand_out(self) -> None:
        """Give all ranks what this one has changed of weights that each has whole.

        Of the others it is in place, for whoever reads after all ranks have answered.
        """
        shards = self.model.shards
        if shards is None:
            self.shares.hand_out(self._parameters)
            return
        self.shares.hand_out({n: p for n, p in self._parameters.items() if n not in shards})
        shards.wait()

    @contextmanager
    def _together(self, plan: UpdatePlan) -> Iterator[tuple[SequenceGroup, PassHooks]]:
        """The ranks that run the plan's micro-batches with this one; they stop where one has to."""
        with self._groups.joined(plan.sequence_ranks) as group:
            is_cancelled = self.hooks.is_cancelled
            yield group, replace(self.hooks, is_cancelled=lambda: group.any(is_cancelled()))

    def _own_sums(self) -> dict[str, Tensor]:
        return self.shares.own(self.gradients.sums_of_step()) | self.gradients.shards()
