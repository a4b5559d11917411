"""Requests of the tests, as messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import policy_pb2, rollout_pb2, service_pb2, training_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor

POLICY = "tiny-1"


def tokens(values: Sequence[int]) -> Tensor:
    return encode_array(np.array(values, np.int32))


def floats(values: Sequence[float]) -> Tensor:
    return encode_array(np.array(values, np.float32))


def rollout(response: Sequence[int], reward: float = 1.0) -> rollout_pb2.Rollout:
    return rollout_pb2.Rollout(
        response=tokens(response),
        sampler_logprobs=floats([-0.5 - 0.25 * index for index in range(len(response))]),
        reward=reward,
    )


def group(name: str, *rollouts: rollout_pb2.Rollout) -> rollout_pb2.RolloutGroup:
    return rollout_pb2.RolloutGroup(group_id=name, prompt=tokens([1, 2, 3]), rollouts=rollouts)


def groups(count: int = 2) -> list[rollout_pb2.RolloutGroup]:
    return [
        group(f"group-{index}", rollout([4, 5 + index], 1.0), rollout([6], 0.0))
        for index in range(count)
    ]


def spec(policy_id: str = POLICY, **changes: object) -> policy_pb2.PolicySpec:
    message = policy_pb2.PolicySpec(policy_id=policy_id, preset="tiny")
    for name, value in changes.items():
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def forward_backward(seq: int = 1) -> service_pb2.ForwardBackwardRequest:
    whole = update(seq)
    return service_pb2.ForwardBackwardRequest(
        policy_id=POLICY, key=whole.key, batch=whole.batch, loss=whole.loss
    )


def update(
    seq: int = 1,
    batch: Sequence[rollout_pb2.RolloutGroup] | None = None,
    policy_id: str = POLICY,
) -> service_pb2.UpdateRequest:
    return service_pb2.UpdateRequest(
        policy_id=policy_id,
        key=service_pb2.OperationKey(seq=seq),
        batch=rollout_pb2.RolloutBatch(groups=groups() if batch is None else batch),
        loss=training_pb2.LossConfig(kind=training_pb2.LOSS_KIND_GRPO),
        optim=training_pb2.OptimStepConfig(learning_rate=1e-3),
    )
