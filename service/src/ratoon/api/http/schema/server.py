"""What the server says of itself and of weights, as JSON: the messages of those names."""

from __future__ import annotations

from datetime import datetime

from ratoon.api.http.schema.base import WireModel
from ratoon.api.http.schema.operation import CheckpointInfo
from ratoon.stream.manifest import WeightKind


class WeightFile(WireModel):
    name: str
    size_bytes: int
    digest: str


class WeightManifest(WireModel):
    policy_id: str
    version: int
    kind: WeightKind
    files: list[WeightFile]
    created_at: datetime


class ListCheckpointsResponse(WireModel):
    checkpoints: list[CheckpointInfo]


class ServerLimits(WireModel):
    max_body_bytes: int
    max_fetch_bytes: int
    max_groups: int
    max_sequences: int
    max_tokens: int
    max_wait_s: float


class BackendInfo(WireModel):
    op: str
    name: str
    available: bool
    unavailable_reason: str


class ServerInfo(WireModel):
    version: str
    api_version: str
    device: str
    backends: list[BackendInfo]
    presets: list[str]
    limits: ServerLimits
    library_versions: dict[str, str]


class HealthResponse(WireModel):
    status: str
