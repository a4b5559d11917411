"""Operations of the service as answers to a Tinker future.

Everything follows from the operation and the note in the future's id, so that any process gives the
same answer at any time. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from ratoon.api.tinker.names import UNNAMED, Model, Sampler, model_of_policy
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon_proto.codec import decode_tensor
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.v1 import operation_pb2 as wire
from ratoon_proto.v1.training_pb2 import ForwardOutput, StepReport

# Figures of a report by their name on the wire, where what follows the colon is how the client
# joins those of the parts of a batch.
_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rho:mean": "token_reduction",
        "unshared_tokens:sum": "unshared_tokens",
        "packed_tokens:sum": "packed_tokens",
        "trained_tokens:sum": "trained_tokens",
        "entropy:mean": "entropy",
        "kl:mean": "kl",
        "sampler_kl:mean": "sampler_kl",
        "sampler_gap:max": "sampler_gap_max",
        "ratio:mean": "ratio_mean",
        "ratio:max": "ratio_max",
        "ratio:min": "ratio_min",
        "clip_fraction_low:mean": "clip_fraction_low",
        "clip_fraction_high:mean": "clip_fraction_high",
    }
)
_STEP_METRICS = ("grad_norm", "learning_rate", "update_norm", "weight_norm")
_Json = dict[str, object]


def error_answer(error: RatoonError) -> _Json:
    """Answer a future that ends with `error`; `user` is what the caller can put right."""
    is_user = ERROR_TABLE[error.code].http < 500 and error.code is not ErrorCode.RESOURCE_EXHAUSTED
    return {"error": error.message, "category": "user" if is_user else "server"}


def try_again(request_id: str) -> _Json:
    return {"type": "try_again", "request_id": request_id, "queue_state": "active"}


def json_answer(operation: wire.Operation, owner: str) -> _Json:
    """Answer the future of an operation that is done and has no log-probs."""
    model = model_of_policy(operation.policy_id, owner)
    match operation.kind:
        case wire.OPERATION_KIND_CREATE_POLICY:
            return _created(operation, model)
        case wire.OPERATION_KIND_OPTIM_STEP:
            return {"metrics": _step_metrics(operation.step.report), "type": "optim_step"}
        case wire.OPERATION_KIND_SAVE_CHECKPOINT:
            path = model.path(operation.checkpoint.checkpoint_id)
            return {"path": path, "type": "save_weights"}
        case wire.OPERATION_KIND_LOAD_CHECKPOINT:
            return _loaded(model.path(operation.checkpoint.checkpoint_id), model)
        case wire.OPERATION_KIND_PUBLISH_VERSION:
            return _published(operation.named_version.name, model)
        case kind:
            raise AssertionError(f"no call of the wire is of kind {kind}")


def _created(operation: wire.Operation, model: Model) -> _Json:
    spec = operation.policy.spec
    if not spec.HasField("from_checkpoint"):
        return {"model_id": model.model_id, "type": "create_model"}
    # Whose key it is was judged when the model was made.
    source = model_of_policy(spec.from_checkpoint.policy_id, "")
    return _loaded(source.path(spec.from_checkpoint.checkpoint_id), model)


def _loaded(path: str, model: Model) -> _Json:
    return {"path": path, "model_id": model.model_id, "type": "load_weights"}


def _published(name: str, model: Model) -> _Json:
    is_unnamed = name.startswith(UNNAMED)
    sampler = Sampler(session=model.session, model=model, name=name)
    return {
        "path": sampler.path,
        "sampling_session_id": sampler.sampler_id if is_unnamed else None,
        "type": "save_weights_for_sampler",
    }


def _step_metrics(report: StepReport) -> dict[str, float]:
    found = {name: getattr(report, name) for name in _STEP_METRICS if report.HasField(name)}
    return {**found, "skipped": float(report.skipped)}


def logprobs_answer(
    output: ForwardOutput, report: StepReport, note: tinker_pb2.FutureNote, max_bytes: int
) -> bytes:
    """Answer a forward_backward: a serialized `ForwardBackwardOutput`.

    `max_bytes` bounds the arrays of `output`. Raises OPERATION_NOT_FOUND for another one's note.
    """
    logprobs = np.asarray(decode_tensor(output.logprobs, max_bytes=max_bytes), "<f4")
    offsets = np.asarray(decode_tensor(output.offsets, max_bytes=max_bytes), "<i8")
    logprobs = np.where(np.isnan(logprobs) | _not_next(note, len(logprobs)), 0, logprobs)
    answer = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(offsets) - 1)
    tensor = record.fields["logprobs"]
    tensor.data, tensor.offsets = logprobs.astype("<f4").tobytes(), (offsets * 4).tobytes()
    tensor.dtype = tinker_pb2.DTYPE_FLOAT32
    answer.metrics["loss:sum"] = _loss_sum(report, note, logprobs)
    for name, figure in _METRICS.items():
        has_presence = report.DESCRIPTOR.fields_by_name[figure].has_presence
        if not has_presence or cast("Message", report).HasField(figure):
            answer.metrics[name] = float(getattr(report, figure))
    return answer.SerializeToString(deterministic=True)


def _loss_sum(
    report: StepReport, note: tinker_pb2.FutureNote, logprobs: NDArray[np.floating]
) -> float:
    if note.weights:
        weights = np.frombuffer(note.weights, "<f4")
        if len(weights) != len(logprobs):
            raise _foreign()
        return float(-(weights.astype(np.float64) @ logprobs.astype(np.float64)))
    return report.loss * (report.trained_tokens if note.is_mean else 1)


def _not_next(note: tinker_pb2.FutureNote, length: int) -> NDArray[np.bool_] | np.bool_:
    if not note.not_next:
        return np.False_
    if len(note.not_next) != -(-length // 8):
        raise _foreign()
    return np.unpackbits(np.frombuffer(note.not_next, np.uint8), count=length).astype(np.bool_)


def _foreign() -> RatoonError:
    return RatoonError(ErrorCode.OPERATION_NOT_FOUND, "no such future")
