"""Checkpoints as the journal records them: callers' own and automatic ones. Pure.

Ids that start with `AUTOMATIC_PREFIX` are refused to callers. Automatic checkpoints are deleted
once recovery no longer needs them; a caller's lives as long as its policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.engine.types import CheckpointInfo
from ratoon.errors import invalid

AUTOMATIC_PREFIX = "auto-"
# `replay_from_seq` of a checkpoint past which its policy was rolled back.
NO_RECOVERY = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`weights_digest`: of the saved state; "": not known."""

    info: CheckpointInfo
    weights_digest: str

    @property
    def is_automatic(self) -> bool:
        return self.info.checkpoint_id.startswith(AUTOMATIC_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """Files that a checkpoint made superfluous: bodies (operation id, digest), checkpoints by id.

    `position`: the policy's, by which files are deleted that an earlier journal would still need.
    """

    bodies: tuple[tuple[str, str], ...]
    checkpoint_ids: tuple[str, ...]
    position: int


def automatic_id(seq: int, token: int) -> str:
    """Id of the automatic checkpoint at `seq` by the controller with this fencing token.

    The token makes it unique, so no controller deletes another's checkpoint.
    """
    return f"{AUTOMATIC_PREFIX}{seq}-{token}"


def check_own_id(checkpoint_id: str) -> None:
    """Raises INVALID_ARGUMENT for an id that callers may not use."""
    if checkpoint_id.startswith(AUTOMATIC_PREFIX):
        raise invalid("checkpoint_id", checkpoint_id, f"a name without {AUTOMATIC_PREFIX} in front")


def kept_checkpoints(checkpoints: tuple[Checkpoint, ...], keep: int) -> tuple[Checkpoint, ...]:
    """The newest `keep` of `checkpoints`, which are in seq order: recovery may begin at these."""
    assert keep >= 1
    return checkpoints[-keep:]


def first_uncovered_seq(checkpoints: tuple[Checkpoint, ...], keep: int) -> int:
    """The lowest seq that a recovery from the newest `keep` checkpoints (in seq order) may replay.

    With fewer checkpoints it may begin at the initial weights, so nothing is covered.
    """
    if len(checkpoints) < keep:
        return 1
    return min(c.info.replay_from_seq for c in kept_checkpoints(checkpoints, keep))
