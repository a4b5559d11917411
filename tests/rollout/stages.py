"""What tests ask of stages beside what the service does."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.rollout.packed import Stage


def num_ancestors(stages: Sequence[Stage]) -> list[int]:
    """How many prefixes stay while each stage is run."""
    depths: list[int] = []
    for stage in stages:
        depths.append(0 if stage.parent < 0 else depths[stage.parent] + 1)
    return depths
