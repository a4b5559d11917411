"""Both wires, policies and updates: the same calls, the same answers, the same digests."""

from __future__ import annotations

import numpy as np
import pytest

from ratoon.engine.commands import RequestKey, SeqKey, UpdateCommand
from ratoon.model.spec import PRESET_NAMES
from ratoon.rollout.serial import batch_from_bytes
from ratoon_client import Correction, CorrectionMask, FromForward, Loss
from ratoon_client.wire import loss_message
from ratoon_proto.codec import encode_array
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMode,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    RolloutCorrection,
)
from ratoon_proto.v1 import operation_pb2, policy_pb2, rollout_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import WireError


async def test_create_policy_answers_the_spec_with_every_default(api: Api, wire_name: str) -> None:
    wire = api.wire(wire_name)
    request = service_pb2.CreatePolicyRequest(spec=requests.spec(seed=7))
    operation = await wire.call("CreatePolicy", request)

    assert operation.kind == operation_pb2.OPERATION_KIND_CREATE_POLICY
    assert operation.state == operation_pb2.OPERATION_STATE_DONE
    spec = operation.policy.spec
    assert spec.preset == "tiny"
    assert spec.WhichOneof("tuning") == "full"
    assert (spec.optimizer.beta1, spec.optimizer.beta2) == (0.9, 0.95)
    assert (spec.optimizer.eps, spec.optimizer.weight_decay) == (1e-8, 0.01)
    assert spec.dtype == policy_pb2.MODEL_DTYPE_FLOAT32
    assert spec.seed == 7
    assert spec.sequencing == policy_pb2.SEQUENCING_CLIENT
    assert spec.deterministic is True
    assert spec.recovery == policy_pb2.RECOVERY_REPLAY
    assert spec.on_changed_numerics == policy_pb2.ON_CHANGED_NUMERICS_STOP
    assert spec.publish.kind == policy_pb2.PUBLISH_KIND_EVERY
    assert (spec.keep_versions, spec.micro_batch_tokens) == (2, 4096)
    assert spec.reference == policy_pb2.REFERENCE_POLICY_NONE
    assert spec.parallel.num_workers == 1
    assert spec.numerics_guard == policy_pb2.NumericsGuard(max_skipped_in_row=5)
    policy = await wire.call("GetPolicy", service_pb2.GetPolicyRequest(policy_id=requests.POLICY))
    assert policy == operation.policy
    assert (policy.num_parameters, policy.vocab_size, policy.max_sequence_tokens) == (1000, 256, 64)
    assert (policy.optimizer_states, policy.shard) == ("bf16_split", "states")
    assert policy.created_at.ToNanoseconds() == 1_500_000_000
    assert policy.published_version == 0
    listed = await wire.call("ListPolicies", service_pb2.ListPoliciesRequest())
    assert list(listed.policies) == [policy]


async def test_create_policy_keeps_what_is_said(api: Api, wire_name: str) -> None:
    spec = policy_pb2.PolicySpec(
        policy_id="lora-1",
        model_folder="real",
        lora=policy_pb2.LoraTuning(rank=4, alpha=8.0, target_modules=["q_proj"]),
        optimizer=policy_pb2.AdamWConfig(beta1=0.0, eps=1e-6),
        dtype=policy_pb2.MODEL_DTYPE_BFLOAT16,
        seed=2**64 - 1,
        sequencing=policy_pb2.SEQUENCING_SERVER,
        deterministic=False,
        recovery=policy_pb2.RECOVERY_FAIL,
        on_changed_numerics=policy_pb2.ON_CHANGED_NUMERICS_REBASE,
        publish=policy_pb2.PublishConfig(kind=policy_pb2.PUBLISH_KIND_EVERY_N, every_n=3),
        keep_versions=5,
        micro_batch_tokens=77,
        reference=policy_pb2.REFERENCE_POLICY_BASE,
        parallel=policy_pb2.ParallelLayout(
            num_workers=4, shard=policy_pb2.SHARD_GRADIENTS, sequence_ranks=2
        ),
        attention_backend="reference",
        numerics_guard=policy_pb2.NumericsGuard(
            max_grad_norm_to_step=1e3,
            max_reference_kl_to_step=2.0,
            max_sampler_kl_to_step=0.5,
            max_skipped_in_row=0,
        ),
        keep_rollouts=policy_pb2.KEEP_ROLLOUTS_WORST,
        keep_rollouts_bytes=2**40,
        idle_release_s=600.0,
        idle_ttl_s=86_400.5,
    )
    request = service_pb2.CreatePolicyRequest(spec=spec)
    operation = await api.wire(wire_name).call("CreatePolicy", request)
    expected = policy_pb2.PolicySpec()
    expected.CopyFrom(spec)
    expected.optimizer.beta2, expected.optimizer.weight_decay = 0.95, 0.01
    expected.optimizer.decay = policy_pb2.DECAY_ALL
    assert operation.policy.spec == expected


