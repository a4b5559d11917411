"""Lists the kernel backends of the workers' device.

The call imports torch, so it is made in a process of its own.
"""

from __future__ import annotations

from ratoon_proto.types import BackendInfo


def list_backends() -> tuple[BackendInfo, ...]:
    """All backends of all ops, as seen by this process."""
    from ratoon_kernels import registry

    return tuple(
        BackendInfo(
            op=backend.op,
            name=backend.name,
            available=backend.is_available,
            unavailable_reason=backend.reason,
        )
        for backend in registry.list_backends()
    )
