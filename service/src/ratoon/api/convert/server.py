"""What the server is, to the wire.

Enters the limits and the workers' backends, leaves `ServerInfo`. Invariant: versions are those
of the installed distributions, read without importing them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

from ratoon.api.ports import Backend
from ratoon.config import LimitsConfig
from ratoon.model.spec import PRESET_NAMES
from ratoon_proto.v1 import service_pb2 as wire

API_VERSION = "v1"
_LIBRARIES = ("ratoon", "ray", "torch", "transformers", "numpy", "grpcio", "fastapi")


def server_info(
    limits: LimitsConfig, *, device: str, backends: Iterable[Backend]
) -> wire.ServerInfo:
    versions = {name: version(name) for name in _LIBRARIES}
    return wire.ServerInfo(
        version=versions["ratoon"],
        api_version=API_VERSION,
        device=device,
        backends=[
            wire.BackendInfo(
                op=backend.op,
                name=backend.name,
                available=backend.available,
                unavailable_reason=backend.unavailable_reason,
            )
            for backend in backends
        ],
        presets=PRESET_NAMES,
        limits=wire.ServerLimits(
            max_body_bytes=limits.max_body_bytes,
            max_fetch_bytes=limits.max_fetch_bytes,
            max_groups=limits.max_groups,
            max_sequences=limits.max_sequences,
            max_tokens=limits.max_tokens,
            max_wait_s=limits.max_wait_s,
        ),
        library_versions={"python": platform.python_version(), **versions},
    )
