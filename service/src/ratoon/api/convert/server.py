"""Server information for the wire. Versions are those of the installed distributions."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from google.protobuf.message import Message

from ratoon.config import LimitsConfig
from ratoon.engine.worker.backends import BackendInfo
from ratoon.model.spec import PRESET_NAMES
from ratoon_proto.v1 import service_pb2 as wire

API_VERSION = "v1"
_LIBRARIES = ("ratoon", "ray", "torch", "transformers", "numpy", "grpcio", "fastapi")


def server_info(
    limits: LimitsConfig, *, device: str, backends: Iterable[BackendInfo]
) -> wire.ServerInfo:
    versions = {name: version(name) for name in _LIBRARIES}
    return wire.ServerInfo(
        version=versions["ratoon"],
        api_version=API_VERSION,
        device=device,
        backends=[wire.BackendInfo(**_named(wire.BackendInfo, backend)) for backend in backends],
        presets=PRESET_NAMES,
        limits=wire.ServerLimits(**_named(wire.ServerLimits, limits)),
        library_versions={"python": platform.python_version(), **versions},
    )


def _named(message: type[Message], source: object) -> dict[str, Any]:
    """The attributes of `source` that a message has fields for."""
    return {name: getattr(source, name) for name in message.DESCRIPTOR.fields_by_name}
