"""Both wires: what is asked for besides updates, and an operation until its end."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from ratoon.auth.keys import Scope
from ratoon.engine.commands import (
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    NoKey,
    PublishVersionCommand,
    SaveCheckpointCommand,
    SeqKey,
    Submission,
    UpdateCommand,
)
from ratoon.rollout.bad import bad_rollouts
from ratoon.rollout.serial import batch_from_bytes
from ratoon_proto.codec import decode_tensor, encode_array
from ratoon_proto.types import (
    BadRollout,
    BadRolloutAction,
    BadRolloutReason,
    ImportMode,
    LogprobsOf,
    LossConfig,
    OptimStepConfig,
)
from ratoon_proto.v1 import operation_pb2, policy_pb2, rollout_pb2, service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.wires import Wire, refused_by


async def test_small_forward_output_comes_inline(api: Api, wire_name: str) -> None:
    await api.create_policy()
    output = training_pb2.ForwardOutput(
        logprobs=requests.floats([-1.0, -2.0]), offsets=encode_array(np.array([0, 2]))
    )
    api.engine.forward_output = output.SerializeToString()
    request = service_pb2.ForwardRequest(
        policy_id=requests.POLICY,
        batch=rollout_pb2.RolloutBatch(groups=requests.groups(1)),
        with_entropy=True,
    )
    operation = await api.wire(wire_name).call("Forward", request)
    assert operation.seq == 0
    logprobs = decode_tensor(operation.forward.inline.logprobs, max_bytes=64)
    assert logprobs.tolist() == [-1.0, -2.0]
    (submission,) = api.engine.log
    assert submission.key == NoKey()
    assert isinstance(submission.command, ForwardCommand)
    assert submission.command.with_entropy


async def test_a_forward_backward_answers_what_it_is_asked_for(api: Api, wire_name: str) -> None:
    """Log-probs inline where they are few, as a file where they are many; nothing unasked."""
    await api.create_policy()
    wire = api.wire(wire_name)
    output = training_pb2.ForwardOutput(logprobs=requests.floats([-1.0, float("nan")]))
    asked, step = (service_pb2.LOGPROBS_OF_UNSPECIFIED, service_pb2.LOGPROBS_OF_ALL), None
    for seq, (of, num_repeats) in enumerate(
        [(asked[0], 1), (asked[1], 1), (asked[1], 3 * 10**5)], 1
    ):
        api.engine.forward_output = output.SerializeToString() * num_repeats
        request = requests.forward_backward(seq=seq)
        request.with_logprobs, request.with_entropy = of, bool(of)
        step = (await wire.call("ForwardBackward", request)).step
        assert step.WhichOneof("output") == (None, "inline", "file")[seq - 1]
        if seq == 2:
            logprobs = decode_tensor(step.inline.logprobs, max_bytes=64)
            np.testing.assert_array_equal(logprobs, [-1.0, np.nan])
    assert step is not None
    assert step.file.size_bytes == len(api.engine.forward_output)
    commands = [submission.command for submission in api.engine.log]
    assert [
        (each.with_logprobs, each.with_entropy)
        for each in commands
        if isinstance(each, ForwardBackwardCommand)
    ] == [
        (None, False),
        (LogprobsOf.ALL, True),
        (LogprobsOf.ALL, True),
    ]
    request = requests.forward_backward(seq=4)
    request.with_entropy = True
    refused = await refused_by(wire, "ForwardBackward", request)
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", "with_entropy")


@pytest.mark.parametrize("call", ["Update", "ForwardBackward"])
async def test_a_bad_rollout_costs_the_call_or_itself(api: Api, wire_name: str, call: str) -> None:
    """Refused by name unless the call says that it is dropped; the same call again is the same."""
    await api.create_policy()
    wire = api.wire(wire_name)
    request = requests.update() if call == "Update" else requests.forward_backward()
    request.batch.groups[1].rollouts[0].sampler_logprobs.CopyFrom(
        requests.floats([float("nan"), -1.0])
    )
    refuse = training_pb2.BAD_ROLLOUT_ACTION_REFUSE
    for action in (training_pb2.BAD_ROLLOUT_ACTION_UNSPECIFIED, refuse):
        request.on_bad_rollout = action
        refused = await refused_by(wire, call, request)
        assert refused.detail.field == "groups[1].rollouts[0].sampler_logprobs[0]"
    assert api.engine.log == []
    request.on_bad_rollout = training_pb2.BAD_ROLLOUT_ACTION_DROP
    operation, again = [await wire.call(call, request) for _ in range(2)]
    assert (operation.seq, operation.operation_id) == (1, again.operation_id)
    submission, *_ = api.engine.log
    assert isinstance(submission.command, UpdateCommand | ForwardBackwardCommand)
    assert submission.command.on_bad_rollout is BadRolloutAction.DROP
    batch = batch_from_bytes(bytes(submission.body))
    assert batch.group_ids == ("group-0", "group-1")
    assert batch.num_sequences == 3
    assert bad_rollouts(batch) == (
        BadRollout(group=1, rollout=0, reason=BadRolloutReason.LOGPROB, token=0),
    )


async def test_a_refused_call_takes_its_seq_where_it_asks_to(api: Api, wire_name: str) -> None:
    """For wires whose callers count on: as an operation that fails with the refusal, the same for a
    retry. A key that is wrong, and what may pass, takes none."""
    await api.create_policy()
    wire = api.wire(wire_name)
    bad = requests.forward_backward(seq=1)
    bad.loss.clip_low = -1.0
    refused = await refused_by(wire, "ForwardBackward", bad)
    assert api.engine.log == []
    bad.key.consume = True
    failed = await wire.call("ForwardBackward", bad)
    assert (failed.seq, failed.kind) == (1, operation_pb2.OPERATION_KIND_FORWARD_BACKWARD)
    assert failed.state == operation_pb2.OPERATION_STATE_FAILED
    assert failed.error == refused.detail
    again = await wire.call("ForwardBackward", bad)
    assert again.operation_id == failed.operation_id
    bad.loss.clip_low = -2.0
    other = await refused_by(wire, "ForwardBackward", bad)
    assert other.detail.code == "KEY_REUSED"
    step = service_pb2.OptimStepRequest(
        policy_id=requests.POLICY,
        key=service_pb2.OperationKey(seq=2, consume=True),
        optim=training_pb2.OptimStepConfig(learning_rate=-1.0),
    )
    assert (await wire.call("OptimStep", step)).error.field == "optim.learning_rate"
    key = service_pb2.OperationKey
    for wrong_key in (key(seq=0), key(request_id="r"), key()):
        wrong_key.consume = True
        step.key.CopyFrom(wrong_key)
        wrong = await refused_by(wire, "OptimStep", step)
        assert wrong.detail.field.removeprefix("key.") in ("seq", "request_id")
    upload = requests.forward_backward(seq=3)
    upload.upload.upload_id, upload.upload.num_parts = "none", 1
    upload.key.consume = True
    gone = await refused_by(wire, "ForwardBackward", upload)
    assert gone.detail.code == "UPLOAD_NOT_FOUND"
    good = requests.forward_backward(seq=3)
    good.key.consume = True
    assert (await wire.call("ForwardBackward", good)).state == operation_pb2.OPERATION_STATE_DONE
    assert [submission.key for submission in api.engine.log] == [
        SeqKey(seq=seq) for seq in (1, 2, 3)
    ]


async def test_large_forward_output_is_a_file(api: Api, wire_name: str) -> None:
    await api.create_policy()
    size = api.limits.max_fetch_bytes
    output = training_pb2.ForwardOutput(logprobs=requests.floats([-1.0] * size))
    api.engine.forward_output = output.SerializeToString()
    request = service_pb2.ForwardRequest(
        policy_id=requests.POLICY, batch=rollout_pb2.RolloutBatch(groups=requests.groups(1))
    )
    operation = await api.wire(wire_name).call("Forward", request)
    file = operation.forward.file
    assert file.size_bytes == len(api.engine.forward_output)
    pieces: list[bytes] = []
    for offset in range(0, file.size_bytes, size):
        fetch = service_pb2.FetchWeightsRequest(
            policy_id=requests.POLICY, digest=file.digest, offset=offset, length=size
        )
        pieces.append((await api.grpc.call("FetchWeights", fetch)).data)
    assert b"".join(pieces) == api.engine.forward_output


async def test_the_window_in_parts_and_checkpoints(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    update = requests.update()

    def key(seq: int) -> service_pb2.OperationKey:
        return service_pb2.OperationKey(seq=seq)

    policy_id = requests.POLICY
    step = service_pb2.OptimStepRequest(
        policy_id=policy_id, key=key(2), optim=update.optim, include_seqs=[1]
    )
    calls = [
        ("ForwardBackward", requests.forward_backward(1)),
        ("OptimStep", step),
        (
            "DiscardGradients",
            service_pb2.DiscardGradientsRequest(policy_id=policy_id, key=key(3)),
        ),
        (
            "SaveCheckpoint",
            service_pb2.SaveCheckpointRequest(
                policy_id=policy_id,
                key=key(4),
                checkpoint_id="a.b",
                overwrite=True,
                ttl_s=60.0,
                keep_last=2,
            ),
        ),
        (
            "LoadCheckpoint",
            service_pb2.LoadCheckpointRequest(policy_id=policy_id, key=key(5), checkpoint_id="a.b"),
        ),
        (
            "PublishVersion",
            service_pb2.PublishVersionRequest(
                policy_id=policy_id, key=key(6), name="v.1", overwrite=True, ttl_s=60.0
            ),
        ),
    ]
    kinds = [(await wire.call(rpc, request)).kind for rpc, request in calls]
    assert kinds == [
        operation_pb2.OPERATION_KIND_FORWARD_BACKWARD,
        operation_pb2.OPERATION_KIND_OPTIM_STEP,
        operation_pb2.OPERATION_KIND_DISCARD_GRADIENTS,
        operation_pb2.OPERATION_KIND_SAVE_CHECKPOINT,
        operation_pb2.OPERATION_KIND_LOAD_CHECKPOINT,
        operation_pb2.OPERATION_KIND_PUBLISH_VERSION,
    ]
    assert [type(s.command).__name__ for s in api.engine.log] == [
        "ForwardBackwardCommand",
        "OptimStepCommand",
        "DiscardGradientsCommand",
        "SaveCheckpointCommand",
        "LoadCheckpointCommand",
        "PublishVersionCommand",
    ]
    listed = await wire.call(
        "ListCheckpoints", service_pb2.ListCheckpointsRequest(policy_id=policy_id)
    )
    (checkpoint,) = listed.checkpoints
    assert (checkpoint.checkpoint_id, checkpoint.seq, checkpoint.replay_from_seq) == ("a.b", 4, 5)
    assert (checkpoint.pinned, checkpoint.expires_at.seconds) == (False, 60)
    saved = api.engine.log[3].command
    assert saved == SaveCheckpointCommand(
        checkpoint_id="a.b", overwrite=True, pinned=False, ttl_s=60.0, keep_last=2
    )
    delete = service_pb2.DeleteCheckpointRequest(policy_id=policy_id, checkpoint_id="a.b")
    assert await wire.call("DeleteCheckpoint", delete) == checkpoint
    assert api.engine.log[5].command == PublishVersionCommand(
        name="v.1", overwrite=True, ttl_s=60.0
    )
    by_name = service_pb2.GetWeightManifestRequest(policy_id=policy_id, name="v.1")
    manifest = await wire.call("GetWeightManifest", by_name)
    unname = service_pb2.DeleteVersionRequest(policy_id=policy_id, name="v.1")
    named = await wire.call("DeleteVersion", unname)
    assert (named.name, named.version, named.size_bytes) == ("v.1", manifest.version, 20)
    assert (named.created_at.ToSeconds(), named.expires_at.ToSeconds()) == (2, 60)


async def test_a_folder_is_imported_as_it_is_asked_for(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    plain = service_pb2.ImportWeightsRequest(
        policy_id=requests.POLICY,
        key=service_pb2.OperationKey(seq=1),
        model_folder="outer//./step-1/",
    )
    operation = await wire.call("ImportWeights", plain)
    assert operation.kind == operation_pb2.OPERATION_KIND_IMPORT_WEIGHTS
    assert operation.imported == operation_pb2.ImportResult(
        version=1, num_tensors=3, size_bytes=2**40, dtypes=["BF16", "F32"], digest="0" * 32
    )
    again = service_pb2.ImportWeightsRequest()
    again.CopyFrom(plain)
    again.model_folder, again.mode = "outer/step-1", service_pb2.IMPORT_MODE_FULL
    assert (await wire.call("ImportWeights", again)).operation_id == operation.operation_id
    again.key.seq, again.mode = 2, service_pb2.IMPORT_MODE_DELTA
    again.reset_optimizer, again.expected_version = True, 0
    await wire.call("ImportWeights", again)
    full = ImportWeightsCommand(
        folder="outer/step-1",
        mode=ImportMode.FULL,
        reset_optimizer=False,
        expected_version=None,
    )
    delta = replace(full, mode=ImportMode.DELTA, reset_optimizer=True, expected_version=0)
    assert [submission.command for submission in api.engine.log] == [full, delta]


async def test_a_folder_or_version_that_cannot_be_takes_no_seq(api: Api, wire_name: str) -> None:
    await api.create_policy()
    folders = ("", ".", "/etc", "../outside", "a/../../b", "a\0b", "a/" * 1000)
    for field, value in (*(("model_folder", one) for one in folders), ("expected_version", -1)):
        request = service_pb2.ImportWeightsRequest(
            policy_id=requests.POLICY, key=service_pb2.OperationKey(seq=1), model_folder="outer"
        )
        setattr(request, field, value)
        refused = await refused_by(api.wire(wire_name), "ImportWeights", request)
        detail = refused.detail
        assert (detail.code, detail.field) == ("INVALID_ARGUMENT", field), value
        assert len(detail.message) < 300
    assert api.engine.log == []


async def test_long_poll_ends_with_the_operation(api: Api, wire_name: str) -> None:
    await api.create_policy()
    api.engine.hold = True
    wire = api.wire(wire_name)
    operation = await wire.call("Update", requests.update())
    assert operation.state == operation_pb2.OPERATION_STATE_QUEUED
    get = service_pb2.GetOperationRequest(operation_id=operation.operation_id, wait_s=0.05)
    assert (await wire.call("GetOperation", get)).state == operation_pb2.OPERATION_STATE_QUEUED
    await api.engine.release()
    done = await wire.call("GetOperation", get)
    assert done.state == operation_pb2.OPERATION_STATE_DONE


async def test_long_poll_is_bounded_by_the_server(api: Api, wire_name: str) -> None:
    await api.create_policy()
    api.engine.hold = True
    operation = await api.wire(wire_name).call("Update", requests.update())
    get = service_pb2.GetOperationRequest(operation_id=operation.operation_id, wait_s=1e9)
    answer = await api.wire(wire_name).call("GetOperation", get)
    assert answer.state == operation_pb2.OPERATION_STATE_QUEUED


async def test_cancel_ends_a_queued_operation(api: Api, wire_name: str) -> None:
    await api.create_policy()
    api.engine.hold = True
    wire = api.wire(wire_name)
    operation = await wire.call("Update", requests.update())
    request = service_pb2.CancelOperationRequest(operation_id=operation.operation_id)
    cancelled = await wire.call("CancelOperation", request)
    assert cancelled.state == operation_pb2.OPERATION_STATE_CANCELLED


async def test_failed_operation_carries_its_error(api: Api, wire_name: str) -> None:
    """The error of an operation is part of it, not of the call that reads it."""
    await api.create_policy()
    wire: Wire = api.wire(wire_name)
    await wire.call("Update", requests.update())
    gap = await wire.call("Update", requests.update(seq=3))
    assert gap.blocked_by_seq == 2
    get = service_pb2.GetOperationRequest(operation_id=gap.operation_id, wait_s=1.0)
    refused = await refused_by(wire, "GetOperation", get)
    assert refused.detail.code == "SEQ_GAP"
    assert refused.detail.retryable
    assert refused.detail.details["missing_seq"] == "2"
    filled = await wire.call("Update", requests.update(seq=2))
    assert filled.step.version == 2
    done = await wire.call("GetOperation", get)
    assert done.step.version == 3


async def _pages(wire: Wire, request: service_pb2.ListOperationsRequest) -> list[list[int]]:
    """Seqs of each page."""
    pages: list[list[int]] = []
    while True:
        page = await wire.call("ListOperations", request)
        pages.append([operation.seq for operation in page.operations])
        if not page.next_page_token:
            return pages
        request.page_token = page.next_page_token


async def test_operations_are_listed_in_pages(api: Api, wire_name: str) -> None:
    await api.create_policy()
    await api.create_policy(policy_id="tiny-2")
    for seq in range(1, 6):
        await api.engine.submit(_submission(seq))
    wire = api.wire(wire_name)
    request = service_pb2.ListOperationsRequest(policy_id=requests.POLICY, page_size=4)
    assert await _pages(wire, request) == [[5, 4, 3, 2], [1, 0]]
    assert await _pages(wire, service_pb2.ListOperationsRequest()) == [[5, 4, 3, 2, 1, 0, 0]]
    chosen = service_pb2.ListOperationsRequest(
        policy_id=requests.POLICY,
        kinds=[operation_pb2.OPERATION_KIND_UPDATE],
        states=[operation_pb2.OPERATION_STATE_DONE, operation_pb2.OPERATION_STATE_FAILED],
        seq=3,
    )
    assert await _pages(wire, chosen) == [[3]]


async def test_a_bad_question_for_operations_is_refused_by_field(api: Api, wire_name: str) -> None:
    """A token is good for its own question alone: of another policy it would skip operations."""
    await api.create_policy()
    await api.create_policy(policy_id="tiny-2")
    for seq in range(1, 4):
        await api.engine.submit(_submission(seq))
    wire = api.wire(wire_name)
    first = service_pb2.ListOperationsRequest(policy_id=requests.POLICY, page_size=1)
    token = (await wire.call("ListOperations", first)).next_page_token
    texts = (b'["1", 2, []]', b"5", b"[" * 9000, b"{}", b"[1.5]")
    forged = [base64.urlsafe_b64encode(text).decode() for text in texts]
    bad = {
        "page_size": {"page_size": 501},
        "seq": {"seq": 3},
        "policy_id": {"policy_id": "No Id"},
        "page_token": {"page_token": "no token"},
    }
    others = [
        *({"page_token": one} for one in forged),
        {"page_token": token, "policy_id": "tiny-2"},
    ]
    questions = [*bad.items(), *(("page_token", other) for other in others)]
    for field, values in questions:
        request = service_pb2.ListOperationsRequest(**values)  # pyright: ignore[reportArgumentType]
        error = await refused_by(wire, "ListOperations", request)
        assert (error.detail.code, error.detail.field) == ("INVALID_ARGUMENT", field), values
    request = service_pb2.ListStepsRequest(policy_id=requests.POLICY, figures=["loss", "lss"])
    error = await refused_by(wire, "ListSteps", request)
    assert (error.detail.code, error.detail.field) == ("INVALID_ARGUMENT", "figures[1]")
    request = service_pb2.ListStepsRequest(policy_id=requests.POLICY, max_points=10_001)
    assert (await refused_by(wire, "ListSteps", request)).detail.field == "max_points"
    request = service_pb2.ListStepsRequest(policy_id="tiny-3")
    assert (await refused_by(wire, "ListSteps", request)).detail.code == "POLICY_NOT_FOUND"


async def test_steps_and_versions_are_listed(api: Api, wire_name: str) -> None:
    await api.create_policy()
    for seq in range(1, 6):
        await api.engine.submit(_submission(seq))
    wire, policy_id = api.wire(wire_name), requests.POLICY
    request = service_pb2.ListStepsRequest(
        policy_id=policy_id, figures=["grad_norm", "loss"], after_seq=1, max_points=2
    )
    history = await wire.call("ListSteps", request)
    assert (list(history.seq), history.num_steps) == ([3, 5], 4)
    norm, loss = history.series
    assert (norm.figure, list(norm.mean), list(norm.high)) == ("grad_norm", [1.25] * 2, [1.25] * 2)
    assert (loss.figure, list(loss.low)) == ("loss", [0.5, 0.5])
    request = service_pb2.ListVersionsRequest(policy_id=policy_id)
    (version,) = (await wire.call("ListVersions", request)).versions
    assert (version.version, version.size_bytes, version.is_held) == (5, 2**40, True)
    (named,) = version.names
    assert (named.name, named.version, named.expires_at.ToMilliseconds()) == ("kept", 5, 2500)


async def test_a_policy_is_put_away(api: Api, guarded: Guarded, wire_name: str) -> None:
    await api.create_policy()
    request = service_pb2.ReleasePolicyRequest(policy_id=requests.POLICY)
    wire = guarded.wire(wire_name, guarded.key(Scope.READ, None))
    error = await refused_by(wire, "ReleasePolicy", request)
    assert error.detail.code == "PERMISSION_DENIED"
    wire = guarded.wire(wire_name, guarded.key(Scope.TRAIN, None))
    released = await wire.call("ReleasePolicy", request)
    assert released.state == policy_pb2.POLICY_STATE_RELEASED
    unknown = service_pb2.ReleasePolicyRequest(policy_id="none")
    assert (await refused_by(wire, "ReleasePolicy", unknown)).detail.code == "POLICY_NOT_FOUND"


@pytest.mark.parametrize("policies", [("tiny-2",), None])
async def test_a_key_lists_operations_of_its_own_policies(
    api: Api, guarded: Guarded, wire_name: str, policies: tuple[str, ...] | None
) -> None:
    await api.create_policy()
    await api.create_policy(policy_id="tiny-2")
    wire = guarded.wire(wire_name, guarded.key(Scope.READ, policies))
    page = await wire.call("ListOperations", service_pb2.ListOperationsRequest())
    seen = [operation.policy_id for operation in page.operations]
    assert seen == (["tiny-2"] if policies else ["tiny-2", requests.POLICY])
    if policies:
        request = service_pb2.ListOperationsRequest(policy_id=requests.POLICY)
        error = await refused_by(wire, "ListOperations", request)
        assert error.detail.code == "PERMISSION_DENIED"


def _submission(seq: int) -> Submission:
    command = UpdateCommand(
        loss=LossConfig("grpo"),
        optim=OptimStepConfig(learning_rate=1e-3),
        expected_version=None,
        body_digest=f"{seq}",
    )
    return Submission(
        policy_id=requests.POLICY,
        key=SeqKey(seq=seq),
        command=command,
        body=b"",
        policy_created_at=1.5,
    )
