"""What the coordinator asks of whoever runs the processes of policies."""

from __future__ import annotations

from typing import Protocol

from ratoon.engine.types import PolicySpec


class Fleet(Protocol):
    """The processes of policies."""

    async def check(self, spec: PolicySpec) -> None:
        """Raises UNSUPPORTED, and RESOURCE_EXHAUSTED with what is wanted and free."""
        ...

    async def start(self, spec: PolicySpec) -> None:
        """Bring the policy's controller and worker up, where they are not; it is ready then.

        Raises `RatoonError` where the model cannot be loaded.
        """
        ...

    async def stop(self, policy_id: str) -> None:
        """End the policy's processes, those that are there."""
        ...

    async def release(self, policy_id: str) -> None:
        """End the policy's worker, if there is one, and give back what it holds."""
        ...

    async def drain(self, policy_id: str, grace_s: float) -> None:
        """Let what the policy runs end within `grace_s` seconds, and begin nothing more."""
        ...
