"""Sequenced requests to submissions: all validation before an operation takes a seq.

Pure and without I/O, as it runs in a thread. The result depends on the arguments alone, so a batch
has the same body and payload hash on every wire. Who sends a body names it by its digest: it is
hashed while it is written (`engine.client`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from google.protobuf.message import Message

from ratoon.api.convert.checks import (
    CHECKPOINT_ID,
    POLICY_ID,
    VERSION_NAME,
    at_least,
    matched,
    positive,
    read,
    read_enum,
    required,
)
from ratoon.api.convert.groups import raw_groups
from ratoon.config import LimitsConfig
from ratoon.engine.commands import (
    Command,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    NoKey,
    OperationKey,
    OptimStepCommand,
    PublishVersionCommand,
    RefusedCommand,
    RequestKey,
    SaveCheckpointCommand,
    SeqKey,
    Submission,
    UpdateCommand,
)
from ratoon.engine.files.paths import plain_path
from ratoon.engine.types import Policy
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.questions import asked_tokens, check_teachers
from ratoon.rollout.routes import RouteSizes
from ratoon.rollout.serial import BatchBytes
from ratoon.rollout.teacher import MAX_TEACHER_TOKENS
from ratoon.rollout.validate import BatchLimits, validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import check_optim, resolve_optim
from ratoon_proto.types import (
    BadRolloutAction,
    ImportMode,
    LogprobsOf,
    LossConfig,
    OperationKind,
    OptimStepConfig,
    ReferencePolicy,
)
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2

Groups = Iterable[rollout_pb2.RolloutGroup]
# Requests with a batch, whose groups may come from an upload, and all others that are sequenced.
BatchRequest = (
    service_pb2.UpdateRequest | service_pb2.ForwardBackwardRequest | service_pb2.ForwardRequest
)
PlainRequest = (
    service_pb2.OptimStepRequest
    | service_pb2.DiscardGradientsRequest
    | service_pb2.SaveCheckpointRequest
    | service_pb2.PublishVersionRequest
    | service_pb2.LoadCheckpointRequest
    | service_pb2.ImportWeightsRequest
)


_KINDS: Mapping[type[Message], OperationKind] = MappingProxyType(
    {
        service_pb2.UpdateRequest: OperationKind.UPDATE,
        service_pb2.ForwardBackwardRequest: OperationKind.FORWARD_BACKWARD,
        service_pb2.ForwardRequest: OperationKind.FORWARD,
        service_pb2.OptimStepRequest: OperationKind.OPTIM_STEP,
        service_pb2.DiscardGradientsRequest: OperationKind.DISCARD_GRADIENTS,
        service_pb2.SaveCheckpointRequest: OperationKind.SAVE_CHECKPOINT,
        service_pb2.PublishVersionRequest: OperationKind.PUBLISH_VERSION,
        service_pb2.LoadCheckpointRequest: OperationKind.LOAD_CHECKPOINT,
        service_pb2.ImportWeightsRequest: OperationKind.IMPORT_WEIGHTS,
    }
)


def with_batch(
    request: BatchRequest, policy: Policy, groups: Groups, limits: LimitsConfig
) -> Submission:
    """Validate a request with its batch. Raises INVALID_ARGUMENT, UNSUPPORTED naming the field."""
    key = operation_key(request, policy)
    action = BadRolloutAction.REFUSE
    if not isinstance(request, service_pb2.ForwardRequest):
        action = read_enum(request, "on_bad_rollout", BadRolloutAction, "on_bad_rollout")
    batch = _batch(groups, policy, limits, action)
    command = _batch_command(request, policy, batch, action)
    num_tokens = unshared_tokens(batch)
    if isinstance(command, UpdateCommand | ForwardBackwardCommand):
        num_tokens += asked_tokens(command.loss, batch)
    return Submission(
        policy_id=request.policy_id,
        key=key,
        command=command,
        body=BatchBytes(batch),
        num_tokens=num_tokens,
    )


def _batch_command(
    request: BatchRequest,
    policy: Policy,
    batch: RolloutBatch,
    action: BadRolloutAction,
) -> Command:
    version = _expected_version(request)
    has_reference = policy.spec.reference is not ReferencePolicy.NONE
    if isinstance(request, service_pb2.ForwardRequest):
        if request.use_reference and not has_reference:
            raise invalid("use_reference", "true", "a policy created with a reference")
        _check_teacher(request, policy, batch)
        return ForwardCommand(
            with_entropy=request.with_entropy,
            use_reference=request.use_reference,
            expected_version=version,
            body_digest="",
            num_teacher_tokens=request.num_teacher_tokens,
            with_teacher_logprobs=request.with_teacher_logprobs,
        )
    loss = _loss(request)
    resolved = resolve_loss(
        loss,
        batch,
        has_frozen_reference=has_reference,
        has_value_head=policy.spec.model.value_head,
    )
    assert policy.info is not None
    check_teachers(loss, batch, policy.info.vocab_size)
    if isinstance(request, service_pb2.ForwardBackwardRequest):
        logprobs_of = read_enum(request, "with_logprobs", LogprobsOf, "with_logprobs")
        if request.with_entropy and not request.with_logprobs:
            raise invalid("with_entropy", "true", "with_logprobs beside it")
        return ForwardBackwardCommand(
            loss=loss,
            expected_version=version,
            body_digest="",
            with_logprobs=logprobs_of if request.with_logprobs else None,
            with_entropy=request.with_entropy,
            on_bad_rollout=action,
        )
    optim = _optim(request)
    resolve_optim(optim, resolved.normalisation, policy.spec.optimizer)
    return UpdateCommand(
        loss=loss,
        optim=optim,
        expected_version=version,
        body_digest="",
        on_bad_rollout=action,
    )


def _check_teacher(
    request: service_pb2.ForwardRequest, policy: Policy, batch: RolloutBatch
) -> None:
    """What a Forward is to answer of tokens beside the rollouts' own."""
    assert policy.info is not None
    number, most = request.num_teacher_tokens, min(MAX_TEACHER_TOKENS, policy.info.vocab_size)
    if not 0 <= number <= most:
        raise invalid("num_teacher_tokens", number, f"0 to {most}")
    if not (number or request.with_teacher_logprobs):
        return
    if batch.sampling_mask is not None:
        field = "num_teacher_tokens" if number else "with_teacher_logprobs"
        raise invalid(field, "rollouts with a sampling_mask", "rollouts without")
    if not request.with_teacher_logprobs:
        return
    if number:
        raise invalid("with_teacher_logprobs", "true", "false beside num_teacher_tokens")
    if batch.teacher_tokens is None:
        raise invalid("with_teacher_logprobs", "true", "rollouts that carry teacher_tokens")


