"""A version's weights as a list of files with digests, written last: its files are complete."""

from __future__ import annotations

from dataclasses import dataclass

from ratoon_proto.types import (
    WeightDelta,
    WeightFile,
    WeightKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """The state that a version's weights are of: after which operation, and its digest.

    `seq` 0: of no operation. `state_digest` "": the policy takes no digests.
    """

    seq: int = 0
    state_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Time in seconds since the epoch.

    `changed_share` is of the values of the newest version before; None: not compared. `made_by` is
    for the service that published the version; readers do not get it.
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
