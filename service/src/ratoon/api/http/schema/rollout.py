"""`rollout.proto` as JSON. Invariant: field for field the messages of the same names."""

from __future__ import annotations

from typing import ClassVar

from ratoon.api.http.schema.base import (
    Bool,
    Each,
    Flags,
    Float,
    Int32,
    Int64,
    Text,
    Tokens,
    Values,
    WireModel,
    example,
)
from ratoon.rollout.raw import SamplerLogprobsKind

EXAMPLE_GROUPS = [
    {
        "group_id": "question-1",
        "prompt": [81, 58, 32, 50, 43, 50],
        "rollouts": [
            {"response": [52], "sampler_logprobs": [-0.25], "reward": 1.0},
            {"response": [53], "sampler_logprobs": [-2.5], "reward": 0.0},
        ],
    }
]


class Segment(WireModel):
    tokens: Tokens
    trained: Bool = False


class Rollout(WireModel):
    """`response` or `segments`; `reward` or `advantages` where the loss needs advantages."""

    flattened: ClassVar = {"segments": ("segments", "segments")}

    response: Tokens | None = None
    segments: Each[Segment] | None = None
    loss_mask: Flags | None = None
    sampler_logprobs: Values | None = None
    old_logprobs: Values | None = None
    reference_logprobs: Values | None = None
    reward: Float | None = None
    advantages: Values | None = None
    token_weights: Values | None = None
    temperature: Float | None = None
    sampler_logprobs_kind: SamplerLogprobsKind | None = None
    top_p: Float | None = None
    top_k: Int32 | None = None
    policy_version: Int64 | None = None
    truncated: Bool = False


class RolloutGroup(WireModel):
    model_config = example(EXAMPLE_GROUPS[0])

    group_id: Text
    prompt: Tokens | None = None
    rollouts: Each[Rollout] | None = None


class RolloutBatch(WireModel):
    groups: Each[RolloutGroup]


class UploadedBatch(WireModel):
    upload_id: Text
    num_parts: Int32


class UploadPartRequest(WireModel):
    model_config = example({"groups": EXAMPLE_GROUPS})

    groups: Each[RolloutGroup]


class UploadPartResponse(WireModel):
    num_bytes: int
