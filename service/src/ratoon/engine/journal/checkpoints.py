"""Checkpoints as the journal knows them: callers' own and automatic ones. Pure.

Enters `CheckpointInfo`, leaves rows and what they cover. Invariant: an id that starts with
`AUTOMATIC_PREFIX` is no caller's: such checkpoints are made for recovery and deleted when it needs
them no more; a caller's checkpoint is never deleted while its policy lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.engine.types import CheckpointInfo
from ratoon.errors import invalid

AUTOMATIC_PREFIX = "auto-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`weights_digest`: of the state that is in it; "": not known."""

    info: CheckpointInfo
    weights_digest: str

    @property
    def is_automatic(self) -> bool:
        return self.info.checkpoint_id.startswith(AUTOMATIC_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What a checkpoint made superfluous: bodies as (operation id, digest), checkpoints by id."""

    bodies: tuple[tuple[str, str], ...]
    checkpoint_ids: tuple[str, ...]


def automatic_id(seq: int, token: int) -> str:
    """Of the automatic checkpoint at `seq` that the controller of a fencing token takes.

    No two controllers make one of the same name, so that none takes away another's.
    """
    return f"{AUTOMATIC_PREFIX}{seq}-{token}"


def check_own_id(checkpoint_id: str) -> None:
    """Refuse an id that callers may not use. Raises INVALID_ARGUMENT."""
    if checkpoint_id.startswith(AUTOMATIC_PREFIX):
        raise invalid("checkpoint_id", checkpoint_id, f"a name without {AUTOMATIC_PREFIX} in front")


def kept_checkpoints(checkpoints: tuple[Checkpoint, ...], keep: int) -> tuple[Checkpoint, ...]:
    """The newest `keep` of all, given by seq: those that recovery may begin at."""
    assert keep >= 1
    return checkpoints[-keep:]


def first_uncovered_seq(checkpoints: tuple[Checkpoint, ...], keep: int) -> int:
    """The lowest seq that recovery may run again from one of the newest `keep`, given by seq.

    Where there are fewer it may begin at the initial weights: nothing is covered.
    """
    if len(checkpoints) < keep:
        return 1
    return min(c.info.replay_from_seq for c in kept_checkpoints(checkpoints, keep))
