"""Inputs that are right: what honest peers send, for all wires and files.

In: nothing, and recorded rollouts where they are. Out: messages, JSON and bytes. Invariant: every
target takes its corpus without an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ratoon.rollout.serial import batch_to_bytes
from ratoon_client.wire import group_messages
from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import operation_pb2, policy_pb2, rollout_pb2, service_pb2, training_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor
from tests import builders
from tests.api import requests
from tests.api.wires import request_json
from tests.network.samples import batch
from tests.recorded import DATA, read_groups

_RECORDED = DATA / "gsm8k_rollouts.jsonl"
_MOST_TOKENS = 400


def tensors() -> list[Tensor]:
    arrays: list[Any] = [
        np.arange(6, dtype=np.int32),
        np.ones((2, 3), np.float32),
        np.array([True, False]),
        np.zeros((0, 4), np.int64),
        np.array(1.5),
        np.arange(3, dtype=np.uint8),
        np.ones(2, np.float16),
    ]
    return [encode_array(array) for array in arrays]


def updates() -> list[service_pb2.UpdateRequest]:
    """Plain, with something in most fields, from the client, and recorded."""
    return [requests.update(), _rich(), _from_client(), *_recorded()]


def _rich() -> service_pb2.UpdateRequest:
    segments = [
        rollout_pb2.Segment(tokens=requests.tokens([1, 2]), trained=True),
        rollout_pb2.Segment(tokens=requests.tokens([3]), trained=False),
    ]
    rollout = rollout_pb2.Rollout(
        segments=rollout_pb2.SegmentList(segments=segments),
        advantages=requests.floats([1.0, -1.0, 0.5]),
        loss_mask=encode_array(np.array([True, True, False])),
        sampler_logprobs=requests.floats([-1.0, -2.0, -0.5]),
        reference_logprobs=requests.floats([-1.0, -2.0, -0.5]),
        temperature=0.7,
        sampler_logprobs_kind=rollout_pb2.SAMPLER_LOGPROBS_KIND_PROCESSED,
        top_p=0.9,
        top_k=3,
        policy_version=1,
        sampling_mask=rollout_pb2.SamplingMask(
            token_ids=requests.tokens([5, 1, 2, 9]), lengths=requests.tokens([2, 1, 1])
        ),
    )
    request = requests.update(batch=[requests.group("rich", rollout, rollout)])
    loss = request.loss
    loss.kind = training_pb2.LOSS_KIND_DAPO
    loss.kl.kind = training_pb2.KL_KIND_K3
    loss.kl.coefficient = 0.1
    loss.kl.reference = training_pb2.REFERENCE_KIND_GIVEN
    loss.correction.mode = training_pb2.CORRECTION_MODE_TRUNCATE
    loss.correction.level = training_pb2.CORRECTION_LEVEL_TOKEN
    loss.correction.high = 2.0
    loss.old_logprobs.kind = training_pb2.OLD_LOGPROBS_KIND_ON_POLICY
    loss.overlong_filter.SetInParent()
    loss.allow_truncated_sampling = True
    return request


def _from_client() -> service_pb2.UpdateRequest:
    return requests.update(batch=group_messages(batch(2, 4)))


def _recorded() -> list[service_pb2.UpdateRequest]:
    if not _RECORDED.is_file():
        return []
    groups = builders.groups_from_jsonl(read_groups(_RECORDED)[:1], limit_tokens=_MOST_TOKENS)
    messages = [
        rollout_pb2.RolloutGroup(
            group_id=group.group_id,
            prompt=encode_array(group.prompt),
            rollouts=[
                rollout_pb2.Rollout(
                    response=encode_array(np.concatenate([part.tokens for part in raw.segments])),
                    reward=raw.reward or 0.0,
                )
                for raw in group.rollouts
            ],
        )
        for group in groups
    ]
    request = requests.update(batch=messages)
    request.loss.old_logprobs.kind = training_pb2.OLD_LOGPROBS_KIND_ON_POLICY
    return [request]


# What `from_forward` requests name: a Forward of the rollouts of `small_groups`.
FORWARD = "tiny-1.7"
_ON_POLICY = training_pb2.OldLogprobs(kind=training_pb2.OLD_LOGPROBS_KIND_ON_POLICY)
_GIVEN = training_pb2.OldLogprobs(kind=training_pb2.OLD_LOGPROBS_KIND_GIVEN)
_FROM_FORWARD = training_pb2.OldLogprobs(
    kind=training_pb2.OLD_LOGPROBS_KIND_FROM_FORWARD, forward_operation_id=FORWARD
)
_SCALED = training_pb2.OptimStepConfig(
    learning_rate=1e-3, divide_by=training_pb2.DIVIDE_BY_CONSTANT, divide_constant=3.0
)


def small_groups(outcome: str = "reward") -> list[rollout_pb2.RolloutGroup]:
    """Two rollouts of two and three tokens, with every per-token column but the outcome's; or,
    where the outcome is `teacher`, with a teacher's two likeliest tokens in its place."""
    rollouts: list[rollout_pb2.Rollout] = []
    for index, tokens in enumerate(([4, 5], [4, 6, 7])):
        column = [-1.0 - 0.25 * place - index for place in range(len(tokens))]
        rollout = rollout_pb2.Rollout(
            response=requests.tokens(tokens),
            sampler_logprobs=requests.floats(column),
            old_logprobs=requests.floats(column),
            reference_logprobs=requests.floats(column),
            temperature=1.0,
            policy_version=0,
        )
        if outcome == "reward":
            rollout.reward = 1.0 - 0.5 * index
        elif outcome == "teacher":
            likeliest = np.tile(np.array([[4, 6]], np.int32), (len(tokens), 1))
            rollout.teacher_tokens.CopyFrom(encode_array(likeliest))
            masses = np.log(np.full(likeliest.shape, 0.4, np.float32))
            rollout.teacher_logprobs.CopyFrom(encode_array(masses))
        else:
            getattr(rollout, outcome).CopyFrom(requests.floats(column))
        rollouts.append(rollout)
    return [requests.group("small", *rollouts)]


