"""An engine in memory, in place of `EngineClient` and all that is behind it.

Operations whose turn has come are done at once, unless `hold` is set: then they run until
`release`. `log` holds what was accepted; a test of a refusal asserts that it is empty.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig, RatoonConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.commands import (
    ForwardCommand,
    Holder,
    ImportWeightsCommand,
    NoKey,
    PublishVersionCommand,
    RefusedCommand,
    RequestKey,
    SaveCheckpointCommand,
    SeqKey,
    Submission,
)
from ratoon.engine.journal.codec import payload_hash
from ratoon.engine.journal.steps import Curves, step_row
from ratoon.engine.refusals import checkpoint_not_found, policy_replaced, version_not_found
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import (
    Acknowledgement,
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    NamedVersion,
    Operation,
    OperationFilter,
    OperationResult,
    Place,
    Policy,
    PolicyResult,
    PolicySpec,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import Change
from ratoon.model.spec import ModelInfo, ModelSpec
from ratoon.rollout.serial import batch_digest
from ratoon.sampler.port import BaseFacts, Weights
from ratoon.stream.manifest import WeightManifest
from ratoon_proto import types
from ratoon_proto.types import (
    BackendInfo,
    EmptyResult,
    GradientManifest,
    ImportResult,
    Offender,
    OperationKind,
    OperationState,
    PhaseSeconds,
    PolicyState,
    Progress,
    ReceiverInfo,
    ResultFile,
    SampledSequence,
    SampleResult,
    SamplingParams,
    StepHistory,
    StepReport,
    StepResult,
    StepWarning,
    StopReason,
    TensorGradNorm,
    VersionInfo,
    VersionList,
    WeightFile,
    WeightKind,
)
from ratoon_proto.v1.rollout_pb2 import KeptRollout, PrefixForest, StepRollouts

INFO = ModelInfo(
    num_parameters=1000,
    num_trainable_parameters=900,
    vocab_size=256,
    max_sequence_tokens=64,
    attention_backend="reference",
    optimizer_states="bf16_split",
    shard="states",
)
REPORT = StepReport(
    loss=0.5,
    kl=None,
    grad_norm=1.25,
    num_groups=1,
    trained_tokens=2,
    seconds=PhaseSeconds(plan=0.1, forward=0.2),
    ratio_max=float("inf"),
    warnings=(
        StepWarning(
            kind="truncated_sampling",
            message="sampled with top_p",
            offenders=(Offender(group_id="g", rollout=1, value=0.5),),
        ),
    ),
    tensor_grad_norms=(TensorGradNorm(name="lm_head.weight", norm=1.25, max_abs=0.75),),
)


class FakeEngine(EngineClient):
    """Calls of `Engine` go to the methods here of the same name."""

    def __init__(self, *, folder: Path, gap_wait_s: float) -> None:
        settings = EngineSettings.from_config(RatoonConfig())
        super().__init__(lambda call: call.on(self), settings)
        self.log: list[Submission] = []
        self.acks: list[Acknowledgement] = []
        self.metrics: list[Change] = []
        self.hold = False
        self.submit_delay_s = 0.0
        # Set while a submission is under way, and from then on.
        self.has_submission = asyncio.Event()
        self.uploads: dict[tuple[str, str, int], bytes] = {}
        self.uploaders: list[str] = []
        self.operations: dict[str, Operation] = {}
        self.known_policies: dict[str, Policy] = {}
        self.files: dict[str, bytes] = {}
        # What reads of manifests asked for.
        self.deltas_from: list[int | None] = []
        # What was asked of `set_ttl`.
        self.ttls: list[tuple[str, str, float | None, bool]] = []
        self.sent: dict[tuple[str, str], bytearray] = {}
        # Whole, by seq.
        self.kept: dict[int, list[KeptRollout]] = {}
        self.submissions: dict[str, Submission] = {}
        self.is_draining = False
        self._folder = folder
        self._gap_wait_s = gap_wait_s
        self._changed = asyncio.Condition()

    def add_file(self, data: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(data)
        self.files[digest] = data
        return digest

    async def create_policy(self, spec: PolicySpec) -> Operation:
        if spec.policy_id in self.known_policies:
            raise RatoonError(
                ErrorCode.POLICY_EXISTS, f"policy {spec.policy_id} exists", field="spec.policy_id"
            )
        policy = Policy(
            spec=spec,
            state=PolicyState.READY,
            version=0,
            next_seq=1,
            created_at=1.5,
            info=INFO,
            published_version=0,
        )
        self.known_policies[spec.policy_id] = policy
        return self._add(spec.policy_id, OperationKind.CREATE_POLICY, PolicyResult(policy=policy))

    async def delete_policy(self, policy_id: str) -> Operation:
        await self.policy(policy_id)
        del self.known_policies[policy_id]
        return self._add(policy_id, OperationKind.DELETE_POLICY, EmptyResult())

    async def release_policy(self, policy_id: str) -> Policy:
        return replace(await self.policy(policy_id), state=PolicyState.RELEASED)

    async def note_call(self, policy_id: str) -> None:
        """No policy ends here."""

    async def policy(self, policy_id: str) -> Policy:
        if policy_id not in self.known_policies:
            raise RatoonError(
                ErrorCode.POLICY_NOT_FOUND, f"no policy {policy_id}", field="policy_id"
            )
        return self.known_policies[policy_id]

    async def policies(self) -> Sequence[Policy]:
        return list(self.known_policies.values())

    async def check_well(self) -> None:
        if self.is_draining:
            raise RatoonError(ErrorCode.UNAVAILABLE, "the service is draining")

    async def submit(self, submission: Submission) -> Operation:
        self.has_submission.set()
        await asyncio.sleep(self.submit_delay_s)
        # As the client that it stands for.
        body = bytes(submission.body)
        if body:
            submission = replace(submission.named(batch_digest(body)), body=body)
        known = self._known(submission)
        if known is not None:
            return known
        policy = await self.policy(submission.policy_id)
        if submission.policy_created_at != policy.created_at:
            raise policy_replaced(submission.policy_id, policy.created_at)
        operation = self._add(submission.policy_id, submission.command.kind, None)
        match submission.key:
            case SeqKey(seq=seq):
                operation = replace(operation, seq=seq)
            case RequestKey(request_id=request_id):
                operation = replace(operation, seq=policy.next_seq, request_id=request_id)
            case NoKey():
                pass
        self.operations[operation.operation_id] = operation
        self.submissions[operation.operation_id] = submission
        self.log.append(submission)
        if not self.hold:
            await self._run_ready(submission.policy_id)
        return self.operations[operation.operation_id]

    def _known(self, submission: Submission) -> Operation | None:
        for operation_id, earlier in self.submissions.items():
            same_key = earlier.policy_id == submission.policy_id and earlier.key == submission.key
            if not same_key or isinstance(submission.key, NoKey):
                continue
            if payload_hash(earlier.command) != payload_hash(submission.command):
                raise RatoonError(
                    ErrorCode.KEY_REUSED, "key used for another payload", field="key.seq"
                )
            return self.operations[operation_id]
        return None

    async def release(self) -> None:
        self.hold = False
        for policy_id in self.known_policies:
            await self._run_ready(policy_id)

    async def _run_ready(self, policy_id: str) -> None:
        """Run what is next, in seq order, and mark the rest as blocked."""
        waiting = sorted(
            (
                operation
                for operation in self.operations.values()
                if operation.policy_id == policy_id and not operation.state.is_final
            ),
            key=lambda operation: operation.seq,
        )
        for operation in waiting:
            policy = self.known_policies[policy_id]
            if operation.seq not in (0, policy.next_seq):
                blocked = replace(operation, blocked_by_seq=policy.next_seq)
                self.operations[operation.operation_id] = blocked
                continue
            await self._finish(operation)

    async def _finish(self, operation: Operation) -> None:
        policy = self.known_policies[operation.policy_id]
        submission = self.submissions[operation.operation_id]
        if operation.seq:
            policy = replace(policy, next_seq=policy.next_seq + 1, version=policy.version + 1)
            self.known_policies[operation.policy_id] = policy
        result: OperationResult = StepResult(version=policy.version, report=REPORT)
        if getattr(submission.command, "with_logprobs", None) is not None:
            output = self.forward_output
            file = ResultFile(digest=self.add_file(output), size_bytes=len(output))
            result = replace(result, file=file)
        if isinstance(submission.command, SaveCheckpointCommand):
            result = CheckpointInfo(
                checkpoint_id=f"folder-{operation.seq}",
                name=submission.command.checkpoint_id or f"seq-{operation.seq}",
                pinned=submission.command.pinned,
                expires_at=submission.command.ttl_s,
                version=policy.version,
                seq=operation.seq,
                replay_from_seq=operation.seq + 1,
                created_at=2.5,
                size_bytes=10,
            )
        if isinstance(submission.command, PublishVersionCommand):
            result = NamedVersion(
                name=submission.command.name,
                version=policy.version,
                size_bytes=20,
                created_at=2.5,
                expires_at=submission.command.ttl_s,
            )
        if isinstance(submission.command, ImportWeightsCommand):
            result = ImportResult(
                version=policy.version,
                num_tensors=3,
                size_bytes=2**40,
                dtypes=("BF16", "F32"),
                digest="0" * 32,
            )
        if isinstance(submission.command, ForwardCommand):
            output = self.forward_output
            digest = self.add_file(output)
            result = ForwardResult(
                version=policy.version, digest=digest, size_bytes=len(output), report=REPORT
            )
        state = OperationState.DONE
        if isinstance(submission.command, RefusedCommand):
            state, result = OperationState.FAILED, FailedResult(error=submission.command.error)
        await self.set(
            replace(
                operation,
                state=state,
                blocked_by_seq=0,
                started_at=3.0,
                finished_at=4.0,
                result=result,
            )
        )

    forward_output: bytes = b""

    async def set(self, operation: Operation) -> None:
        """Put an operation in another state, for all who wait."""
        async with self._changed:
            self.operations[operation.operation_id] = operation
            self._changed.notify_all()

    def _add(
        self, policy_id: str, kind: OperationKind, result: OperationResult | None
    ) -> Operation:
        operation = Operation(
            operation_id=f"op-{len(self.operations) + 1}",
            policy_id=policy_id,
            kind=kind,
            seq=0,
            request_id="",
            state=OperationState.QUEUED if result is None else OperationState.DONE,
            blocked_by_seq=0,
            progress=Progress(),
            created_at=1.0,
            started_at=None,
            finished_at=None,
            result=result,
        )
        self.operations[operation.operation_id] = operation
        return operation

    def _operation(self, operation_id: str) -> Operation:
        if operation_id not in self.operations:
            raise RatoonError(
                ErrorCode.OPERATION_NOT_FOUND, "no such operation", field="operation_id"
            )
        return self.operations[operation_id]

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        start = time.monotonic()
        while True:
            operation = self._operation(operation_id)
            waited_s = time.monotonic() - start
            if operation.state.is_final or waited_s >= wait_s:
                return operation
            if operation.blocked_by_seq and waited_s >= self._gap_wait_s:
                raise RatoonError(
                    ErrorCode.SEQ_GAP,
                    f"seq {operation.blocked_by_seq} has not arrived",
                    details={"missing_seq": str(operation.blocked_by_seq)},
                )
            await asyncio.sleep(0.01)

    async def watch_operation(self, operation_id: str) -> AsyncIterator[Operation]:
        operation = self._operation(operation_id)
        yield operation
        while not operation.state.is_final:
            async with self._changed:
                await self._changed.wait()
            operation = self.operations[operation_id]
            yield operation

    async def list_operations(
        self,
        asked: OperationFilter,
        policies: tuple[str, ...] | None,
        after: Place | None,
        most: int,
    ) -> tuple[tuple[Operation, ...], Place | None]:
        if asked.policy_id:
            await self.policy(asked.policy_id)
        found = [
            operation
            for operation in reversed(self.operations.values())
            if asked.policy_id in ("", operation.policy_id)
            and (policies is None or operation.policy_id in policies)
            and (not asked.kinds or operation.kind in asked.kinds)
            and (not asked.states or operation.state in asked.states)
            and asked.seq in (0, operation.seq)
        ]
        ids = [operation.operation_id for operation in found]
        start = 0 if after is None or after[1] not in ids else ids.index(after[1]) + 1
        page = tuple(found[start : start + most])
        is_over = start + most >= len(found)
        return page, None if is_over else (page[-1].created_at, page[-1].operation_id)

    async def list_steps(
        self, policy_id: str, figures: tuple[str, ...], seqs: tuple[int, int], max_points: int
    ) -> StepHistory:
        curves = Curves(figures, max_points)
        await self.policy(policy_id)
        for one in self.operations.values():
            if (
                one.policy_id == policy_id
                and seqs[0] < one.seq < (seqs[1] or one.seq + 1)
                and one.result is not None
            ):
                row = step_row(one.kind, one.seq, one.result, one.seq, one.finished_at or 0.0)
                curves.add([] if row is None else [row])
        return curves.history()

    async def list_versions(self, policy_id: str) -> VersionList:
        policy = await self.policy(policy_id)
        published = datetime.fromtimestamp(2.5, UTC)
        version = VersionInfo(
            version=policy.version,
            size_bytes=2**40,
            delta_bytes=7,
            published_at=published,
            is_held=True,
            names=(
                types.NamedVersion(
                    name="kept",
                    version=policy.version,
                    size_bytes=2**40,
                    created_at=published,
                    expires_at=published,
                ),
            ),
        )
        receivers = tuple(
            ReceiverInfo(receiver_id=ack.receiver_id, version=ack.version, last_seen=published)
            for ack in self.acks
        )
        return VersionList(versions=(version,), receivers=receivers)

    async def cancel_operation(self, operation_id: str) -> Operation:
        operation = self._operation(operation_id)
        if not operation.state.is_final:
            await self.set(replace(operation, state=OperationState.CANCELLED, finished_at=4.0))
        return self.operations[operation_id]

    async def put_model_file(
        self, policy_id: str, file: WeightFile, offset: int, data: bytes
    ) -> int:
        sent = self.sent.setdefault((policy_id, file.digest), bytearray())
        sent[offset:] = data
        return len(sent)

    async def put_upload_part(
        self, policy_id: str, upload_id: str, part_index: int, body: bytes, holder: Holder
    ) -> None:
        await self.policy(policy_id)
        self.uploads[policy_id, upload_id, part_index] = body
        self.uploaders.append(holder.key_id)

    async def get_upload_parts(
        self, policy_id: str, upload_id: str, num_parts: int
    ) -> Sequence[bytes]:
        keys = [(policy_id, upload_id, index) for index in range(num_parts)]
        missing = [index for index, key in enumerate(keys) if key not in self.uploads]
        if missing:
            raise RatoonError(
                ErrorCode.UPLOAD_NOT_FOUND, f"part {missing[0]} of {upload_id} is not here"
            )
        return [self.uploads[key] for key in keys]

    async def list_checkpoints(self, policy_id: str) -> Sequence[CheckpointInfo]:
        await self.policy(policy_id)
        results = [operation.result for operation in self.operations.values()]
        return [result for result in results if isinstance(result, CheckpointInfo)]

    async def delete_checkpoint(self, policy_id: str, name: str) -> CheckpointInfo:
        found = [info for info in await self.list_checkpoints(policy_id) if info.name == name]
        if not found:
            raise checkpoint_not_found(name)
        return found[0]

    async def delete_version(self, policy_id: str, name: str) -> NamedVersion:
        await self.policy(policy_id)
        # A name that is taken over is that of the newest.
        for operation in reversed(self.operations.values()):
            if isinstance(operation.result, NamedVersion) and operation.result.name == name:
                return operation.result
        raise version_not_found(name)

    async def set_ttl(
        self, policy_id: str, name: str, ttl_s: float | None, *, of_version: bool
    ) -> None:
        delete = self.delete_version if of_version else self.delete_checkpoint
        await delete(policy_id, name)
        self.ttls.append((policy_id, name, ttl_s, of_version))

    async def weight_manifest(
        self,
        policy_id: str,
        version: int | None,
        known_version: int | None = None,
        wait_s: float = 0.0,
        name: str = "",
        delta_from: int | None = None,
    ) -> WeightManifest:
        self.deltas_from.append(delta_from)
        if name:
            version = (await self.delete_version(policy_id, name)).version
        start = time.monotonic()
        while True:
            policy = await self.policy(policy_id)
            is_there = (
                policy.version != known_version if version is None else version <= policy.version
            )
            if is_there or time.monotonic() - start >= wait_s:
                break
            await asyncio.sleep(0.01)
        if version is not None and not is_there:
            raise RatoonError(
                ErrorCode.WEIGHTS_NOT_FOUND, f"version {version} is not kept", field="version"
            )
        return WeightManifest(
            policy_id=policy_id,
            version=policy.version if version is None else version,
            kind=WeightKind.FULL,
            files=tuple(self._weight_files()),
            created_at=5.25,
        )

    async def watch_weights(
        self, policy_id: str, known_version: int | None
    ) -> AsyncIterator[WeightManifest]:
        while True:
            newest = await self.weight_manifest(policy_id, None, known_version, 60.0)
            yield newest
            known_version = newest.version

    async def ack_weights(self, policy_id: str, ack: Acknowledgement) -> int | None:
        policy = await self.policy(policy_id)
        self.acks.append(ack)
        return policy.published_version

    async def gradient_manifest(self, policy_id: str, names: tuple[str, ...]) -> GradientManifest:
        policy = await self.policy(policy_id)
        data = "\n".join(names).encode()
        return GradientManifest(
            policy_id=policy_id,
            version=policy.version,
            file=WeightFile(name="g", size_bytes=len(data), digest=self.add_file(data)),
            seqs=(1, 3),
            trained_tokens=7,
            num_sequences=5,
            num_groups=2,
        )

    def _weight_files(self) -> list[WeightFile]:
        return [
            WeightFile(
                name=str(path.relative_to(self._folder)),
                size_bytes=path.stat().st_size,
                digest=xxhash.xxh3_128_hexdigest(path.read_bytes()),
            )
            for path in sorted(self._folder.rglob("*"))
            if path.is_file()
        ]

    async def fetch_chunk(self, policy_id: str, digest: str, offset: int, length: int) -> bytes:
        if digest not in self.files:
            raise RatoonError(ErrorCode.WEIGHTS_NOT_FOUND, "no such file", field="digest")
        data = self.files[digest]
        if offset >= len(data) > 0:
            raise RatoonError(
                ErrorCode.RANGE_NOT_SATISFIABLE, f"the file has {len(data)} bytes", field="offset"
            )
        return data[offset : offset + length]

    async def rollouts(self, policy_id: str, seq: int) -> StepRollouts:
        await self.policy(policy_id)
        if seq not in self.kept:
            raise RatoonError(ErrorCode.ROLLOUTS_NOT_FOUND, f"none of seq {seq}", field="seq")
        step = StepRollouts(forest=PrefixForest(parent=[-1], num_tokens=[3], num_rollouts=[1]))
        step.forest.reward_mean.append(math.nan)
        for kept in self.kept[seq]:
            listed = step.rollouts.add()
            listed.CopyFrom(kept)
            for name in ("tokens", "gaps"):
                listed.ClearField(name)
        return step

    async def rollout(self, policy_id: str, seq: int, group: int, rollout: int) -> KeptRollout:
        await self.rollouts(policy_id, seq)
        for kept in self.kept[seq]:
            if (kept.group, kept.rollout) == (group, rollout):
                return KeptRollout.FromString(kept.SerializeToString())
        raise RatoonError(ErrorCode.ROLLOUTS_NOT_FOUND, "it is not kept", field="rollout")

    async def weight_file(self, policy_id: str, version: int, name: str) -> tuple[Path, WeightFile]:
        manifest = await self.weight_manifest(policy_id, version)
        for file in manifest.files:
            if file.name == name:
                return self._folder / name, file
        raise RatoonError(ErrorCode.WEIGHTS_NOT_FOUND, f"no file {name}", field="name")

    async def backends(self) -> tuple[BackendInfo, ...]:
        return (
            BackendInfo(
                op="tree_attention", name="reference", available=True, unavailable_reason=""
            ),
            BackendInfo(
                op="tree_attention", name="hopper", available=False, unavailable_reason="no GPU"
            ),
        )

    def record_metrics(self, changes: Sequence[Change]) -> None:
        self.metrics += changes

    async def metrics_text(self) -> bytes:
        return b"# HELP ratoon_operations_total Operations.\n"


class FakeSampler:
    """Answers each sample with the tokens of the prompt; `asked` has what it was asked.

    With `hold` it answers nothing, and notes in `cancelled` whose caller leaves.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Weights, tuple[int, ...], SamplingParams]] = []
        self.cancelled = asyncio.Event()
        self.hold = False

    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult:
        self.asked.append((weights, prompt, sampling))
        if self.hold:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        sequence = SampledSequence(
            tokens=prompt, logprobs=(-0.5,) * len(prompt), stop_reason=StopReason.STOP
        )
        return SampleResult(
            sequences=(sequence,) * sampling.num_samples,
            version=weights.version,
            prompt_logprobs=(float("nan"), *[-0.25] * (len(prompt) - 1)),
            topk_prompt_tokens=(),
            topk_prompt_logprobs=(),
            target_logprobs=tuple(-float(token) for token in sampling.target_tokens),
        )

    async def facts(self, model: ModelSpec) -> BaseFacts:
        return BaseFacts(
            vocab_size=INFO.vocab_size,
            max_sequence_tokens=INFO.max_sequence_tokens,
            media_tokens={},
        )

    async def close(self) -> None:
        pass


def service_of(engine: FakeEngine, limits: LimitsConfig, models_root: Path) -> PolicyService:
    """The service on a CPU, over this engine."""
    defaults = SpecDefaults(models_root=models_root, micro_batch_tokens=4096)
    return PolicyService(
        engine=engine, sampler=FakeSampler(), limits=limits, defaults=defaults, device="cpu"
    )
