"""The part of the config that the engine's processes get, with every path absolute."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ratoon.config import CheckpointConfig, LimitsConfig, RatoonConfig
from ratoon.engine.crash_points import FOLDER_NAME
from ratoon.engine.files.paths import PolicyPaths, policy_paths
from ratoon.train.spec import OptimizerStates

ENGINE_NAME = "ratoon-engine"
SAMPLER_NAME = "ratoon-sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`device` is "auto", "cpu" or "cuda"; `num_threads` 0: the machine's cores."""

    namespace: str
    data_root: Path
    # Published weights; None: with the policy's other files.
    weights_root: Path | None
    models_root: Path
    # May hold a password.
    database_url: str = field(repr=False)
    # "": only the local disk.
    storage_url: str
    log_level: str
    limits: LimitsConfig
    checkpoints: CheckpointConfig
    device: str
    num_threads: int
    # Optimizer states of bfloat16 policies; None: chosen to fit when the model is loaded.
    optimizer_states: OptimizerStates | None
    host_activation_bytes: int
    self_check_every: int
    max_tenants: int
    max_silence_s: float
    # Crash points (tests only); None: off.
    crash_points: Path | None

    @classmethod
    def from_config(cls, config: RatoonConfig) -> EngineSettings:
        data_root, states = config.data_root.absolute(), config.worker.optimizer_states
        return cls(
            namespace=config.ray.namespace,
            data_root=data_root,
            weights_root=config.weights_root and config.weights_root.absolute(),
            models_root=config.models_folder,
            database_url=config.database_url or f"sqlite:///{data_root / 'ratoon.sqlite'}",
            storage_url=config.storage_url,
            log_level=config.log_level,
            limits=config.limits,
            checkpoints=config.checkpoints,
            device=config.worker.device,
            num_threads=config.worker.num_threads,
            optimizer_states=None if states == "auto" else OptimizerStates(states),
            host_activation_bytes=config.worker.host_activation_bytes,
            self_check_every=config.worker.self_check_every,
            max_tenants=config.worker.max_tenants,
            max_silence_s=config.worker.max_silence_s,
            crash_points=data_root / FOLDER_NAME if config.crash_points else None,
        )

    @property
    def compiled(self) -> Path:
        """Compiled kernels of all policies, kept between starts."""
        return self.data_root / "compiled"

    def paths(self, policy_id: str) -> PolicyPaths:
        """Raises INVALID_ARGUMENT for an id that is no plain name."""
        return policy_paths(self.data_root, policy_id, self.weights_root, self.models_root)