def small_losses() -> list[training_pb2.LossConfig]:
    """Every kind of loss, and every option with some kind."""
    kinds = training_pb2.LossKind.items()
    plain = [
        training_pb2.LossConfig(kind=number, old_logprobs=_ON_POLICY if "GSPO" in name else None)
        for name, number in kinds
        # No policy here has a value head.
        if number and "DISTILLATION" not in name and "VALUE" not in name
    ]
    rich = training_pb2.LossConfig(
        kind=training_pb2.LOSS_KIND_DAPO,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        old_logprobs=_GIVEN,
        kl=training_pb2.KlConfig(
            kind=training_pb2.KL_KIND_K3,
            coefficient=0.1,
            reference=training_pb2.REFERENCE_KIND_GIVEN,
            importance_weighted=True,
        ),
        entropy_coefficient=0.01,
        correction=training_pb2.RolloutCorrection(
            mode=training_pb2.CORRECTION_MODE_MASK,
            level=training_pb2.CORRECTION_LEVEL_TOKEN,
            low=0.0,
            high=1e30,
        ),
        correction_mask=training_pb2.CorrectionMask(
            level=training_pb2.CORRECTION_LEVEL_SEQUENCE, low=0.0, high=1e30
        ),
        overlong_penalty=training_pb2.OverlongPenalty(max_tokens=3, buffer_tokens=1, scale=1.0),
        staleness=training_pb2.StalenessConfig(
            max_versions=2, action=training_pb2.STALENESS_ACTION_DROP
        ),
        router_aux_loss_coefficient=0.01,
        shared_tokens=training_pb2.SHARED_TOKENS_ONCE,
    )
    sapo = training_pb2.LossConfig(
        kind=training_pb2.LOSS_KIND_SAPO,
        tau_positive=1.0,
        tau_negative=1.05,
        old_logprobs=_FROM_FORWARD,
        top_entropy_share=0.5,
    )
    frozen = training_pb2.LossConfig(
        kind=training_pb2.LOSS_KIND_REINFORCE,
        kl=training_pb2.KlConfig(
            kind=training_pb2.KL_KIND_K3_PLUS,
            coefficient=0.1,
            reference=training_pb2.REFERENCE_KIND_FROZEN,
        ),
    )
    distilled = training_pb2.LossConfig(
        kind=training_pb2.LOSS_KIND_DISTILLATION,
        distillation=training_pb2.DistillationConfig(
            divergence=training_pb2.DIVERGENCE_JENSEN_SHANNON, coefficient=0.5, beta=0.3
        ),
    )
    teachers = [
        training_pb2.Teacher(policy_id="fuzz-teacher"),
        training_pb2.Teacher(policy_id="fuzz-other", version=3, group_ids=["small"]),
    ]
    asked = training_pb2.LossConfig(
        kind=training_pb2.LOSS_KIND_REINFORCE,
        distillation=training_pb2.DistillationConfig(
            divergence=training_pb2.DIVERGENCE_REVERSE_KL, teachers=teachers, num_teacher_tokens=4
        ),
        kl=training_pb2.KlConfig(
            kind=training_pb2.KL_KIND_K2,
            coefficient=0.1,
            reference=training_pb2.REFERENCE_KIND_TEACHER,
            teachers=teachers[:1],
        ),
    )
    return [*plain, rich, rich, rich, sapo, frozen, distilled, asked]


