"""Real grouped rollouts, recorded from published runs, as JSON lines outside the repository.

In: a file of `../shared/data`. Out: its groups in file order. Invariant: nothing of ours is
imported here, so that oracles may use it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """A turn of a conversation; those of the role `assistant` are trained."""

    role: str
    text: str

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant"

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The UTF-8 bytes of the text, int32 [length]."""
        return np.frombuffer(self.text.encode(), np.uint8).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """One solution or conversation and its reward."""

    reward: float
    segments: tuple[RecordedSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """The rollouts of one problem or task."""

    group_id: str
    rollouts: tuple[RecordedRollout, ...]


def read_groups(path: Path) -> tuple[RecordedGroup, ...]:
    """The groups of one file; raises OSError where it is missing."""
    with path.open(encoding="utf-8") as lines:
        return tuple(_group(json.loads(line)) for line in lines)


def _group(record: dict[str, Any]) -> RecordedGroup:
    rollouts = tuple(
        RecordedRollout(
            reward=rollout["reward"],
            segments=tuple(RecordedSegment(**segment) for segment in rollout["segments"]),
        )
        for rollout in record["rollouts"]
    )
    return RecordedGroup(group_id=record["group_id"], rollouts=rollouts)
