"""Weight manifests to the wire.

Enters `WeightManifest`, leaves its message. Invariant: files keep their order.
"""

from __future__ import annotations

from ratoon.api.convert.enums import to_wire
from ratoon.api.convert.times import set_time
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.v1 import weights_pb2 as wire


def manifest_message(manifest: WeightManifest) -> wire.WeightManifest:
    message = wire.WeightManifest(
        policy_id=manifest.policy_id,
        version=manifest.version,
        kind=to_wire(wire.WeightKind, manifest.kind),
        files=[
            wire.WeightFile(name=file.name, size_bytes=file.size_bytes, digest=file.digest)
            for file in manifest.files
        ],
    )
    set_time(message.created_at, manifest.created_at)
    return message