async def test_update_reaches_the_engine_complete(api: Api, wire_name: str) -> None:
    await api.create_policy()
    request = requests.update(seq=1)
    request.loss.clip_high = 0.3
    request.optim.max_grad_norm = 2.0
    request.optim.tensor_grad_norms = True
    request.expected_version = 0
    operation = await api.wire(wire_name).call("Update", request)

    assert operation.seq == 1
    assert operation.step.version == 1
    report = operation.step.report
    assert (report.loss, report.grad_norm, report.seconds.forward) == (0.5, 1.25, 0.2)
    assert not report.HasField("kl")
    (warning,) = report.warnings
    assert (warning.kind, warning.message) == ("truncated_sampling", "sampled with top_p")
    (offender,) = warning.offenders
    assert (offender.group_id, offender.rollout, offender.HasField("token")) == ("g", 1, False)
    assert offender.value == 0.5
    (norm,) = report.tensor_grad_norms
    assert (norm.name, norm.norm, norm.max_abs) == ("lm_head.weight", 1.25, 0.75)
    (submission,) = api.engine.log
    assert submission.key == SeqKey(seq=1)
    command = submission.command
    assert isinstance(command, UpdateCommand)
    assert (command.loss.kind, command.loss.clip_low, command.loss.clip_high) == ("grpo", None, 0.3)
    assert (command.optim.learning_rate, command.optim.max_grad_norm) == (1e-3, 2.0)
    assert command.optim.tensor_grad_norms
    assert command.optim.divide_by is None
    assert command.expected_version == 0
    batch = batch_from_bytes(bytes(submission.body))
    assert batch.group_ids == ("group-0", "group-1")
    assert batch.prompt_tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert batch.response_tokens.tolist() == [4, 5, 6, 4, 6, 6]
    assert batch.sampler_logprobs is not None
    assert batch.sampler_logprobs.tolist() == [-0.5, -0.75, -0.5, -0.5, -0.75, -0.5]
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert batch.policy_version.tolist() == [-1] * 4


