"""A service in memory, at the process's edge: what the client talks to in these tests.

Enters requests of both wires as messages, leaves messages or `RefusalError`s. It follows the
contract where the client relies on it: keys, seqs, operations that take a few polls, files by
digest.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
    service_pb2,
    training_pb2,
    weights_pb2,
)

CHUNK_BYTES = 64


class RefusalError(Exception):
    """A typed error of the service."""

    def __init__(self, code: str, *, field: str = "", retryable: bool = False, **details: str):
        super().__init__(code)
        self.detail = operation_pb2.ErrorDetail(
            code=code,
            message=f"{field}: refused with {code}",
            field=field,
            got="what was sent",
            expected="something else",
            retryable=retryable,
            details=details,
        )


class LostAnswerError(Exception):
    """The connection broke; whether the call was applied the fault says."""


def snake_case(name: str) -> str:
    """`_create_policy` of `CreatePolicy`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Happens once, at the next call of `name`: before the call is applied, or after."""

    name: str
    error: Exception
    is_after: bool = False


@dataclass
class FakePolicy:
    sequencing: int = policy_pb2.SEQUENCING_CLIENT
    version: int = 0
    next_seq: int = 1
    keys: dict[Any, tuple[bytes, str]] = field(default_factory=dict)
    weights: dict[int, dict[str, bytes]] = field(default_factory=dict)
    # By the version that they lead to: parent and bytes.
    deltas: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    uploads: dict[str, dict[int, list[Any]]] = field(default_factory=dict)
    # By seq: version and figures.
    steps: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    marks: list[service_pb2.StepMark] = field(default_factory=list)
    kept: list[rollout_pb2.KeptRollout] = field(default_factory=list)
    failure: str = ""
    created_at: int = 0


class FakeService:
    """All state of one fake; `calls` counts what arrived, `requests` keeps it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.policies: dict[str, FakePolicy] = {"p": FakePolicy()}
        self.sent: dict[str, bytearray] = {}
        self.operations: dict[str, operation_pb2.Operation] = {}
        self.calls: Counter[str] = Counter()
        self.requests: list[tuple[str, Message]] = []
        self.faults: list[Fault] = []
        # Reads of an operation that still say running, and whether all do.
        self.polls_until_done = 0
        self.is_holding = False
        self.max_body_bytes = 2**28
        self.steps = 0
        # Unix seconds: the step of seq n ends n later.
        self.began_at = 1.7e9
        self.acks: list[service_pb2.AckWeightsRequest] = []
        self.result_files: dict[str, bytes] = {}
        self.forward_in_file = False
        # Given a file's bytes and an offset, the chunk as it is sent.
        self.tamper: Callable[[bytes, int], bytes] = lambda data, _: data
        # What HTTP says is the file's entity tag, from its digest.
        self.tag: Callable[[str], str] = lambda digest: f'"{digest}"'
        # `delta_from` of each read of a manifest.
        self.deltas_from: list[int | None] = []
        # How long a read of the newest manifest may wait for another version.
        self.long_poll_s = 0.0
        self.published = threading.Condition(self.lock)
        self.max_in_flight = 0
        self._in_flight = 0

    def handle(self, name: str, request: Message) -> Message:
        """One call, with the faults that were planned for it."""
        with self.lock:
            self.calls[name] += 1
            self.requests.append((name, request))
            fault = next((fault for fault in self.faults if fault.name == name), None)
            if fault is not None:
                self.faults.remove(fault)
                if not fault.is_after:
                    raise fault.error
            method = getattr(self, snake_case(name), None) or self._submit
            answer = method(request)
            if fault is not None:
                raise fault.error
            return answer

    def publish(
        self,
        version: int,
        files: dict[str, bytes],
        policy_id: str = "p",
        deltas: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        with self.lock:
            policy = self.policies[policy_id]
            policy.version = version
            policy.weights[version] = files
            policy.deltas[version] = list(deltas)
            self.published.notify_all()

    def file(self, digest: str) -> bytes:
        for policy in self.policies.values():
            for version, files in policy.weights.items():
                for data in (*files.values(), *(data for _, data in policy.deltas[version])):
                    if _digest(data) == digest:
                        return data
        if digest in self.result_files:
            return self.result_files[digest]
        raise RefusalError("WEIGHTS_NOT_FOUND", field="digest")

    def named_file(self, policy_id: str, version: int, name: str) -> weights_pb2.WeightFile:
        """A file of a version, or of a delta to it."""
        with self.lock:
            manifest = self._manifest(policy_id, version)
        files = [*manifest.files, *(delta.file for delta in manifest.deltas)]
        return next(file for file in files if file.name == name)

    def slow_chunk(self) -> None:
        """Hold a chunk for a moment, so that several are in flight."""
        with self.lock:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
        time.sleep(0.005)
        with self.lock:
            self._in_flight -= 1

    def _policy(self, policy_id: str) -> FakePolicy:
        if policy_id not in self.policies:
            raise RefusalError("POLICY_NOT_FOUND", field="policy_id")
        return self.policies[policy_id]

    def _new_operation(self, kind: int, policy_id: str, **fields: Any) -> operation_pb2.Operation:
        operation = operation_pb2.Operation(
            operation_id=f"op-{len(self.operations) + 1}",
            policy_id=policy_id,
            kind=kind,  # pyright: ignore[reportArgumentType]
            state=operation_pb2.OPERATION_STATE_QUEUED,
            **fields,
        )
        operation.created_at.GetCurrentTime()
        self.operations[operation.operation_id] = operation
        return operation

    def _send_model_file(self, request: service_pb2.SendModelFileRequest) -> Message:
        sent = self.sent.setdefault(request.digest, bytearray())
        assert request.offset <= len(sent)
        sent[request.offset :] = request.data
        return service_pb2.SendModelFileResponse(num_bytes=len(sent))

    def _create_policy(self, request: service_pb2.CreatePolicyRequest) -> Message:
        spec = request.spec
        for file in spec.sent_model.files:
            arrived = len(self.sent.get(file.digest, b""))
            if arrived < file.size_bytes:
                raise RefusalError("UPLOAD_NOT_FOUND", digest=file.digest, arrived=str(arrived))
        if spec.policy_id in self.policies:
            raise RefusalError("POLICY_EXISTS", field="policy_id")
        self.policies[spec.policy_id] = FakePolicy(
            sequencing=spec.sequencing or policy_pb2.SEQUENCING_CLIENT
        )
        operation = self._new_operation(operation_pb2.OPERATION_KIND_CREATE_POLICY, spec.policy_id)
        self._finish(operation, policy=policy_pb2.Policy(spec=spec, version=0, next_seq=1))
        return operation

    def _delete_policy(self, request: service_pb2.DeletePolicyRequest) -> Message:
        self._policy(request.policy_id)
        del self.policies[request.policy_id]
        operation = self._new_operation(
            operation_pb2.OPERATION_KIND_DELETE_POLICY, request.policy_id
        )
        self._finish(operation, empty=operation_pb2.EmptyResult())
        return operation

    def _release_policy(self, request: service_pb2.ReleasePolicyRequest) -> Message:
        policy = policy_pb2.Policy()
        policy.CopyFrom(self._get_policy(service_pb2.GetPolicyRequest(policy_id=request.policy_id)))
        policy.state = policy_pb2.POLICY_STATE_RELEASED
        return policy

    def _get_policy(self, request: service_pb2.GetPolicyRequest) -> policy_pb2.Policy:
        policy = self._policy(request.policy_id)
        return policy_pb2.Policy(
            spec=policy_pb2.PolicySpec(
                policy_id=request.policy_id,
                preset="tiny",
                keep_versions=3,
                sequencing=policy.sequencing,  # pyright: ignore[reportArgumentType]
            ),
            state=policy_pb2.POLICY_STATE_READY,
            version=policy.version,
            next_seq=policy.next_seq,
            published_version=max(policy.weights, default=None),
            failure=policy.failure,
            created_at=Timestamp(seconds=policy.created_at),
        )

    def _list_policies(self, request: service_pb2.ListPoliciesRequest) -> Message:
        policies: list[Any] = [
            self._get_policy(service_pb2.GetPolicyRequest(policy_id=name)) for name in self.policies
        ]
        return service_pb2.ListPoliciesResponse(policies=policies)

    def _submit(self, request: Any) -> Message:
        """A sequenced call: the same key and payload is the first operation again."""
        policy = self._policy(request.policy_id)
        groups, refusal = self._groups(policy, request), None
        try:
            self._validate(groups)
        except RefusalError as error:
            if not request.key.consume:
                raise
            refusal = error
        kind = request.DESCRIPTOR.name.removesuffix("Request")
        payload = kind.encode() + b"".join(group.SerializeToString() for group in groups)
        key = request.key.seq or request.key.request_id
        if key in policy.keys:
            known, operation_id = policy.keys[key]
            if known != payload:
                raise RefusalError("KEY_REUSED", field="key.seq")
            return self.operations[operation_id]
        if kind != "Forward" and not key:
            raise RefusalError("INVALID_ARGUMENT", field="key.seq")
        operation = self._new_operation(
            getattr(operation_pb2, f"OPERATION_KIND{snake_case(kind).upper()}"), request.policy_id
        )
        if key:
            operation.seq = request.key.seq or policy.next_seq
            policy.keys[key] = (payload, operation.operation_id)
            seqs = {self.operations[known].seq for _, known in policy.keys.values()}
            while policy.next_seq in seqs:
                policy.next_seq += 1
        if kind in ("Update", "OptimStep", "ImportWeights"):
            self.steps += 1
            policy.version += 1
        result = self._result(kind, policy, groups)
        self._finish(operation, **({"error": refusal.detail} if refusal else result))
        if self.is_holding or self.polls_until_done:
            return self._unfinished(operation, operation_pb2.OPERATION_STATE_QUEUED)
        return operation

    def _groups(self, policy: FakePolicy, request: Any) -> list[Any]:
        if "source" not in request.DESCRIPTOR.oneofs_by_name:
            return []
        if request.WhichOneof("source") == "upload":
            parts = policy.uploads[request.upload.upload_id]
            return [g for part in range(request.upload.num_parts) for g in parts[part]]
        return list(request.batch.groups)

    def _validate(self, groups: list[Any]) -> None:
        for index, group in enumerate(groups):
            if not group.rollouts:
                raise RefusalError("INVALID_ARGUMENT", field=f"groups[{index}].rollouts")

    def _result(self, kind: str, policy: FakePolicy, groups: list[Any]) -> dict[str, Any]:
        report = training_pb2.StepReport(loss=0.5, num_groups=len(groups), token_reduction=2.0)
        report.seconds.forward = 0.25
        match kind:
            case "DiscardGradients":
                return {"empty": operation_pb2.EmptyResult()}
            case "SaveCheckpoint" | "LoadCheckpoint":
                return {"checkpoint": operation_pb2.CheckpointInfo(checkpoint_id="c-1", version=3)}
            case "PublishVersion":
                named = operation_pb2.NamedVersion(name="v-1", version=3, size_bytes=20)
                return {"named_version": named}
            case "ImportWeights":
                imported = operation_pb2.ImportResult(
                    version=policy.version,
                    num_tensors=3,
                    size_bytes=2**40,
                    dtypes=["BF16", "F32"],
                    digest="0" * 32,
                )
                return {"imported": imported}
            case "Forward":
                return {"forward": self._forward_result(groups, report, policy.version)}
            case _:
                step = operation_pb2.StepResult(version=policy.version, report=report)
                return {"step": step}

    def _forward_result(
        self, groups: list[Any], report: training_pb2.StepReport, version: int
    ) -> operation_pb2.ForwardResult:
        """The log-prob of every token is minus its index in the batch."""
        lengths = [r.response.shape[0] for group in groups for r in group.rollouts]
        offsets = np.cumsum([0, *lengths]).astype(np.int64)
        output = training_pb2.ForwardOutput(
            logprobs=encode_array(-np.arange(offsets[-1], dtype=np.float32)),
            offsets=encode_array(offsets),
        )
        if not self.forward_in_file:
            return operation_pb2.ForwardResult(inline=output, report=report, version=version)
        data = output.SerializeToString()
        digest = xxhash.xxh3_128_hexdigest(data)
        self.result_files[digest] = data
        result = operation_pb2.ForwardResult(report=report, version=version)
        result.file.digest, result.file.size_bytes = digest, len(data)
        return result

    def _finish(self, operation: operation_pb2.Operation, **result: Any) -> None:
        operation.MergeFrom(operation_pb2.Operation(**result))
        operation.state = operation_pb2.OPERATION_STATE_DONE
        if "error" in result:
            operation.state = operation_pb2.OPERATION_STATE_FAILED

    def fail(self, operation_id: str, refusal: RefusalError) -> None:
        """Make an operation one that failed."""
        self._finish(self.operations[operation_id], error=refusal.detail)

    def cancel(self, operation_id: str) -> None:
        """Make an operation one that was cancelled."""
        operation = self.operations[operation_id]
        operation.ClearField("result")
        operation.state = operation_pb2.OPERATION_STATE_CANCELLED

    def _seen(self, operation_id: str) -> operation_pb2.Operation:
        """The operation, or, while polls are left, the same one still running."""
        if operation_id not in self.operations:
            raise RefusalError("OPERATION_NOT_FOUND", field="operation_id")
        operation = self.operations[operation_id]
        if not self.is_holding and not self.polls_until_done:
            return operation
        self.polls_until_done = max(self.polls_until_done - 1, 0)
        seen = self._unfinished(operation, operation_pb2.OPERATION_STATE_RUNNING)
        seen.progress.micro_batches_done = 1
        seen.progress.micro_batches_planned = 4
        return seen

    def _unfinished(self, operation: operation_pb2.Operation, state: Any) -> Any:
        seen = operation_pb2.Operation()
        seen.CopyFrom(operation)
        seen.ClearField("result")
        seen.state = state
        return seen

    def _get_operation(self, request: service_pb2.GetOperationRequest) -> Message:
        return self._seen(request.operation_id)

    def _watch_operation(self, request: service_pb2.WatchOperationRequest) -> Message:
        """One state of the stream."""
        return self._seen(request.operation_id)

    def _cancel_operation(self, request: service_pb2.CancelOperationRequest) -> Message:
        return self._seen(request.operation_id)

    def _upload_part(self, request: service_pb2.UploadPartRequest) -> Message:
        uploads = self._policy(request.policy_id).uploads
        uploads.setdefault(request.upload_id, {})[request.part_index] = list(request.groups)
        return service_pb2.UploadPartResponse(num_bytes=request.ByteSize())

    def _list_checkpoints(self, request: service_pb2.ListCheckpointsRequest) -> Message:
        self._policy(request.policy_id)
        info = operation_pb2.CheckpointInfo(checkpoint_id="c-1", version=3, size_bytes=10)
        return service_pb2.ListCheckpointsResponse(checkpoints=[info])

    def _delete_checkpoint(self, request: service_pb2.DeleteCheckpointRequest) -> Message:
        self._policy(request.policy_id)
        if request.checkpoint_id != "c-1":
            raise RefusalError("CHECKPOINT_NOT_FOUND")
        return operation_pb2.CheckpointInfo(checkpoint_id="c-1", version=3, pinned=True)

    def _delete_version(self, request: Any) -> operation_pb2.NamedVersion:
        self._policy(request.policy_id)
        if request.name != "v-1":
            raise RefusalError("WEIGHTS_NOT_FOUND", field="name")
        return operation_pb2.NamedVersion(name="v-1", version=3, size_bytes=20)

    def _list_operations(self, request: service_pb2.ListOperationsRequest) -> Message:
        """Pages of two, so that there are several."""
        begin = int(request.page_token or 0)
        found = [
            operation
            for operation in reversed(self.operations.values())
            if request.policy_id in ("", operation.policy_id)
            and (not request.kinds or operation.kind in request.kinds)
            and (not request.states or operation.state in request.states)
            and request.seq in (0, operation.seq)
        ]
        token = str(begin + 2) if begin + 2 < len(found) else ""
        page = found[begin : begin + 2]
        return service_pb2.ListOperationsResponse(operations=page, next_page_token=token)

    def step(
        self,
        seq: int,
        named: Mapping[str, float] = MappingProxyType({}),
        *,
        warnings: Sequence[str] = (),
        policy_id: str = "p",
        **figures: float,
    ) -> None:
        """End an update of a policy."""
        with self.lock:
            policy = self.policies[policy_id]
            policy.version += 1
            policy.next_seq = seq + 1
            policy.steps[seq] = (policy.version, dict(named) | figures)
            if warnings:
                self.mark(seq, operation_pb2.OPERATION_KIND_UPDATE, warnings, policy_id)

    def mark(self, seq: int, kind: Any, warnings: Sequence[str] = (), policy_id: str = "p") -> None:
        policy = self.policies[policy_id]
        policy.marks.append(
            service_pb2.StepMark(seq=seq, version=policy.version, kind=kind, warnings=warnings)
        )

    def _list_steps(self, request: service_pb2.ListStepsRequest) -> Message:
        """Every step is a point: a test that asks for more of them than fit means no such thing."""
        policy = self._policy(request.policy_id)
        before = request.before_seq or 2**62
        seqs = [seq for seq in sorted(policy.steps) if request.after_seq < seq < before]
        assert len(seqs) <= (request.max_points or 1000)
        names = {name for seq in seqs for name in policy.steps[seq][1]}
        if request.figures:
            names &= set(request.figures)
        return service_pb2.StepHistory(
            seq=seqs,
            version=[policy.steps[seq][0] for seq in seqs],
            finished_at=[self.began_at + seq for seq in seqs],
            series=[
                service_pb2.StepSeries(
                    figure=name, mean=[policy.steps[seq][1].get(name, math.nan) for seq in seqs]
                )
                for name in sorted(names)
            ],
            marks=[mark for mark in policy.marks if request.after_seq < mark.seq < before],
            num_steps=len(seqs),
        )

    def _list_rollouts(self, request: service_pb2.ListRolloutsRequest) -> Message:
        kept = self._policy(request.policy_id).kept
        return rollout_pb2.StepRollouts(rollouts=kept, forest=rollout_pb2.PrefixForest())

    def _get_rollout(self, request: service_pb2.GetRolloutRequest) -> Message:
        for each in self._policy(request.policy_id).kept:
            if (each.group, each.rollout) == (request.group, request.rollout):
                return each
        raise RefusalError("ROLLOUTS_NOT_FOUND", field="rollout")

    def _list_versions(self, request: service_pb2.ListVersionsRequest) -> Message:
        policy = self._policy(request.policy_id)
        versions = [
            service_pb2.VersionInfo(
                version=version,
                size_bytes=sum(map(len, files.values())),
                delta_bytes=sum(len(data) for _, data in policy.deltas[version]),
            )
            for version, files in policy.weights.items()
        ]
        receivers = [
            service_pb2.ReceiverInfo(receiver_id=ack.receiver_id, version=ack.version, lag=0)
            for ack in self.acks
        ]
        return service_pb2.VersionList(versions=versions, receivers=receivers)

    def _get_weight_manifest(self, request: service_pb2.GetWeightManifestRequest) -> Message:
        policy = self._policy(request.policy_id)
        self.deltas_from.append(request.delta_from if request.HasField("delta_from") else None)
        if not request.HasField("version") and request.HasField("known_version"):
            self.published.wait_for(
                lambda: policy.version != request.known_version,
                min(request.wait_s, self.long_poll_s),
            )
        version = request.version if request.HasField("version") else policy.version
        if request.name:
            version = self._delete_version(request).version
        return self._manifest(request.policy_id, version)

    def _manifest(self, policy_id: str, version: int) -> weights_pb2.WeightManifest:
        policy = self._policy(policy_id)
        if version not in policy.weights:
            raise RefusalError("WEIGHTS_NOT_FOUND", field="version")
        is_adapter = "adapter_config.json" in policy.weights[version]
        return weights_pb2.WeightManifest(
            policy_id=policy_id,
            version=version,
            kind=weights_pb2.WEIGHT_KIND_ADAPTER if is_adapter else weights_pb2.WEIGHT_KIND_FULL,
            files=[_weight_file(name, data) for name, data in policy.weights[version].items()],
            deltas=[
                weights_pb2.WeightDelta(
                    parent_version=parent, file=_weight_file(f"delta-from-{parent:08d}.bin", data)
                )
                for parent, data in policy.deltas[version]
            ],
        )

    def _ack_weights(self, request: service_pb2.AckWeightsRequest) -> Message:
        policy = self._policy(request.policy_id)
        self.acks.append(request)
        return service_pb2.AckWeightsResponse(published_version=max(policy.weights, default=None))

    def _sample(self, request: service_pb2.SampleRequest) -> Message:
        """Answers with the prompt."""
        version = None if request.base else request.version or 7
        sequence = sampling_pb2.SampledSequence(
            tokens=request.prompt,
            logprobs=[-0.5] * len(request.prompt),
            stop_reason=sampling_pb2.STOP_REASON_LENGTH,
        )
        return sampling_pb2.SampleResult(
            sequences=[sequence] * request.sampling.num_samples, version=version
        )

    def _get_gradient_manifest(self, request: service_pb2.GetGradientManifestRequest) -> Message:
        data = " ".join(request.names).encode() * 50
        digest = xxhash.xxh3_128_hexdigest(data)
        self.result_files[digest] = data
        file = weights_pb2.WeightFile(name="g", size_bytes=len(data), digest=digest)
        return weights_pb2.GradientManifest(
            policy_id=request.policy_id, version=3, file=file, seqs=[4, 6], trained_tokens=7
        )

    def _fetch_weights(self, request: service_pb2.FetchWeightsRequest) -> Message:
        data = self.file(request.digest)[request.offset : request.offset + request.length]
        digest = xxhash.xxh3_128_hexdigest(data)
        return service_pb2.FetchWeightsResponse(
            data=self.tamper(data, request.offset), digest=digest
        )

    def _get_server_info(self, request: service_pb2.GetServerInfoRequest) -> Message:
        return service_pb2.ServerInfo(
            version="0.1.0",
            api_version="v1",
            device="cpu",
            presets=["tiny", "small", "tiny-qwen3.5", "tiny-gpt-oss"],
            limits=service_pb2.ServerLimits(
                max_body_bytes=self.max_body_bytes, max_fetch_bytes=CHUNK_BYTES, max_wait_s=60
            ),
            library_versions={"torch": "2.13.0"},
        )

    def _health(self, request: service_pb2.HealthRequest) -> Message:
        return service_pb2.HealthResponse(status="ok")


def _weight_file(name: str, data: bytes) -> weights_pb2.WeightFile:
    return weights_pb2.WeightFile(name=name, size_bytes=len(data), digest=_digest(data))


@cache
def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
