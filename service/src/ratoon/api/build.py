"""The service of one process, from its config.

Enters the config, leaves a `PolicyService` that reaches the engine through Ray. Invariant:
importing this brings in no torch, whatever process it is in.
"""

from __future__ import annotations

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.service import PolicyService
from ratoon.config import RatoonConfig
from ratoon.engine.client import EngineClient


def build_service(config: RatoonConfig) -> PolicyService:
    """Ray must be connected, and the engine started (`engine.bootstrap`)."""
    return PolicyService(
        engine=EngineClient(config),
        limits=config.limits,
        defaults=SpecDefaults(
            models_root=config.models_root.absolute(),
            micro_batch_tokens=config.worker.micro_batch_tokens,
        ),
        device=config.worker.device,
    )
