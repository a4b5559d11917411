"""A version's weights as a list of files with digests, written last: its files are complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ratoon_proto.types import WeightDelta, WeightFile, WeightKind

MANIFEST_FORMAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """Origin of a version's weights: the operation after which they were taken, and the state's
    digest.

    `seq` 0: no operation. `state_digest` "": the policy takes no digests.
    """

    seq: int = 0
    state_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Time in seconds since the epoch.

    `changed_share` is relative to the previous newest version; None: not compared. `made_by` is for
    the service that published the version; readers do not get it.
    """

    policy_id: str
    version: int
    kind: WeightKind
    files: tuple[WeightFile, ...]
    created_at: float
    deltas: tuple[WeightDelta, ...] = ()
    changed_share: float | None = None
    made_by: MadeBy = MadeBy()

    @property
    def fetchable(self) -> tuple[WeightFile, ...]:
        """The files of the version and of its deltas."""
        return (*self.files, *(delta.file for delta in self.deltas))


def to_document(manifest: WeightManifest) -> dict[str, Any]:
    """Returns the manifest as JSON objects."""
    return {"format": MANIFEST_FORMAT, **asdict(manifest), "kind": manifest.kind.value}


def from_document(document: Mapping[str, Any]) -> WeightManifest:
    """Reads what `to_document` wrote. Raises ValueError, KeyError or TypeError for all else."""
    if document["format"] != MANIFEST_FORMAT:
        raise ValueError(f"format {document['format']}, expected {MANIFEST_FORMAT}")
    share = document["changed_share"]
    return WeightManifest(
        policy_id=str(document["policy_id"]),
        version=int(document["version"]),
        kind=WeightKind(document["kind"]),
        files=tuple(map(read_file, document["files"])),
        created_at=float(document["created_at"]),
        deltas=tuple(
            WeightDelta(parent_version=int(delta["parent_version"]), file=read_file(delta["file"]))
            for delta in document["deltas"]
        ),
        changed_share=None if share is None else float(share),
        made_by=MadeBy(
            seq=int(document["made_by"]["seq"]),
            state_digest=str(document["made_by"]["state_digest"]),
        ),
    )


def read_file(file: Mapping[str, Any]) -> WeightFile:
    """Reads a file of a document. Raises what `from_document` raises."""
    return WeightFile(
        name=str(file["name"]), size_bytes=int(file["size_bytes"]), digest=str(file["digest"])
    )
