"""The policy service, independent of any wire: a request message in, a response message out.

Every request is validated before it reaches the engine. From then on it runs to its end even if the
caller leaves, when Serve cancels the handler. Requests that become operations are `acceptance`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ratoon.api.acceptance import Acceptance
from ratoon.api.answers import (
    FileChunk,
    checkpoint_message,
    operation_message,
    page_token,
    place_of,
    server_info,
    throttled,
)
from ratoon.api.contract import current_holder
from ratoon.api.convert.checks import (
    CHECKPOINT_ID,
    DIGEST,
    FILE_NAME,
    OPERATION_ID,
    POLICY_ID,
    RECEIVER_ID,
    VERSION_NAME,
    at_least,
    matched,
    not_negative,
    read,
    required,
    write,
)
from ratoon.api.convert.policy import SpecDefaults, base_name, policy_message, policy_spec
from ratoon.api.convert.sampling import sampling_params
from ratoon.api.submissions import BatchRequest, PlainRequest
from ratoon.config import LimitsConfig
from ratoon.engine.client import Engine, EngineClient
from ratoon.engine.refusals import policy_not_ready
from ratoon.engine.types import (
    Acknowledgement,
    Operation,
    OperationFilter,
    file_of,
)
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.metrics import REFUSALS, REQUEST_SECONDS, REQUESTS, TINKER_UNKNOWN_FIELDS
from ratoon.model.spec import ModelSpec
from ratoon.model.tokenizer import base_texts, tokenizer_of
from ratoon.sampler.port import AnySampler, BaseFacts, Weights
from ratoon.stream.files import digest_bytes
from ratoon.stream.versions import version_folder
from ratoon_proto.types import SamplingParams, WeightFile
from ratoon_proto.v1 import (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
    service_pb2,
    weights_pb2,
)

T = TypeVar("T")
PAGE_SIZE, MAX_PAGE_SIZE = 50, 500
POINTS, MAX_POINTS = 1000, 10_000
# A field of weight manifests that only the service's own start reads.
_NOT_SENT = ("made_by",)
# Maximum age of a Health answer, and how long the engine's answer may take.
HEALTH_S = 1.0
HEALTH_ANSWER_S = 5.0
# Seconds between two messages of a watched operation.
WATCH_INTERVAL_S = 0.25


class PolicyService:
    """A method per call of `ratoon.v1.PolicyService`; all raise `RatoonError`."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        sampler: AnySampler,
        limits: LimitsConfig,
        defaults: SpecDefaults,
        device: str,
    ) -> None:
        self._engine = engine
        self._sampler = sampler
        self._limits = limits
        self._defaults = defaults
        self._device = device
        # Facts of bases that are sampled without a policy; there are as many as model folders.
        self._facts: dict[ModelSpec, BaseFacts] = {}
        self._acceptance = Acceptance(engine, limits)
        self._health: asyncio.Task[str] | None = None
        self._asked_at = 0.0

    async def create_policy(
        self, request: service_pb2.CreatePolicyRequest
    ) -> operation_pb2.Operation:
        if not request.HasField("spec"):
            raise required("spec", "the policy to create")
        spec = await asyncio.to_thread(policy_spec, request.spec, self._defaults)
        return await self._message(
            await self._engine.finish(self._engine.call(Engine.create_policy, spec))
        )

    async def send_model_file(
        self, request: service_pb2.SendModelFileRequest
    ) -> service_pb2.SendModelFileResponse:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        digest = matched("digest", request.digest, DIGEST)
        size_bytes = at_least("size_bytes", request.size_bytes, 0)
        offset = at_least("offset", request.offset, 0)
        file = WeightFile(size_bytes=size_bytes, digest=digest)
        call = self._engine.call(Engine.put_model_file, policy_id, file, offset, request.data)
        return service_pb2.SendModelFileResponse(num_bytes=await self._engine.finish(call))

    async def delete_policy(
        self, request: service_pb2.DeletePolicyRequest
    ) -> operation_pb2.Operation:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        return await self._message(
            await self._engine.finish(self._engine.call(Engine.delete_policy, policy_id))
        )

    async def release_policy(self, request: service_pb2.ReleasePolicyRequest) -> policy_pb2.Policy:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        policy = await self._engine.finish(self._engine.call(Engine.release_policy, policy_id))
        return policy_message(policy, self._defaults.models_root)

    async def get_policy(self, request: service_pb2.GetPolicyRequest) -> policy_pb2.Policy:
        return policy_message(
            await self._acceptance.policy(request.policy_id), self._defaults.models_root
        )

    async def list_policies(
        self, request: service_pb2.ListPoliciesRequest
    ) -> service_pb2.ListPoliciesResponse:
        policies = await self._engine.call(Engine.policies)
        root = self._defaults.models_root
        return service_pb2.ListPoliciesResponse(
            policies=[policy_message(policy, root) for policy in policies]
        )

    async def _submit_batch(self, request: BatchRequest) -> operation_pb2.Operation:
        return await self._message(await self._acceptance.batch(request))

    async def _submit_plain(self, request: PlainRequest) -> operation_pb2.Operation:
        return await self._message(await self._acceptance.plain(request))

    # `submissions` says in what these calls differ.
    update = forward_backward = forward = _submit_batch
    optim_step = discard_gradients = save_checkpoint = load_checkpoint = _submit_plain
    import_weights = publish_version = _submit_plain

    async def refuse(
        self, request: BatchRequest | PlainRequest, refusal: RatoonError
    ) -> operation_pb2.Operation:
        """Submit the operation that takes a refused call's seq, and fails with the refusal."""
        return await self._message(await self._acceptance.refuse(request, refusal))

    async def upload_part(
        self, request: service_pb2.UploadPartRequest
    ) -> service_pb2.UploadPartResponse:
        return service_pb2.UploadPartResponse(num_bytes=await self._acceptance.part(request))

    async def get_operation(
        self, request: service_pb2.GetOperationRequest
    ) -> operation_pb2.Operation:
        operation_id = matched("operation_id", request.operation_id, OPERATION_ID)
        wait_s = min(not_negative("wait_s", request.wait_s), self._limits.max_wait_s)
        return await self._message(
            await self._engine.call(Engine.get_operation, operation_id, wait_s)
        )

    async def watch_operation(
        self, request: service_pb2.WatchOperationRequest
    ) -> AsyncGenerator[operation_pb2.Operation, None]:
        """The operation now and after each change, until it is final; see `throttled`."""
        operation_id = matched("operation_id", request.operation_id, OPERATION_ID)
        changes = self._engine.watch_operation(operation_id)
        async with aclosing(throttled(changes, interval_s=WATCH_INTERVAL_S)) as operations:
            async for operation in operations:
                yield await self._message(operation)

    async def list_operations(
        self, request: service_pb2.ListOperationsRequest
    ) -> service_pb2.ListOperationsResponse:
        """Operations of policies that the caller may see; outputs of Forwards are files."""
        asked = read(request, OperationFilter, "")
        if asked.policy_id:
            matched("policy_id", asked.policy_id, POLICY_ID)
        elif asked.seq:
            raise invalid("seq", asked.seq, "none without a policy_id")
        at_least("seq", asked.seq, 0)
        most = _bounded("page_size", request.page_size, PAGE_SIZE, MAX_PAGE_SIZE)
        after, policies = place_of(request.page_token, asked), current_holder().policies
        operations, goes_on = await self._engine.call(
            Engine.list_operations, asked, policies, after, most
        )

        def message() -> service_pb2.ListOperationsResponse:
            root = self._defaults.models_root
            return service_pb2.ListOperationsResponse(
                operations=[operation_message(o, root, forward_output=None) for o in operations],
                next_page_token=page_token(goes_on, asked),
            )

        return await asyncio.to_thread(message)

    async def list_steps(self, request: service_pb2.ListStepsRequest) -> service_pb2.StepHistory:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        after_seq = at_least("after_seq", request.after_seq, 0)
        before_seq = at_least("before_seq", request.before_seq, 0)
        max_points = _bounded("max_points", request.max_points, POINTS, MAX_POINTS)
        seqs = (after_seq, before_seq)
        history = await self._engine.call(
            Engine.list_steps, policy_id, tuple(request.figures), seqs, max_points
        )
        return await asyncio.to_thread(write, service_pb2.StepHistory(), history)

    async def list_versions(
        self, request: service_pb2.ListVersionsRequest
    ) -> service_pb2.VersionList:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        versions = await self._engine.call(Engine.list_versions, policy_id)
        return write(service_pb2.VersionList(), versions)

    async def cancel_operation(
        self, request: service_pb2.CancelOperationRequest
    ) -> operation_pb2.Operation:
        operation_id = matched("operation_id", request.operation_id, OPERATION_ID)
        return await self._message(
            await self._engine.finish(self._engine.call(Engine.cancel_operation, operation_id))
        )

    async def list_rollouts(
        self, request: service_pb2.ListRolloutsRequest
    ) -> rollout_pb2.StepRollouts:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        return await self._engine.rollouts(policy_id, at_least("seq", request.seq, 1))

    async def get_rollout(self, request: service_pb2.GetRolloutRequest) -> rollout_pb2.KeptRollout:
        policy = await self._acceptance.policy(request.policy_id)
        seq = at_least("seq", request.seq, 1)
        group, rollout = (
            at_least("group", request.group, 0),
            at_least("rollout", request.rollout, 0),
        )
        kept = await self._engine.rollout(policy.spec.policy_id, seq, group, rollout)
        base, root = policy.spec.model.base, self._defaults.models_root
        kept.texts.extend(await asyncio.to_thread(base_texts, base, root, kept.tokens))
        return kept

    async def list_checkpoints(
        self, request: service_pb2.ListCheckpointsRequest
    ) -> service_pb2.ListCheckpointsResponse:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        checkpoints = await self._engine.call(Engine.list_checkpoints, policy_id)
        answer = service_pb2.ListCheckpointsResponse()
        answer.checkpoints.extend(map(checkpoint_message, checkpoints))
        return answer

    async def delete_checkpoint(
        self, request: service_pb2.DeleteCheckpointRequest
    ) -> operation_pb2.CheckpointInfo:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        name = matched("checkpoint_id", request.checkpoint_id, CHECKPOINT_ID)
        call = self._engine.call(Engine.delete_checkpoint, policy_id, name)
        return checkpoint_message(await self._engine.finish(call))

    async def delete_version(
        self, request: service_pb2.DeleteVersionRequest
    ) -> operation_pb2.NamedVersion:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        name = matched("name", request.name, VERSION_NAME)
        call = self._engine.call(Engine.delete_version, policy_id, name)
        return write(operation_pb2.NamedVersion(), await self._engine.finish(call))

    async def set_ttl(
        self, policy_id: str, name: str, ttl_s: float | None, *, of_version: bool
    ) -> None:
        """Have a checkpoint, or a version's name, expire in `ttl_s` seconds; None: never."""
        call = self._engine.call(Engine.set_ttl, policy_id, name, ttl_s, of_version=of_version)
        await self._engine.finish(call)

    async def get_weight_manifest(
        self, request: service_pb2.GetWeightManifestRequest
    ) -> weights_pb2.WeightManifest:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        version = _version(request, "version")
        known_version = _version(request, "known_version")
        if None not in (version, known_version):
            raise invalid("known_version", known_version, "none beside a version")
        if request.name:
            matched("name", request.name, VERSION_NAME)
            if (version, known_version) != (None, None):
                raise invalid("name", request.name, "none beside version or known_version")
        wait_s = min(not_negative("wait_s", request.wait_s), self._limits.max_wait_s)
        manifest = await self._engine.call(
            Engine.weight_manifest,
            policy_id,
            version,
            known_version,
            wait_s,
            request.name,
            _version(request, "delta_from"),
        )
        return write(weights_pb2.WeightManifest(), manifest, skip=_NOT_SENT)

    async def watch_weights(
        self, request: service_pb2.WatchWeightsRequest
    ) -> AsyncGenerator[weights_pb2.WeightManifest, None]:
        """The newest manifest, once it is not of `known_version`, then those that follow."""
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        known_version = _version(request, "known_version")
        await self._acceptance.policy(policy_id)
        async for manifest in self._engine.watch_weights(policy_id, known_version):
            yield write(weights_pb2.WeightManifest(), manifest, skip=_NOT_SENT)

    async def ack_weights(
        self, request: service_pb2.AckWeightsRequest
    ) -> service_pb2.AckWeightsResponse:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        ack = Acknowledgement(
            receiver_id=matched("receiver_id", request.receiver_id, RECEIVER_ID),
            version=_version(request, "version"),
            holds_version=_version(request, "holds_version"),
            hold_s=not_negative("hold_s", request.hold_s),
        )
        if ack.holds_version is None and ack.hold_s:
            raise invalid("hold_s", ack.hold_s, "none without holds_version")
        most = self._limits.max_hold_s
        if ack.holds_version is not None and not 0 < ack.hold_s <= most:
            raise invalid("hold_s", ack.hold_s, f"above 0 and at most {most} seconds")
        newest = await self._engine.call(Engine.ack_weights, policy_id, ack)
        return service_pb2.AckWeightsResponse(published_version=newest)

    async def sample(
        self, request: service_pb2.SampleRequest, base: policy_pb2.PolicySpec | None = None
    ) -> sampling_pb2.SampleResult:
        """Sequences of a version that is published now; it stays what it is once it is read.

        `base`: sample from the base of this spec, which need be no policy's.
        """
        return await self.sampled(request, await self.to_sample(request, base))

    async def sampled(
        self, request: service_pb2.SampleRequest, how: tuple[Weights, SamplingParams]
    ) -> sampling_pb2.SampleResult:
        """Sequences of a request for which `to_sample` has returned `how`."""
        weights, params = how
        result = await self._sampler.sample(weights, tuple(request.prompt), params)
        return await asyncio.to_thread(write, sampling_pb2.SampleResult(), result)

    async def base_of(self, base: policy_pb2.PolicySpec) -> ModelSpec:
        """Return the model of a spec. Raises INVALID_ARGUMENT naming the field below `spec`."""
        return (await asyncio.to_thread(policy_spec, base, self._defaults)).model

    async def to_sample(
        self, request: service_pb2.SampleRequest, base: policy_pb2.PolicySpec | None = None
    ) -> tuple[Weights, SamplingParams]:
        """Return what `sample` samples from, and how. Raises what it refuses a request with."""
        if base is not None:
            policy, model = None, await self.base_of(base)
            info = self._facts.get(model) or await self._sampler.facts(model)
            self._facts[model] = info
        else:
            policy = await self._acceptance.policy(request.policy_id)
            model, info = policy.spec.published_model, policy.info
            if info is None:
                raise policy_not_ready(policy.spec.policy_id, policy.state, policy.failure)
        params = await asyncio.to_thread(sampling_params, request, info)
        root = self._defaults.models_root
        if params.stop and await asyncio.to_thread(tokenizer_of, model.base, root) is None:
            raise invalid("sampling.stop", "texts", "none: the model has no tokenizer")
        weights = Weights(
            policy_id="" if policy is None else policy.spec.policy_id,
            base=base_name(model.base, root),
            model=model,
            version=None,
            folder=None,
            digest="",
        )
        return (weights if policy is None else await self._of_version(weights, request)), params

    async def _of_version(self, weights: Weights, request: service_pb2.SampleRequest) -> Weights:
        """The weights that a request asks for. Raises what a manifest's call raises."""
        version, name = _version(request, "version"), request.name
        if request.base and version is not None:
            raise invalid("version", version, "none beside base")
        if name:
            matched("name", name, VERSION_NAME)
            if request.base or version is not None:
                raise invalid("name", name, "none beside version or base")
        if request.base:
            return weights
        manifest = await self._engine.call(
            Engine.weight_manifest, weights.policy_id, version, None, 0.0, name
        )
        return replace(
            weights,
            version=manifest.version,
            folder=version_folder(self._engine.paths(weights.policy_id).weights, manifest.version),
            digest=digest_bytes("".join(sorted(f.digest for f in manifest.files)).encode()),
        )

    async def get_gradient_manifest(
        self, request: service_pb2.GetGradientManifestRequest
    ) -> weights_pb2.GradientManifest:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        if not request.names:
            raise required("names", "at least one tensor")
        names = tuple(dict.fromkeys(request.names))
        manifest = await self._engine.call(Engine.gradient_manifest, policy_id, names)
        return write(weights_pb2.GradientManifest(), manifest)

    async def fetch_weights(self, request: service_pb2.FetchWeightsRequest) -> FileChunk:
        policy_id = matched("policy_id", request.policy_id, POLICY_ID)
        digest = matched("digest", request.digest, DIGEST)
        offset = at_least("offset", request.offset, 0)
        most = self._limits.max_fetch_bytes
        if not 1 <= request.length <= most:
            raise invalid("length", request.length, f"at least 1 and at most {most} bytes")
        data = await self._engine.fetch_chunk(policy_id, digest, offset, request.length)
        return await FileChunk.of(data)

    async def weight_file(self, policy_id: str, version: int, name: str) -> tuple[Path, WeightFile]:
        """A file of a published version, for HTTP ranges."""
        matched("policy_id", policy_id, POLICY_ID)
        at_least("version", version, 0)
        matched("name", name, FILE_NAME)
        return await self._engine.weight_file(policy_id, version, name)

    async def get_server_info(
        self, request: service_pb2.GetServerInfoRequest
    ) -> service_pb2.ServerInfo:
        backends = await self._engine.call(Engine.backends)
        return server_info(self._limits, device=self._device, backends=backends)

    async def health(self, request: service_pb2.HealthRequest) -> service_pb2.HealthResponse:
        """Whether the engine answers; a problem is text in the answer, not an error.

        It needs no key, so the engine is asked at most once per `HEALTH_S` seconds over all
        callers.
        """
        now = asyncio.get_running_loop().time()
        if self._health is None or (self._health.done() and now - self._asked_at >= HEALTH_S):
            self._asked_at = now
            self._health = asyncio.create_task(self._asked_health())
        return service_pb2.HealthResponse(status=await asyncio.shield(self._health))

    async def _asked_health(self) -> str:
        try:
            async with asyncio.timeout(HEALTH_ANSWER_S):
                await self._engine.call(Engine.check_well)
        except TimeoutError:
            return "engine: it does not answer"
        except RatoonError as error:
            return f"engine: {error.message}"
        return "ok"

    async def metrics_text(self) -> bytes:
        """Prometheus text of all processes."""
        return await self._engine.call(Engine.metrics_text)

    def record_request(self, *, transport: str, method: str, code: str, seconds: float) -> None:
        """Count an answered request. `code` is the wire's own: an HTTP status, a gRPC name."""
        self._engine.record_metrics(
            [
                REQUESTS.sample(1, transport, method, code),
                REQUEST_SECONDS.sample(seconds, transport, method),
            ]
        )

    def record_refusal(self, reason: str, key_id: str) -> None:
        """Count a call refused by the gate or by a limit."""
        self._engine.record_metrics([REFUSALS.sample(1, reason, key_id)])

    def record_unknown_fields(self, call: str) -> None:
        """Count a request of the Tinker wire with fields that are not known."""
        self._engine.record_metrics([TINKER_UNKNOWN_FIELDS.sample(1, call)])

    async def _message(self, operation: Operation) -> operation_pb2.Operation:
        """The wire form; log-probs are inline if they are small and not expired."""
        output, file = None, file_of(operation.result)
        if file is not None and file.size_bytes <= self._inline_bytes:
            try:
                output = await self._engine.fetch_chunk(
                    operation.policy_id, file.digest, 0, file.size_bytes
                )
            except RatoonError as error:
                if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                    raise
        return operation_message(operation, self._defaults.models_root, forward_output=output)

    @property
    def _inline_bytes(self) -> int:
        return min(self._limits.inline_result_bytes, self._limits.max_fetch_bytes)


def _bounded(field: str, value: int, default: int, most: int) -> int:
    """A number of a request, 0 for the default. Raises INVALID_ARGUMENT."""
    if not 0 <= value <= most:
        raise invalid(field, value, f"at least 1 and at most {most}; 0: {default}")
    return value or default


def _version(request: Any, field: str) -> int | None:
    """An optional version of a request. Raises INVALID_ARGUMENT."""
    return at_least(field, getattr(request, field), 0) if request.HasField(field) else None
