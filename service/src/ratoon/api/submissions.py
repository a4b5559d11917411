"""Sequenced requests to submissions: all validation before an operation takes a seq.

Pure and without I/O, as it runs in a thread. The result depends on the arguments alone, so a batch
has the same body, digest and payload hash on every wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ratoon.api.convert.checks import CHECKPOINT_ID, at_least, matched, required
from ratoon.api.convert.groups import raw_groups
from ratoon.api.convert.loss import loss_request, optim_request
from ratoon.api.convert.records import read_enum
from ratoon.config import LimitsConfig
from ratoon.engine.commands import (
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    NoKey,
    OperationKey,
    OptimStepCommand,
    RequestKey,
    SaveCheckpointCommand,
    SeqKey,
    Submission,
    UpdateCommand,
)
from ratoon.engine.files.model_folders import plain_path
from ratoon.engine.types import Policy
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.spec import ModelInfo
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.routes import RouteSizes
from ratoon.rollout.serial import batch_digest, batch_to_bytes
from ratoon.rollout.validate import BatchLimits, validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import check_optim, resolve_optim
from ratoon_proto.types import ImportMode, ReferencePolicy
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2

Groups = Iterable[rollout_pb2.RolloutGroup]


class _Keyed(Protocol):
    """A request with an operation key."""

    @property
    def key(self) -> service_pb2.OperationKey: ...


def update(
    request: service_pb2.UpdateRequest, policy: Policy, groups: Groups, limits: LimitsConfig
) -> Submission:
    """Raises INVALID_ARGUMENT or UNSUPPORTED naming the field, as all functions here do."""
    key = operation_key(request, policy)
    batch = _batch(groups, policy, limits)
    loss = loss_request(_loss(request))
    optim = optim_request(_optim(request))
    resolved = resolve_loss(loss, batch, has_frozen_reference=_has_reference(policy))
    resolve_optim(optim, resolved.normalisation, policy.spec.optimizer)
    body = batch_to_bytes(batch)
    command = UpdateCommand(
        loss=loss,
        optim=optim,
        expected_version=_expected_version(request),
        body_digest=batch_digest(body),
    )
    return _with_batch(request.policy_id, key, command, body, batch)


def forward_backward(
    request: service_pb2.ForwardBackwardRequest,
    policy: Policy,
    groups: Groups,
    limits: LimitsConfig,
) -> Submission:
    key = operation_key(request, policy)
    batch = _batch(groups, policy, limits)
    loss = loss_request(_loss(request))
    resolve_loss(loss, batch, has_frozen_reference=_has_reference(policy))
    body = batch_to_bytes(batch)
    command = ForwardBackwardCommand(
        loss=loss, expected_version=_expected_version(request), body_digest=batch_digest(body)
    )
    return _with_batch(request.policy_id, key, command, body, batch)


def forward(
    request: service_pb2.ForwardRequest, policy: Policy, groups: Groups, limits: LimitsConfig
) -> Submission:
    key = operation_key(request, policy) if request.HasField("key") else NoKey()
    if request.use_reference and not _has_reference(policy):
        raise invalid("use_reference", "true", "a policy created with a reference")
    batch = _batch(groups, policy, limits)
    body = batch_to_bytes(batch)
    command = ForwardCommand(
        with_entropy=request.with_entropy,
        use_reference=request.use_reference,
        expected_version=_expected_version(request),
        body_digest=batch_digest(body),
    )
    return _with_batch(request.policy_id, key, command, body, batch)


def optim_step(request: service_pb2.OptimStepRequest, policy: Policy) -> Submission:
    optim = optim_request(_optim(request))
    check_optim(optim, policy.spec.optimizer)
    command = OptimStepCommand(
        optim=optim,
        expected_version=_expected_version(request),
        include_seqs=_include_seqs(request.include_seqs),
    )
    return _without_body(request.policy_id, operation_key(request, policy), command)


def discard_gradients(request: service_pb2.DiscardGradientsRequest, policy: Policy) -> Submission:
    key = operation_key(request, policy)
    return _without_body(request.policy_id, key, DiscardGradientsCommand())


def save_checkpoint(request: service_pb2.SaveCheckpointRequest, policy: Policy) -> Submission:
    if request.checkpoint_id:
        matched("checkpoint_id", request.checkpoint_id, CHECKPOINT_ID)
    command = SaveCheckpointCommand(checkpoint_id=request.checkpoint_id)
    return _without_body(request.policy_id, operation_key(request, policy), command)


def load_checkpoint(request: service_pb2.LoadCheckpointRequest, policy: Policy) -> Submission:
    checkpoint_id = matched("checkpoint_id", request.checkpoint_id, CHECKPOINT_ID)
    command = LoadCheckpointCommand(checkpoint_id=checkpoint_id)
    return _without_body(request.policy_id, operation_key(request, policy), command)


def import_weights(request: service_pb2.ImportWeightsRequest, policy: Policy) -> Submission:
    """The folder itself is looked at by the engine, once it knows that this is no retry."""
    command = ImportWeightsCommand(
        folder=plain_path("model_folder", request.model_folder),
        mode=read_enum(request, "mode", ImportMode, "mode"),
        reset_optimizer=request.reset_optimizer,
        expected_version=_expected_version(request),
    )
    return _without_body(request.policy_id, operation_key(request, policy), command)


def unshared_tokens(batch: RolloutBatch) -> int:
    """Prompt and response tokens of every sequence, each counted alone."""
    sequences_G, prompts_G = np.diff(batch.group_offsets), np.diff(batch.prompt_offsets)
    return int(sequences_G @ prompts_G) + len(batch.response_tokens)


def operation_key(request: _Keyed, policy: Policy) -> OperationKey:
    """The key of a sequenced call. Raises INVALID_ARGUMENT where the policy does not take it."""
    key: OperationKey = NoKey()
    match request.key.WhichOneof("key"):
        case "seq":
            key = SeqKey(seq=request.key.seq)
        case "request_id":
            key = RequestKey(request_id=request.key.request_id)
        case None:
            pass
    key.check(policy.spec.sequencing)
    return key


def model_info(policy: Policy) -> ModelInfo:
    """The loaded model's description. Raises POLICY_NOT_READY before it is loaded."""
    if policy.info is None:
        raise RatoonError(
            ErrorCode.POLICY_NOT_READY,
            f"policy {policy.spec.policy_id} is {policy.state}",
            field="policy_id",
            got=str(policy.state),
            expected="ready",
        )
    return policy.info