LOSSES = {
    "sapo": (
        Loss("sapo", tau_positive=0.9, tau_negative=2.0, advantage="group_mean_batch_std"),
        LossConfig(
            kind=LossKind.SAPO,
            tau_positive=0.9,
            tau_negative=2.0,
            advantage=AdvantageKind.GROUP_MEAN_BATCH_STD,
        ),
    ),
    "entropy": (
        Loss("dapo", old_logprobs=FromForward("p.op"), top_entropy_share=0.2),
        LossConfig(
            kind=LossKind.DAPO,
            old_logprobs=OldLogprobs(
                kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op"
            ),
            top_entropy_share=0.2,
        ),
    ),
    "ipo": (
        Loss("ipo", clip_low=0.1, clip_high=0.2),
        LossConfig(kind=LossKind.IPO, clip_low=0.1, clip_high=0.2),
    ),
    "masked": (
        Loss(
            "grpo",
            old_logprobs="given",
            correction=Correction(mode="truncate", level="token", high=2.0),
            correction_mask=CorrectionMask(level="geometric", low=0.99, high=1.01),
        ),
        LossConfig(
            kind=LossKind.GRPO,
            old_logprobs=OldLogprobs(kind=OldLogprobsKind.GIVEN),
            correction=RolloutCorrection(
                mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.TOKEN, low=0.0, high=2.0
            ),
            correction_mask=CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.99, high=1.01),
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
async def test_what_a_client_says_of_the_loss_reaches_the_engine(
    api: Api, wire_name: str, name: str
) -> None:
    said, expected = LOSSES[name]
    await api.create_policy()
    old = requests.floats([-0.5, -0.5])
    rollouts = [requests.rollout([4, 5], reward) for reward in (0.0, 1.0)]
    for rollout in rollouts:
        rollout.old_logprobs.CopyFrom(old)
    request = requests.update(seq=1, batch=[requests.group("a", *rollouts)])
    request.loss.CopyFrom(loss_message(said))
    await api.wire(wire_name).call("Update", request)
    (submission,) = api.engine.log
    assert isinstance(submission.command, UpdateCommand)
    assert submission.command.loss == expected


async def test_two_wires_and_an_upload_give_one_digest(api: Api) -> None:
    """A batch over gRPC, over HTTP and in parts is one payload, so a retry over another wire is a
    retry."""
    await api.create_policy()
    all_groups = requests.groups(4)
    first = await api.grpc.call("Update", requests.update(batch=all_groups))
    again = await api.http.call("Update", requests.update(batch=all_groups))
    for wire, upload_id in ((api.grpc, "by-grpc"), (api.http, "by-http")):
        for index in range(2):
            part = service_pb2.UploadPartRequest(
                policy_id=requests.POLICY,
                upload_id=upload_id,
                part_index=index,
                groups=all_groups[2 * index : 2 * index + 2],
            )
            answer = await wire.call("UploadPart", part)
            assert answer.num_bytes > 0
        request = requests.update()
        request.upload.upload_id, request.upload.num_parts = upload_id, 2
        uploaded = await wire.call("Update", request)
        assert uploaded.operation_id == first.operation_id
    assert again.operation_id == first.operation_id
    assert len(api.engine.log) == 1


async def test_json_lists_and_tensors_give_one_digest(api: Api) -> None:
    """Python floats are doubles, log-probs are float32: both forms end in the same bytes."""
    await api.create_policy()
    logprobs = np.log(np.random.default_rng(0).uniform(0.01, 1, 7)).astype(np.float32)
    response = [9, 8, 7, 6, 5, 4, 3]
    message = requests.update(
        batch=[
            requests.group(
                "g",
                rollout_pb2.Rollout(
                    response=requests.tokens(response),
                    sampler_logprobs=encode_array(logprobs),
                    loss_mask=encode_array(np.array([True] * 6 + [False])),
                    reward=0.1,
                ),
            )
        ]
    )
    first = await api.grpc.call("Update", message)
    as_lists = {
        "seq": 1,
        "batch": {
            "groups": [
                {
                    "group_id": "g",
                    "prompt": [1, 2.0, 3],
                    "rollouts": [
                        {
                            "response": response,
                            "sampler_logprobs": [float(value) for value in logprobs],
                            "loss_mask": [True] * 6 + [False],
                            "reward": 0.1,
                        }
                    ],
                }
            ]
        },
        "loss": {"kind": "grpo"},
        "optim": {"learning_rate": 1e-3},
    }
    answer = await api.http.client.post(f"/v1/policies/{requests.POLICY}/update", json=as_lists)
    assert answer.status_code == 202
    assert answer.json()["operation_id"] == first.operation_id
    assert len(api.engine.log) == 1


async def test_segments_train_what_they_say(api: Api, wire_name: str) -> None:
    """Trap 5: context segments stay in the sequence and leave the loss."""
    await api.create_policy()
    segments = [
        rollout_pb2.Segment(tokens=requests.tokens([10, 11]), trained=True),
        rollout_pb2.Segment(tokens=requests.tokens([12]), trained=False),
        rollout_pb2.Segment(tokens=requests.tokens([13]), trained=True),
    ]
    rollout = rollout_pb2.Rollout(
        segments=rollout_pb2.SegmentList(segments=segments),
        sampler_logprobs=requests.floats([-1.0, -2.0, -3.0, -4.0]),
        advantages=requests.floats([1.0, 2.0, 0.0, 3.0]),
        temperature=0.5,
        sampler_logprobs_kind=rollout_pb2.SAMPLER_LOGPROBS_KIND_PROCESSED,
        top_p=0.9,
        top_k=40,
        policy_version=3,
        truncated=True,
    )
    request = requests.update(batch=[requests.group("g", rollout)])
    with pytest.raises(WireError, match=r"rollouts\[0\]\.top_p"):
        await api.wire(wire_name).call("Update", request)
    request.loss.allow_truncated_sampling = True
    await api.wire(wire_name).call("Update", request)
    batch = batch_from_bytes(bytes(api.engine.log[0].body))
    assert batch.response_tokens.tolist() == [10, 11, 12, 13]
    assert batch.loss_mask.tolist() == [True, True, False, True]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [1.0, 2.0, 0.0, 3.0]
    assert batch.rewards is None
    assert (batch.temperature[0], batch.top_p[0]) == (0.5, np.float32(0.9))
    assert (batch.top_k[0], batch.policy_version[0], batch.truncated[0]) == (40, 3, True)


async def test_a_sampling_mask_is_taken_in_place_of_an_acknowledgement(
    api: Api, wire_name: str
) -> None:
    await api.create_policy()
    mask = rollout_pb2.SamplingMask(
        token_ids=requests.tokens([12, 10, 11]), lengths=requests.tokens([2, 1])
    )
    rollout = rollout_pb2.Rollout(
        response=requests.tokens([10, 11]),
        sampler_logprobs=requests.floats([-1.0, 0.0]),
        advantages=requests.floats([1.0, 2.0]),
        top_p=0.9,
        sampling_mask=mask,
    )
    rollout.sampling_mask.token_ids.CopyFrom(requests.tokens([12, 13, 11]))
    wire = api.wire(wire_name)
    with pytest.raises(WireError, match=r"rollouts\[0\]\.sampling_mask\[0\]: got 2 ids without it"):
        await wire.call("Update", requests.update(batch=[requests.group("g", rollout)]))
    rollout.sampling_mask.untrain_outside = True
    await wire.call("Update", requests.update(batch=[requests.group("g", rollout)]))
    rollout.sampling_mask.CopyFrom(mask)
    await wire.call("Update", requests.update(batch=[requests.group("g", rollout)], seq=2))
    untrained, whole = (batch_from_bytes(bytes(each.body)) for each in api.engine.log)
    assert untrained.loss_mask.tolist() == [False, True]
    assert untrained.outside_mask is not None
    assert untrained.outside_mask.tolist() == [True, False]
    assert whole.sampling_mask is not None
    assert whole.mask_offsets is not None
    assert whole.sampling_mask.tolist() == [10, 12, 11]
    assert whole.mask_offsets.tolist() == [0, 2, 3]


async def test_server_sequencing_takes_request_ids(api: Api, wire_name: str) -> None:
    await api.create_policy(sequencing=policy_pb2.SEQUENCING_SERVER)
    request = requests.update()
    request.key.request_id = "producer-a:17"
    operation = await api.wire(wire_name).call("Update", request)
    assert (operation.seq, operation.request_id) == (1, "producer-a:17")
    assert api.engine.log[0].key == RequestKey(request_id="producer-a:17")


async def test_info_and_health(api: Api, wire_name: str) -> None:
    wire = api.wire(wire_name)
    info = await wire.call("GetServerInfo", service_pb2.GetServerInfoRequest())
    assert (info.api_version, info.device, tuple(info.presets)) == ("v1", "cpu", PRESET_NAMES)
    assert [(backend.name, backend.available) for backend in info.backends] == [
        ("reference", True),
        ("hopper", False),
    ]
    assert info.limits.max_body_bytes == api.limits.max_body_bytes
    assert info.library_versions["torch"].startswith("2.")
    assert (await wire.call("Health", service_pb2.HealthRequest())).status == "ok"
