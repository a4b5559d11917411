"""Builds a process's service from its config.

Importing this must not import torch, whatever the process.
"""

from __future__ import annotations

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.service import PolicyService
from ratoon.cluster.engine_actor import connect
from ratoon.config import RatoonConfig


async def build_service(config: RatoonConfig) -> PolicyService:
    """A service that reaches the engine through Ray, which must be connected.

    Raises UNAVAILABLE where no engine runs (`engine.bootstrap`).
    """
    return PolicyService(
        engine=await connect(config.ray.namespace),
        limits=config.limits,
        defaults=SpecDefaults(
            models_root=config.models_folder,
            micro_batch_tokens=config.worker.micro_batch_tokens,
        ),
        device=config.worker.device,
    )
