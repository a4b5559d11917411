"""The calls of the Tinker wire as calls of the policy service.

A model is a policy under client sequencing, so (model_id, seq_id) is the key of a call, each seq is
one operation, and a future's id is the operation's: a retry is the same operation, and no state of
the wire is kept anywhere else. What is refused takes its seq, as the SDK counts on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from google.protobuf.unknown_fields import UnknownFieldSet

from ratoon.api import submissions
from ratoon.api.convert.checks import VERSION_NAME, policy_of_operation
from ratoon.api.gate import AuthorizedCall, Gate
from ratoon.api.service import PolicyService
from ratoon.api.tinker import bodies
from ratoon.api.tinker.answers import error_answer, json_answer, logprobs_answer, try_again
from ratoon.api.tinker.datums import batch_of, future_id, split_future
from ratoon.api.tinker.errors import no_kind, not_forward, not_loaded, renamed
from ratoon.api.tinker.losses import loss_of
from ratoon.api.tinker.names import (
    INFLIGHT,
    SAMPLER_WEIGHTS,
    UNNAMED,
    Model,
    checked_session,
    is_owned,
    model_of,
    new_session,
    not_found,
    weights_of,
)
from ratoon.api.tinker.runs import ATTENTION, MLP, Json, Runs, base_of, owner_of
from ratoon.api.tinker.samples import Samples
from ratoon.config import LimitsConfig, RatoonConfig
from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.log import get_logger
from ratoon.model.spec import PRESET_NAMES
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.v1 import operation_pb2, policy_pb2, rollout_pb2, service_pb2, training_pb2

_Keyed = TypeVar(
    "_Keyed",
    service_pb2.ForwardBackwardRequest,
    service_pb2.ForwardRequest,
    service_pb2.OptimStepRequest,
    service_pb2.SaveCheckpointRequest,
    service_pb2.LoadCheckpointRequest,
    service_pb2.PublishVersionRequest,
)
_Pass = TypeVar("_Pass", service_pb2.ForwardBackwardRequest, service_pb2.ForwardRequest)
# How long a future that is not done is held; the SDK gives up after 45 s, and asks again at once.
HOLD_S = 40.0
# Between two questions while the engine is away.
_AWAY_S = 0.5
# Fields that the log names at most.
_MAX_NAMED = 100
_UNEMBED = "train_unembed is not served: adapters leave the LM head as it is"
_FINAL = frozenset(
    {
        operation_pb2.OPERATION_STATE_DONE,
        operation_pb2.OPERATION_STATE_FAILED,
        operation_pb2.OPERATION_STATE_CANCELLED,
    }
)
_log = get_logger("tinker")


class TinkerCalls:
    """A method per call; all raise `RatoonError`, with fields named as on this wire."""

    def __init__(self, service: PolicyService, gate: Gate, config: RatoonConfig) -> None:
        self._service = service
        self._gate = gate
        self._config = config.tinker
        self._limits: LimitsConfig = config.limits
        self.runs = Runs(service, config.models_folder)
        self.samples = Samples(service, gate, config.tinker)
        # (call, field) of fields that the log has named.
        self._unknown: set[tuple[str, str]] = set()

    def note_unknown(self, call: str, fields: Iterable[str]) -> None:
        """Count a request with fields that are not known, and log each once."""
        names = sorted(set(fields))
        if not names:
            return
        self._service.record_unknown_fields(call)
        for name in names:
            if (call, name) not in self._unknown and len(self._unknown) < _MAX_NAMED:
                self._unknown.add((call, name))
                _log.warning("unknown field ignored", call=call, field=shown(name))

    # Sessions.

    async def client_config(self) -> Json:
        limits = self._limits
        return {
            "proto_compress_fwdbwd": False,
            # Else older SDKs make a model and load another's weights into it, which is refused.
            "create_model_via_load_weights": True,
            "fwdbwd_max_chunk_len": min(limits.max_groups, limits.max_sequences),
            "fwdbwd_max_chunk_bytes_count": limits.max_body_bytes * 3 // 4,
            # Each holds a request; others of the key need some, too.
            "sample_max_concurrent_requests": max(
                1, limits.max_requests_in_flight_of_caller * 3 // 4
            ),
        }

    async def create_session(self, authorized: AuthorizedCall, _: bodies.CreateSession) -> Json:
        return {
            "session_id": new_session(owner_of(authorized)),
            "type": "create_session",
            "warning_message": _UNEMBED,
        }

    async def finish_session(self, authorized: AuthorizedCall, session_id: str) -> Json:
        """Put the session's models away; a call of one brings it back."""
        for policy in await self.runs.of_session(authorized, session_id):
            if policy.state == policy_pb2.POLICY_STATE_READY:
                request = service_pb2.ReleasePolicyRequest(policy_id=policy.spec.policy_id)
                try:
                    await self._gate.run(authorized, self._service.release_policy, request)
                except RatoonError as error:
                    # It ends by itself.
                    _log.info("model not put away", policy_id=request.policy_id, why=error.message)
        return {}

    # Models.

    async def create_model(self, authorized: AuthorizedCall, body: bodies.CreateModel) -> Json:
        session = checked_session(body.session_id, owner_of(authorized))
        model = Model(session=session, number=body.model_seq_id)
        spec = self._spec(model)
        if body.base_model in PRESET_NAMES:
            spec.preset = body.base_model
        else:
            spec.model_folder = body.base_model
        lora = body.lora_config
        if lora is not None:
            spec.lora.rank, spec.lora.alpha = lora.rank, self._config.lora_alpha
            spec.lora.target_modules.extend(_targets(lora))
            if lora.train_unembed:
                _log.info("train_unembed ignored", policy_id=spec.policy_id, why=_UNEMBED)
        # A retry without a seed makes the same adapter.
        seed = None if lora is None else lora.seed
        spec.seed = zlib.crc32(spec.policy_id.encode()) if seed is None else seed
        return await self._create(authorized, model, spec)

    # Training.

    async def forward_backward(
        self, authorized: AuthorizedCall, body: tinker_pb2.ForwardBackwardRequest
    ) -> Json:
        model = model_of(body.model_id, owner_of(authorized))
        if body.seq_id < 1:
            raise invalid("seq_id", body.seq_id, "at least 1")
        if body.forward_only:
            request = service_pb2.ForwardRequest()
            return await self._pass(authorized, model, body, request, self._service.forward)
        request = service_pb2.ForwardBackwardRequest(with_logprobs=service_pb2.LOGPROBS_OF_ALL)
        call = self._service.forward_backward
        return await self._pass(authorized, model, body, request, call)

    async def _pass(
        self,
        authorized: AuthorizedCall,
        model: Model,
        body: tinker_pb2.ForwardBackwardRequest,
        request: _Pass,
        call: Callable[[_Pass], Awaitable[operation_pb2.Operation]],
    ) -> Json:
        """Submit a forward, or a forward and backward, of the body's datums."""
        note = tinker_pb2.FutureNote()

        async def run(_: object) -> operation_pb2.Operation:
            loss, config = loss_of(body)
            if body.forward_only and body.loss_fn != "cross_entropy":
                raise not_forward(body.loss_fn)
            batch = await asyncio.to_thread(
                batch_of,
                body.data,
                loss,
                forward_only=body.forward_only,
                max_datums=min(self._limits.max_groups, self._limits.max_sequences),
            )
            note.CopyFrom(batch.note)
            future_id("", note)
            whole = type(request).FromString(request.SerializeToString())
            whole.batch.CopyFrom(rollout_pb2.RolloutBatch(groups=batch.groups))
            if isinstance(whole, service_pb2.ForwardBackwardRequest):
                whole.loss.CopyFrom(config)
            return await call(whole)

        operation = await self._sequenced(authorized, model, body.seq_id, request, run)
        return {
            "request_id": future_id(operation.operation_id, note),
            "model_id": model.model_id,
        }

    async def optim_step(self, authorized: AuthorizedCall, body: bodies.OptimStep) -> Json:
        adam = body.adam_params
        request = service_pb2.OptimStepRequest(
            optim=training_pb2.OptimStepConfig(
                learning_rate=adam.learning_rate,
                beta1=adam.beta1,
                beta2=adam.beta2,
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                max_grad_norm=adam.grad_clip_norm,
                divide_by=training_pb2.DIVIDE_BY_NONE,
            ),
            allow_empty=True,
            discard_on_poison=True,
        )
        model = model_of(body.model_id, owner_of(authorized))
        return await self._future(authorized, model, body.seq_id, request, self._service.optim_step)

    # Saved weights.

    async def save_weights(self, authorized: AuthorizedCall, body: bodies.SaveWeights) -> Json:
        request = service_pb2.SaveCheckpointRequest(
            checkpoint_id=f"seq-{body.seq_id}" if body.path is None else body.path,
            overwrite=body.overwrite,
            ttl_s=body.ttl_seconds,
        )
        model = model_of(body.model_id, owner_of(authorized))

        async def run(request: service_pb2.SaveCheckpointRequest) -> operation_pb2.Operation:
            if not request.checkpoint_id:
                raise invalid("path", "an empty name", "a name")
            return await self._service.save_checkpoint(request)

        return await self._future(authorized, model, body.seq_id, request, run)

    async def save_weights_for_sampler(
        self, authorized: AuthorizedCall, body: bodies.SaveWeightsForSampler
    ) -> Json:
        """Publish a version: under a name, or for a sampling session of its own.

        `inflight`: all such sessions of the model sample from the newest version that was so
        saved, which takes over the name of the one before.
        """
        is_inflight = body.kind == "inflight"
        is_unnamed = body.path is None and body.sampling_session_seq_id is not None
        name, ttl_s = body.path, body.ttl_seconds
        if name is None:
            name = f"{UNNAMED if is_unnamed else 'seq-'}{body.seq_id}"
        if ttl_s is None and is_unnamed:
            ttl_s = self._config.unnamed_ttl_s
        request = service_pb2.PublishVersionRequest(
            name=INFLIGHT if is_inflight else name, ttl_s=ttl_s, overwrite=is_inflight
        )
        model = model_of(body.model_id, owner_of(authorized))

        async def run(request: service_pb2.PublishVersionRequest) -> operation_pb2.Operation:
            name = body.path
            if name is not None and (not VERSION_NAME.fullmatch(name) or name.startswith(UNNAMED)):
                expected = f"[a-zA-Z0-9._-]{{1,64}}, and not to begin with {UNNAMED}"
                raise invalid("path", shown(name), expected)
            if body.kind not in ("snapshot", "inflight"):
                raise no_kind(body.kind)
            if is_inflight and not is_unnamed:
                raise invalid("kind", "inflight", "snapshot, where a path is given")
            return await self._service.publish_version(request)

        return await self._future(authorized, model, body.seq_id, request, run)

    async def load_weights(self, authorized: AuthorizedCall, body: bodies.LoadWeights) -> Json:
        """Load weights: of the model itself, or into a new model of a session."""
        owner = owner_of(authorized)
        if body.session_id is not None and body.model_seq_id is not None:
            session = checked_session(body.session_id, owner)
            model = Model(session=session, number=body.model_seq_id)
            return await self._create_from(authorized, model, body)
        if body.model_id is None or body.seq_id is None:
            expected = "model_id with seq_id, or session_id with model_seq_id"
            raise invalid("model_id", "neither", expected)
        model = model_of(body.model_id, owner)

        async def run(request: service_pb2.LoadCheckpointRequest) -> operation_pb2.Operation:
            source, request.checkpoint_id = weights_of(body.path, owner)
            if source != model or not body.optimizer:
                raise not_loaded()
            return await self._service.load_checkpoint(request)

        request = service_pb2.LoadCheckpointRequest()
        return await self._future(authorized, model, body.seq_id, request, run)

    async def delete_checkpoint(
        self, authorized: AuthorizedCall, model_id: str, checkpoint_id: str
    ) -> None:
        model, name, of_version = _saved(authorized, model_id, checkpoint_id)
        if of_version:
            version = service_pb2.DeleteVersionRequest(policy_id=model.policy_id, name=name)
            await self._gate.run(authorized, self._service.delete_version, version)
            return
        request = service_pb2.DeleteCheckpointRequest(policy_id=model.policy_id, checkpoint_id=name)
        await self._gate.run(authorized, self._service.delete_checkpoint, request)

    async def set_ttl(
        self, authorized: AuthorizedCall, body: bodies.Ttl, model_id: str, checkpoint_id: str
    ) -> None:
        """Have saved weights expire in `ttl_seconds`, from now; None: never."""
        model, name, of_version = _saved(authorized, model_id, checkpoint_id)

        async def run(request: service_pb2.GetPolicyRequest) -> service_pb2.GetPolicyRequest:
            await self._service.set_ttl(
                model.policy_id, name, body.ttl_seconds, of_version=of_version
            )
            return request

        request = service_pb2.GetPolicyRequest(policy_id=model.policy_id)
        await self._gate.run(authorized, run, request)

    # Futures.

    async def retrieve_future(
        self, authorized: AuthorizedCall, body: bodies.RetrieveFuture
    ) -> Json | bytes:
        """Answer a future: its result, `bytes` of a protobuf message where it has log-probs."""
        owner = owner_of(authorized)
        operation_id, note = split_future(body.request_id)
        if note.sample:
            return await self.samples.answer(
                authorized, body.request_id, operation_id, note, HOLD_S
            )
        if not is_owned(policy_of_operation(operation_id), owner):
            raise not_found(ErrorCode.OPERATION_NOT_FOUND)
        request = service_pb2.GetOperationRequest(operation_id=operation_id)
        try:
            operation = await self._gate.run(authorized, self._held, request)
        except RatoonError as error:
            if error.code is not ErrorCode.SEQ_GAP:
                raise
            return error_answer(error)
        if operation.state not in _FINAL:
            return try_again(body.request_id)
        if operation.state != operation_pb2.OPERATION_STATE_DONE:
            return error_answer(_failure(operation))
        match operation.WhichOneof("result"):
            case "forward":
                result = operation.forward
            case "step" if operation.kind == operation_pb2.OPERATION_KIND_FORWARD_BACKWARD:
                result = operation.step
            case _:
                return json_answer(operation, owner)
        try:
            output = await self._output(operation.policy_id, result)
        except RatoonError as error:
            if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                raise
            return error_answer(error)
        size = output.ByteSize()
        return await asyncio.to_thread(logprobs_answer, output, result.report, note, size)

    async def _held(self, request: service_pb2.GetOperationRequest) -> operation_pb2.Operation:
        """Return the operation once it has ended, or as it stands after `HOLD_S`.

        An engine that is away is waited for: the SDK would ask again without a pause.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + HOLD_S
        operation = operation_pb2.Operation()
        while clock() < deadline:
            asked = service_pb2.GetOperationRequest(
                operation_id=request.operation_id, wait_s=max(deadline - clock(), 0.0)
            )
            try:
                operation = await self._service.get_operation(asked)
            except RatoonError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(_AWAY_S)
                continue
            if operation.state in _FINAL:
                break
        return operation

    async def _output(
        self, policy_id: str, result: operation_pb2.ForwardResult | operation_pb2.StepResult
    ) -> training_pb2.ForwardOutput:
        """Return the log-probs of a result, inline or from its file. Raises WEIGHTS_NOT_FOUND."""
        if result.HasField("inline"):
            return result.inline
        data, piece = bytearray(), self._limits.max_fetch_bytes
        while len(data) < result.file.size_bytes:
            request = service_pb2.FetchWeightsRequest(
                policy_id=policy_id,
                digest=result.file.digest,
                offset=len(data),
                length=min(piece, result.file.size_bytes - len(data)),
            )
            data += (await self._service.fetch_weights(request)).data
        return await asyncio.to_thread(training_pb2.ForwardOutput.FromString, bytes(data))

    # What the calls share.

    async def _future(
        self,
        authorized: AuthorizedCall,
        model: Model,
        seq: int,
        request: _Keyed,
        call: Callable[[_Keyed], Awaitable[operation_pb2.Operation]],
    ) -> Json:
        operation = await self._sequenced(authorized, model, seq, request, call)
        return {"request_id": operation.operation_id, "model_id": model.model_id}

    async def _sequenced(
        self,
        authorized: AuthorizedCall,
        model: Model,
        seq: int,
        request: _Keyed,
        call: Callable[[_Keyed], Awaitable[operation_pb2.Operation]],
    ) -> operation_pb2.Operation:
        """Make a sequenced call; if it is refused for what it says, that takes the seq too."""
        request.policy_id, request.key.seq = model.policy_id, seq

        async def run(request: _Keyed) -> operation_pb2.Operation:
            try:
                return await call(request)
            except RatoonError as err:
                error = renamed(err)
                request.key.consume = True
                if submissions.is_consumed(request, err):
                    await self._service.refuse(request, error)
                raise error from err

        return await self._gate.run(authorized, run, request)

    def _spec(self, model: Model) -> policy_pb2.PolicySpec:
        return policy_pb2.PolicySpec(
            policy_id=model.policy_id,
            sequencing=policy_pb2.SEQUENCING_CLIENT,
            publish=policy_pb2.PublishConfig(kind=policy_pb2.PUBLISH_KIND_ON_REQUEST),
            idle_ttl_s=self._config.idle_ttl_s,
            dtype=policy_pb2.ModelDtype.Value(f"MODEL_DTYPE_{self._config.dtype.upper()}"),
        )

    async def _create_from(
        self, authorized: AuthorizedCall, model: Model, body: bodies.LoadWeights
    ) -> Json:
        source, name = weights_of(body.path, owner_of(authorized))
        theirs = (await self.runs.policy(source.policy_id)).spec
        if body.base_model not in (None, base_of(theirs)):
            raise invalid(
                "base_model", shown(body.base_model), f"{base_of(theirs)}, the weights' own"
            )
        spec = self._spec(model)
        spec.seed, spec.dtype = theirs.seed, theirs.dtype
        if theirs.HasField("preset"):
            spec.preset = theirs.preset
        else:
            spec.model_folder = theirs.model_folder
        if theirs.HasField("lora"):
            spec.lora.CopyFrom(theirs.lora)
        spec.from_checkpoint.policy_id = source.policy_id
        spec.from_checkpoint.checkpoint_id = name
        spec.from_checkpoint.with_optimizer = body.optimizer
        return await self._create(authorized, model, spec)

    async def _create(
        self, authorized: AuthorizedCall, model: Model, spec: policy_pb2.PolicySpec
    ) -> Json:
        request = service_pb2.CreatePolicyRequest(spec=spec)
        operation = await self._gate.run(authorized, self._service.create_policy, request)
        return {"request_id": operation.operation_id, "model_id": model.model_id}


def _failure(operation: operation_pb2.Operation) -> RatoonError:
    detail = operation.error
    code = ErrorCode(detail.code) if detail.code else ErrorCode.CANCELLED
    return renamed(RatoonError(code, detail.message or "it was cancelled", field=detail.field))


def _targets(lora: bodies.Lora) -> tuple[str, ...]:
    """Return the projections to adapt; none: all. Raises INVALID_ARGUMENT where none is left."""
    if lora.train_attn and lora.train_mlp:
        return ()
    if not (lora.train_attn or lora.train_mlp):
        raise invalid("lora_config", "neither train_attn nor train_mlp", "one of them")
    return ATTENTION if lora.train_attn else MLP


def _saved(
    authorized: AuthorizedCall, model_id: str, checkpoint_id: str
) -> tuple[Model, str, bool]:
    """Return the model and name of `KIND/NAME`, and whether they are weights to sample from."""
    owner = owner_of(authorized)
    model = model_of(model_id, owner)
    of_version = checkpoint_id.startswith(f"{SAMPLER_WEIGHTS}/")
    path = f"tinker://{model.model_id}/{checkpoint_id}"
    _, name = weights_of(path, owner, SAMPLER_WEIGHTS if of_version else "weights")
    return model, name, of_version


def unknown_of(message: tinker_pb2.ForwardBackwardRequest) -> list[str]:
    """Return the numbers of fields of a request, and of its first datum, that are not known."""
    numbers = [f"field {one.field_number}" for one in UnknownFieldSet(message)]
    spans = {3, 4}
    if message.data:
        own = UnknownFieldSet(message.data[0])
        numbers += [f"data.{one.field_number}" for one in own if one.field_number not in spans]
    return numbers