def _include_seqs(seqs: Sequence[int]) -> tuple[int, ...]:
    """The seqs of the window to include, ascending; their order in the request does not matter."""
    seen: set[int] = set()
    for index, seq in enumerate(seqs):
        if seq in seen:
            raise invalid(f"include_seqs[{index}]", seq, "each seq once")
        seen.add(at_least(f"include_seqs[{index}]", seq, 1))
    return tuple(sorted(seen))


def _with_batch(
    policy_id: str,
    key: OperationKey,
    command: UpdateCommand | ForwardBackwardCommand | ForwardCommand,
    body: bytes,
    batch: RolloutBatch,
) -> Submission:
    return Submission(
        policy_id=policy_id,
        key=key,
        command=command,
        body=body,
        num_tokens=unshared_tokens(batch),
    )


def _without_body(
    policy_id: str,
    key: OperationKey,
    command: OptimStepCommand
    | DiscardGradientsCommand
    | SaveCheckpointCommand
    | LoadCheckpointCommand
    | ImportWeightsCommand,
) -> Submission:
    return Submission(policy_id=policy_id, key=key, command=command, body=b"")


def _batch(groups: Groups, policy: Policy, limits: LimitsConfig) -> RolloutBatch:
    info = model_info(policy)
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
    )
    return validate_groups(raw_groups(groups, max_tokens=limits.max_tokens), bounds)


def _has_reference(policy: Policy) -> bool:
    return policy.spec.reference is not ReferencePolicy.NONE


def _loss(
    request: service_pb2.UpdateRequest | service_pb2.ForwardBackwardRequest,
) -> training_pb2.LossConfig:
    if not request.HasField("loss"):
        raise required("loss", "the loss of this call")
    return request.loss


def _optim(
    request: service_pb2.UpdateRequest | service_pb2.OptimStepRequest,
) -> training_pb2.OptimStepConfig:
    if not request.HasField("optim"):
        raise required("optim", "the optimizer step of this call")
    return request.optim


def _expected_version(
    request: service_pb2.UpdateRequest
    | service_pb2.ForwardBackwardRequest
    | service_pb2.OptimStepRequest
    | service_pb2.ForwardRequest
    | service_pb2.ImportWeightsRequest,
) -> int | None:
    if not request.HasField("expected_version"):
        return None
    return at_least("expected_version", request.expected_version, 0)
