"""Groups as the caller sent them: decoded by a wire, checked for nothing but numpy's dtype kind.

`validate` makes a `RolloutBatch` of them or names what is wrong with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class SamplerLogprobsKind(StrEnum):
    """Sampler log-probs were taken after (`processed`) or before (`raw`) the temperature."""

    UNSPECIFIED = "unspecified"
    PROCESSED = "processed"
    RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSegment:
    """A run of tokens, int [length]; not trained: context."""

    tokens: NDArray[np.integer]
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRollout:
    """One rollout; `None`: the caller left it out. Arrays have one value a response token."""

    segments: tuple[RawSegment, ...]
    loss_mask: NDArray[np.generic] | None
    sampler_logprobs: NDArray[np.floating] | None
    old_logprobs: NDArray[np.floating] | None
    reference_logprobs: NDArray[np.floating] | None
    reward: float | None
    advantages: NDArray[np.floating] | None
    token_weights: NDArray[np.floating] | None
    temperature: float
    sampler_logprobs_kind: SamplerLogprobsKind
    top_p: float | None
    top_k: int | None
    policy_version: int | None
    truncated: bool
    # (first response token, version) of each span, in order; none: `policy_version` alone.
    version_spans: tuple[tuple[int, int], ...] = ()
    # [tokens, layers with experts, experts per token], from that token of the rollout's on.
    routed_experts: NDArray[np.generic] | None = None
    routed_experts_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGroup:
    """Rollouts of one prompt, int [P]."""

    group_id: str
    prompt: NDArray[np.integer]
    rollouts: tuple[RawRollout, ...]