def without_batch(request: PlainRequest, policy: Policy) -> Submission:
    """Validate a request without a batch. Raises as `with_batch`."""
    key = operation_key(request, policy)
    return Submission(
        policy_id=request.policy_id, key=key, command=_plain_command(request, policy), body=b""
    )


def is_consumed(request: BatchRequest | PlainRequest, error: RatoonError) -> bool:
    """Whether a refused request takes its seq: it asks so, and what it says is at fault.

    What may pass, and a key that is wrong itself, takes none.
    """
    is_of_content = error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    has_key = request.key.WhichOneof("key") is not None
    return request.key.consume and has_key and is_of_content and not error.field.startswith("key")


def refused(request: BatchRequest | PlainRequest, policy: Policy, error: RatoonError) -> Submission:
    """The operation that a refused request becomes. Raises INVALID_ARGUMENT for its key."""
    key = operation_key(request, policy)
    content = type(request).FromString(request.SerializeToString())
    content.ClearField("key")
    digest = hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()
    command = RefusedCommand(
        kind=_KINDS[type(request)], error=error.to_dict(), request_digest=digest
    )
    return Submission(policy_id=request.policy_id, key=key, command=command, body=b"")


def _plain_command(request: PlainRequest, policy: Policy) -> Command:
    match request:
        case service_pb2.OptimStepRequest():
            optim = _optim(request)
            check_optim(optim, policy.spec.optimizer)
            return OptimStepCommand(
                optim=optim,
                expected_version=_expected_version(request),
                include_seqs=_include_seqs(request.include_seqs),
                allow_empty=request.allow_empty,
                discard_on_poison=request.discard_on_poison,
            )
        case service_pb2.DiscardGradientsRequest():
            return DiscardGradientsCommand()
        case service_pb2.SaveCheckpointRequest():
            if request.checkpoint_id:
                matched("checkpoint_id", request.checkpoint_id, CHECKPOINT_ID)
            return _save_command(request)
        case service_pb2.PublishVersionRequest():
            name = matched("name", request.name, VERSION_NAME)
            return PublishVersionCommand(
                name=name, overwrite=request.overwrite, ttl_s=_ttl_s(request)
            )
        case service_pb2.LoadCheckpointRequest():
            checkpoint_id = matched("checkpoint_id", request.checkpoint_id, CHECKPOINT_ID)
            return LoadCheckpointCommand(checkpoint_id=checkpoint_id)
        case service_pb2.ImportWeightsRequest():
            # The engine looks at the folder itself, once it knows that this is no retry.
            return ImportWeightsCommand(
                folder=plain_path("model_folder", request.model_folder),
                mode=read_enum(request, "mode", ImportMode, "mode"),
                reset_optimizer=request.reset_optimizer,
                expected_version=_expected_version(request),
            )


