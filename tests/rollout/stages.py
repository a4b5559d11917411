"""What tests ask of stages beside what the service does."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.planner.stage_plan import HeldTokens, StreamTokens
from ratoon.planner.waves import peak_tokens, resident_tokens
from ratoon.rollout.packed import Stage


def num_ancestors(stages: Sequence[Stage]) -> list[int]:
    """How many prefixes stay while each stage is run."""
    depths: list[int] = []
    for stage in stages:
        depths.append(0 if stage.parent < 0 else depths[stage.parent] + 1)
    return depths


def held_tokens(stages: Sequence[Stage], states: int = 0) -> list[HeldTokens]:
    """What each stage says of itself; `states`: those of nodes that are held for later stages."""
    resident, parents = resident_tokens(stages), {stage.parent for stage in stages}
    stream = StreamTokens(held=peak_tokens(stages), waiting=max(resident), states=states)
    return [
        HeldTokens(tokens=stage.num_tokens, above=above, waits=index in parents, stream=stream)
        for index, (stage, above) in enumerate(zip(stages, resident, strict=True))
    ]
