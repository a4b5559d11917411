"""Server information for the wire. Versions are those of the installed distributions."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

from ratoon.api.convert.records import write
from ratoon.config import LimitsConfig
from ratoon.model.spec import PRESET_NAMES
from ratoon_proto.types import BackendInfo
from ratoon_proto.v1 import service_pb2 as wire

API_VERSION = "v1"
_LIBRARIES = ("ratoon", "ray", "torch", "transformers", "numpy", "grpcio", "fastapi")


def server_info(
    limits: LimitsConfig, *, device: str, backends: Iterable[BackendInfo]
) -> wire.ServerInfo:
    versions = {name: version(name) for name in _LIBRARIES}
    taken = {name: getattr(limits, name) for name in wire.ServerLimits.DESCRIPTOR.fields_by_name}
    info = {
        "version": versions["ratoon"],
        "api_version": API_VERSION,
        "device": device,
        "backends": backends,
        "presets": PRESET_NAMES,
        "limits": taken,
        "library_versions": {"python": platform.python_version(), **versions},
    }
    return write(wire.ServerInfo(), info)