def _save_command(request: service_pb2.SaveCheckpointRequest) -> SaveCheckpointCommand:
    ttl_s = _ttl_s(request)
    if request.pinned and ttl_s is not None:
        raise invalid("ttl_s", ttl_s, "none of a pinned checkpoint")
    return SaveCheckpointCommand(
        checkpoint_id=request.checkpoint_id,
        overwrite=request.overwrite,
        pinned=request.pinned,
        ttl_s=ttl_s,
        keep_last=at_least("keep_last", request.keep_last, 0),
    )


def _ttl_s(
    request: service_pb2.SaveCheckpointRequest | service_pb2.PublishVersionRequest,
) -> float | None:
    return positive("ttl_s", request.ttl_s) if request.HasField("ttl_s") else None


def unshared_tokens(batch: RolloutBatch) -> int:
    """Prompt and response tokens of every sequence, each counted alone."""
    sequences_G, prompts_G = np.diff(batch.group_offsets), np.diff(batch.prompt_offsets)
    return int(sequences_G @ prompts_G) + len(batch.response_tokens)


def operation_key(request: BatchRequest | PlainRequest, policy: Policy) -> OperationKey:
    """The key of a sequenced call. Raises INVALID_ARGUMENT where the policy does not take it."""
    match request.key.WhichOneof("key"):
        case "seq":
            key = SeqKey(seq=request.key.seq)
        case "request_id":
            key = RequestKey(request_id=request.key.request_id)
        case None:
            key = NoKey()
    if request.HasField("key") or not isinstance(request, service_pb2.ForwardRequest):
        key.check(policy.spec.sequencing)
    return key


def _include_seqs(seqs: Sequence[int]) -> tuple[int, ...]:
    """The seqs of the window to include, ascending; their order in the request does not matter."""
    seen: set[int] = set()
    for index, seq in enumerate(seqs):
        if seq in seen:
            raise invalid(f"include_seqs[{index}]", seq, "each seq once")
        seen.add(at_least(f"include_seqs[{index}]", seq, 1))
    return tuple(sorted(seen))


def _batch(
    groups: Groups, policy: Policy, limits: LimitsConfig, action: BadRolloutAction
) -> RolloutBatch:
    """Raises POLICY_NOT_READY before the model, which bounds a batch, is loaded."""
    info = policy.info
    if info is None:
        raise RatoonError(
            ErrorCode.POLICY_NOT_READY,
            f"policy {policy.spec.policy_id} is {policy.state}",
            field="policy_id",
            got=str(policy.state),
            expected="ready",
        )
    bounds = BatchLimits(
        vocab_size=info.vocab_size,
        max_sequence_tokens=info.max_sequence_tokens,
        max_groups=limits.max_groups,
        max_sequences=limits.max_sequences,
        max_tokens=limits.max_tokens,
        routes=RouteSizes(
            layers=info.route_layers,
            num_experts=info.num_experts,
            experts_per_token=info.experts_per_token,
        ),
        sliding_window=info.sliding_window,
        media_tokens=info.media_tokens,
    )
    raw = raw_groups(groups, max_tokens=limits.max_tokens)
    return validate_groups(raw, bounds, drops_bad=action is BadRolloutAction.DROP)


def _loss(request: service_pb2.UpdateRequest | service_pb2.ForwardBackwardRequest) -> LossConfig:
    if not request.HasField("loss"):
        raise required("loss", "the loss of this call")
    return loss_request(request.loss)


def loss_request(message: training_pb2.LossConfig) -> LossConfig:
    """Check names and presence; `resolve_loss` checks the numbers against the batch.

    Raises INVALID_ARGUMENT naming the field below `loss`.
    """
    loss = read(message, LossConfig, "loss")
    for name, term in (("distillation", loss.distillation), ("kl", loss.kl)):
        for index, teacher in enumerate(() if term is None else term.teachers):
            field = f"loss.{name}.teachers[{index}]"
            matched(f"{field}.policy_id", teacher.policy_id, POLICY_ID)
            if teacher.version is not None:
                at_least(f"{field}.version", teacher.version, 0)
    if loss.staleness is not None:
        at_least("loss.staleness.max_versions", loss.staleness.max_versions, 0)
    return loss


def _optim(request: service_pb2.UpdateRequest | service_pb2.OptimStepRequest) -> OptimStepConfig:
    if not request.HasField("optim"):
        raise required("optim", "the optimizer step of this call")
    return read(request.optim, OptimStepConfig, "optim")


def _expected_version(
    request: BatchRequest | service_pb2.OptimStepRequest | service_pb2.ImportWeightsRequest,
) -> int | None:
    if not request.HasField("expected_version"):
        return None
    return at_least("expected_version", request.expected_version, 0)
