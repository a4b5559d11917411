"""What a trainer is built from: the policy's spec and the server's settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratoon.model.spec import ModelSpec
from ratoon.train.config import DEFAULT_GUARD, ONE_DEVICE, OptimizerStates
from ratoon_proto.types import AdamWConfig, NumericsGuard, ParallelLayout, Shard


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
    # A self-check (`train.self_check`) at every version that this divides; 0: never.
    self_check_every: int = 0
    guard: NumericsGuard = DEFAULT_GUARD
    # Links in a model folder may lead to any place below this root; None: to no other folder.
    models_root: Path | None = None
    parallel: ParallelLayout = ONE_DEVICE

    @property
    def num_workers(self) -> int:
        return self.parallel.num_workers

    @property
    def shard(self) -> Shard:
        """Of a spec that says it, or of one device, which shards nothing."""
        if self.num_workers == 1:
            return Shard.STATES
        assert self.parallel.shard is not None
        return self.parallel.shard

    @property
    def kept_states(self) -> OptimizerStates:
        """Of a spec whose states are chosen."""
        assert self.optimizer_states is not None
        return self.optimizer_states
