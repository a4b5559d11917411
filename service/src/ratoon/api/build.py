"""The service of one process, from its config.

Enters the config, leaves a `PolicyService` that reaches the engine through Ray. Invariant:
importing this brings in no torch, whatever process it is in.
"""

from __future__ import annotations

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.service import PolicyService
from ratoon.config import RatoonConfig
from ratoon.engine.cluster.remote import connect


async def build_service(config: RatoonConfig) -> PolicyService:
    """Ray must be connected. Raises UNAVAILABLE where no engine runs (`engine.bootstrap`)."""
    return PolicyService(
        engine=await connect(config.ray.namespace),
        limits=config.limits,
        defaults=SpecDefaults(
            models_root=config.models_folder,
            micro_batch_tokens=config.worker.micro_batch_tokens,
        ),
        device=config.worker.device,
    )
