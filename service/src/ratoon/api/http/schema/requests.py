"""The request bodies of sequenced calls, `service.proto` as JSON.

Invariant: field for field the messages of the same names, but that `policy_id` and other ids in the
path are not in the body, and that the key is two plain fields, `seq` and `request_id`.
"""

from __future__ import annotations

from typing import ClassVar

from ratoon.api.http.schema.base import Bool, Int64, Text, WireModel, example
from ratoon.api.http.schema.rollout import EXAMPLE_GROUPS, RolloutBatch, UploadedBatch
from ratoon.api.http.schema.training import LossConfig, OptimStepConfig

KEY = {"seq": ("key", "seq"), "request_id": ("key", "request_id")}


class UpdateRequest(WireModel):
    """`batch` or `upload`; `seq` or `request_id`, by the policy's sequencing."""

    flattened: ClassVar = KEY
    model_config = example(
        {
            "seq": 1,
            "batch": {"groups": EXAMPLE_GROUPS},
            "loss": {"kind": "grpo"},
            "optim": {"learning_rate": 1e-5, "max_grad_norm": 1.0},
        }
    )

    seq: Int64 | None = None
    request_id: Text | None = None
    batch: RolloutBatch | None = None
    upload: UploadedBatch | None = None
    loss: LossConfig
    optim: OptimStepConfig
    expected_version: Int64 | None = None


class ForwardBackwardRequest(WireModel):
    flattened: ClassVar = KEY
    model_config = example(
        {"seq": 1, "batch": {"groups": EXAMPLE_GROUPS}, "loss": {"kind": "ppo_clip"}}
    )

    seq: Int64 | None = None
    request_id: Text | None = None
    batch: RolloutBatch | None = None
    upload: UploadedBatch | None = None
    loss: LossConfig
    expected_version: Int64 | None = None


class OptimStepRequest(WireModel):
    flattened: ClassVar = KEY
    model_config = example({"seq": 2, "optim": {"learning_rate": 1e-5}})

    seq: Int64 | None = None
    request_id: Text | None = None
    optim: OptimStepConfig
    expected_version: Int64 | None = None
    include_seqs: list[Int64] | None = None


class DiscardGradientsRequest(WireModel):
    flattened: ClassVar = KEY
    model_config = example({"seq": 3})

    seq: Int64 | None = None
    request_id: Text | None = None


class ForwardRequest(WireModel):
    """Without a key it is not sequenced: it reads the newest version."""

    flattened: ClassVar = KEY
    model_config = example({"batch": {"groups": EXAMPLE_GROUPS}, "with_entropy": True})

    seq: Int64 | None = None
    request_id: Text | None = None
    batch: RolloutBatch | None = None
    upload: UploadedBatch | None = None
    with_entropy: Bool = False
    use_reference: Bool = False
    expected_version: Int64 | None = None


class SaveCheckpointRequest(WireModel):
    flattened: ClassVar = KEY
    model_config = example({"seq": 4, "checkpoint_id": "after-warmup"})

    seq: Int64 | None = None
    request_id: Text | None = None
    checkpoint_id: Text | None = None


class LoadCheckpointRequest(WireModel):
    flattened: ClassVar = KEY
    model_config = example({"seq": 5})

    seq: Int64 | None = None
    request_id: Text | None = None