def small_updates() -> list[service_pb2.UpdateRequest]:
    """One of each of `small_losses`, with the outcome and the divisor that it takes."""
    updates: list[service_pb2.UpdateRequest] = []
    for loss in small_losses():
        outcome = "reward"
        if loss.kind == training_pb2.LOSS_KIND_CROSS_ENTROPY:
            outcome = "token_weights"
        elif loss.kind == training_pb2.LOSS_KIND_IMPORTANCE_SAMPLING:
            outcome = "advantages"
        elif loss.kind == training_pb2.LOSS_KIND_DISTILLATION:
            outcome = "teacher"
        groups = small_groups(outcome)
        if loss.kl.teachers:
            for rollout in groups[0].rollouts:
                rollout.ClearField("reference_logprobs")
        request = requests.update(batch=groups)
        request.loss.CopyFrom(loss)
        if loss.kind == training_pb2.LOSS_KIND_DR_GRPO:
            request.optim.CopyFrom(_SCALED)
        updates.append(request)
    return updates


def update_documents() -> list[dict[str, Any]]:
    """Bodies; the policy stands in the address."""
    documents = [request_json(request) for request in updates()]
    return [
        {name: value for name, value in document.items() if name != "policy_id"}
        for document in documents
    ]


def specs() -> list[service_pb2.CreatePolicyRequest]:
    rich = requests.spec("fuzz-spec", seed=3, dtype=policy_pb2.MODEL_DTYPE_FLOAT32)
    rich.lora.rank = 4
    rich.lora.alpha = 8.0
    rich.optimizer.beta1 = 0.8
    rich.publish.kind = policy_pb2.PUBLISH_KIND_EVERY_N
    rich.publish.every_n = 3
    return [
        service_pb2.CreatePolicyRequest(spec=spec) for spec in (requests.spec("fuzz-spec"), rich)
    ]


def batches() -> list[bytes]:
    return [
        bytes(batch_to_bytes(builders.random_batch(np.random.default_rng(seed), num_groups=2)))
        for seed in range(3)
    ]


def operations() -> list[operation_pb2.Operation]:
    """What a client is answered."""
    done = operation_pb2.Operation(operation_id="p.1", policy_id="p", seq=1)
    done.state = operation_pb2.OPERATION_STATE_DONE
    done.kind = operation_pb2.OPERATION_KIND_UPDATE
    done.created_at.seconds = 1_700_000_000
    done.step.version = 3
    done.step.report.loss = 0.5
    warning = done.step.report.warnings.add(kind="truncated_sampling", message="top_p")
    warning.offenders.add(group_id="g", rollout=1, token=2, value=0.5)
    failed = operation_pb2.Operation(operation_id="p.2", policy_id="p")
    failed.state = operation_pb2.OPERATION_STATE_FAILED
    failed.error.code = "INTERNAL"
    failed.error.details["a"] = "b"
    forward = operation_pb2.Operation(operation_id="p.3", policy_id="p")
    forward.state = operation_pb2.OPERATION_STATE_DONE
    forward.forward.inline.CopyFrom(forward_output())
    return [done, failed, forward]


def forward_output() -> training_pb2.ForwardOutput:
    return training_pb2.ForwardOutput(
        logprobs=encode_array(np.full(5, -0.5, np.float32)),
        offsets=encode_array(np.array([0, 2, 5], np.int64)),
        entropy=encode_array(np.ones(5, np.float32)),
    )
