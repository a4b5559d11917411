"""Whether a manifest is safe to write to disk: names of one path component, digests that may be
file names.
"""

from __future__ import annotations

import re

from ratoon_client.errors import IntegrityError
from ratoon_proto.types import WeightManifest

# Ours, beside a version's files.
MANIFEST_NAME = ".ratoon-manifest.json"
_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,255}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def is_plain_name(name: str) -> bool:
    """Whether it is one path component, and neither `.` nor `..`."""
    return _NAME.fullmatch(name) is not None


def check_manifest(manifest: WeightManifest, *, policy_id: str, version: int | None) -> None:
    """Raises IntegrityError naming the file at fault."""
    if manifest.policy_id != policy_id or version not in (None, manifest.version):
        raise IntegrityError(
            f"asked for {policy_id} version {version}, got {manifest.policy_id!r:.80} version"
            f" {manifest.version}"
        )
    if manifest.version < 0 or not manifest.files:
        raise IntegrityError(f"{policy_id}: version {manifest.version} names no files")
    names: set[str] = set()
    for file in (*manifest.files, *(delta.file for delta in manifest.deltas)):
        if not is_plain_name(file.name) or file.name == MANIFEST_NAME:
            raise IntegrityError(f"{policy_id}: {file.name!r:.80} is no name of a weight file")
        if file.name in names:
            raise IntegrityError(f"{policy_id}: the manifest names {file.name} twice")
        if _DIGEST.fullmatch(file.digest) is None or file.size_bytes < 0:
            raise IntegrityError(f"{policy_id}: {file.name} has no valid digest or size")
        names.add(file.name)
