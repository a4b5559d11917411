"""What a trainer is built from: the policy's spec and the server's settings; and what it calls
while it runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ratoon.model.spec import ModelSpec, PresetBase
from ratoon_proto.types import (
    AdamWConfig,
    KeepRollouts,
    LoraTuning,
    NumericsGuard,
    ParallelLayout,
    Shard,
)


class OptimizerStates(StrEnum):
    """What is kept of a bfloat16 policy beside its gradients (docs/decisions/0008).

    FP32: float32 master weights and moments. BF16_SPLIT: the same master as the bfloat16 weight and
    the 16 bits that it lacks; BF16_SPLIT_8BIT: the moments in 8 bits besides. BF16_STOCHASTIC and
    BF16_8BIT have no master and round weights stochastically: at RL's learning rates the rounding
    is larger than the update.
    """

    FP32 = "fp32"
    BF16_SPLIT = "bf16_split"
    BF16_SPLIT_8BIT = "bf16_split_8bit"
    BF16_STOCHASTIC = "bf16_stochastic"
    BF16_8BIT = "bf16_8bit"


ONE_DEVICE = ParallelLayout()
DEFAULT_GUARD = NumericsGuard()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    model: ModelSpec
    optimizer: AdamWConfig
    deterministic: bool
    # Token budget of one micro-batch, in packed tokens; None: `planning` chooses.
    micro_batch_tokens: int | None
    # Keep the initial weights for the frozen reference (LoRA needs no copy: the adapter off).
    keep_reference: bool
    # Backend of tree attention by name; "" picks the best available.
    attention_backend: str
    # "cpu" or "cuda:N"; threads of torch on the CPU (part of the numerics fingerprint).
    device: str
    num_threads: int
    # BF16_...: for models of bfloat16 alone. None: chosen by `Trainer.create`, for those too.
    optimizer_states: OptimizerStates | None = OptimizerStates.FP32
    # Pinned host memory for activations that fit a GPU neither as they are nor run again.
    host_activation_bytes: int = 0
    # Versions from one self-check (`train.self_check`) to the next, the first at 1; 0: none.
    self_check_every: int = 0
    guard: NumericsGuard = DEFAULT_GUARD
    # Links in a model folder may lead to any place below this root; None: to no other folder.
    models_root: Path | None = None
    parallel: ParallelLayout = ONE_DEVICE
    # Nodes each of which has the weights that its ranks share; 0: not chosen, or none are shared.
    num_nodes: int = 0
    # Policies with an adapter that one model on a device is to have room for, this one among them.
    max_tenants: int = 1
    # Which rollouts are kept on disk, and how many bytes of them.
    keep_rollouts: KeepRollouts = KeepRollouts.NONE
    keep_rollouts_bytes: int = 0
    # Whether versions have the adapter merged into the whole model.
    publishes_merged: bool = False
    # Whether each version is compared with the one before as it is copied, for a delta.
    compares_versions: bool = False

    @property
    def host_key(self) -> str:
        """What policies must have in common to be tenants of one model, as text.

        "": this one shares none. It trains all weights, has several devices, or is to be alone.
        Optimizer, loss, plan and the seed of the adapter are a tenant's own.
        """
        model, has_adapter = self.model, isinstance(self.model.tuning, LoraTuning)
        if not has_adapter or self.num_workers > 1 or self.max_tenants == 1:
            return ""
        # A preset's weights depend on the seed.
        seed = model.seed if isinstance(model.base, PresetBase) else None
        process = self.device, self.num_threads, self.deterministic
        memory = self.host_activation_bytes, self.max_tenants
        kind = model.base, model.tuning, model.value_head, model.dtype, seed, self.attention_backend
        published = self.publishes_merged, self.compares_versions
        return repr((*kind, *published, *process, *memory))

    @property
    def num_workers(self) -> int:
        return self.parallel.num_workers

    @property
    def shard(self) -> Shard:
        """The layout's shard, which the spec names by now; a single device shards nothing."""
        if self.num_workers == 1:
            return Shard.STATES
        assert self.parallel.shard is not None
        return self.parallel.shard

    @property
    def kept_states(self) -> OptimizerStates:
        """The kind of optimizer states, once it is chosen."""
        assert self.optimizer_states is not None
        return self.optimizer_states


def no_progress(done: int, planned: int, tokens: int) -> None:
    """Progress that nobody follows."""


def never_cancelled() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHooks:
    """What a pass calls between micro-batches.

    Attributes:
        on_progress: Called with (micro-batches done, planned, replicated tokens done).
        is_cancelled: Asked whether to stop: the pass then raises CANCELLED.
    """

    on_progress: Callable[[int, int, int], None] = no_progress
    is_cancelled: Callable[[], bool] = never_cancelled


NO_HOOKS = PassHooks()
