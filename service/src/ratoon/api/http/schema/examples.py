"""Examples of request bodies for the OpenAPI document, by the name of their message."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SPEC = {
    "policy_id": "tiny-grpo",
    "preset": "tiny",
    "full": {},
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01},
    "dtype": "float32",
    "seed": 7,
    "sequencing": "client",
}
_GROUPS = [
    {
        "group_id": "question-1",
        "prompt": [81, 58, 32, 50, 43, 50],
        "rollouts": [
            {"response": [52], "sampler_logprobs": [-0.25], "reward": 1.0},
            {"response": [53], "sampler_logprobs": [-2.5], "reward": 0.0},
        ],
    }
]
_BATCH = {"groups": _GROUPS}

EXAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "PolicySpec": _SPEC,
        "CreatePolicyRequest": {"spec": _SPEC},
        "RolloutGroup": _GROUPS[0],
        "UploadPartRequest": _BATCH,
        "UpdateRequest": {
            "seq": 1,
            "batch": _BATCH,
            "loss": {"kind": "grpo"},
            "optim": {"learning_rate": 1e-5, "max_grad_norm": 1.0},
        },
        "ForwardBackwardRequest": {"seq": 1, "batch": _BATCH, "loss": {"kind": "ppo_clip"}},
        "OptimStepRequest": {"seq": 2, "optim": {"learning_rate": 1e-5}},
        "DiscardGradientsRequest": {"seq": 3},
        "ForwardRequest": {"batch": _BATCH, "with_entropy": True},
        "SaveCheckpointRequest": {"seq": 4, "checkpoint_id": "after-warmup"},
        "LoadCheckpointRequest": {"seq": 5},
        "ImportWeightsRequest": {
            "seq": 6,
            "model_folder": "outer-step-12",
            "mode": "full",
            "expected_version": 12,
        },
    }
)
