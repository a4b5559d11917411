"""A sample's request and answer between the Tinker wire and the service. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.api.tinker import bodies
from ratoon.api.tinker.names import Sampler, not_found
from ratoon.errors import ErrorCode, invalid, shown, unsupported
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.v1 import sampling_pb2, service_pb2

# Most tokens of a prompt: the future's id has them.
MAX_PROMPT = 2**17
# A log-prob where there is none, as the SDK's own service has it.
_NO_LOGPROB = -99999.0


def sample_request(
    body: bodies.Asample, sampler: Sampler
) -> tuple[service_pb2.SampleRequest, tinker_pb2.Tensor | None]:
    """Return the request, and the ids of `target_prompt_logprobs` for its answer.

    Raises UNSUPPORTED for what would be answered without what it asks for, INVALID_ARGUMENT.
    """
    for field, asked in (
        ("topk_sample_logprobs", body.topk_sample_logprobs > 0),
        ("prompt_alt_tokens_k", body.prompt_alt_tokens_k > 0),
        ("prompt_logprobs_last_n", body.prompt_logprobs_last_n is not None),
    ):
        if asked:
            raise unsupported(field, "a request for it", "none: it is not served")
    tokens = list[int]()
    for index, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            field, expected = f"prompt.chunks[{index}].type", "encoded_text: it is not served"
            raise unsupported(field, shown(chunk.type), expected)
        tokens += chunk.tokens
    if len(tokens) > MAX_PROMPT:
        raise invalid("prompt", f"{len(tokens)} tokens", f"at most {MAX_PROMPT}")
    asked, texts, ids = body.sampling_params, list[str](), list[int]()
    for stop in [asked.stop] if isinstance(asked.stop, str) else asked.stop or ():
        (texts if isinstance(stop, str) else ids).append(stop)  # pyright: ignore[reportArgumentType]
    request = service_pb2.SampleRequest(
        policy_id="" if sampler.model is None else sampler.model.policy_id,
        name=sampler.name,
        prompt=tokens,
        sampling=sampling_pb2.SamplingParams(
            num_samples=body.num_samples,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_k=max(asked.top_k, 0),
            top_p=asked.top_p,
            seed=asked.seed,
            stop=texts,
            stop_token_ids=ids,
            # An empty list asks for no end at all, not even the model's own.
            ignore_eos=asked.stop == [],
            prompt_logprobs=bool(body.prompt_logprobs),
            topk_prompt_logprobs=body.topk_prompt_logprobs,
        ),
    )
    if body.target_prompt_logprobs is None:
        return request, None
    tensor, places = _targets(body.target_prompt_logprobs, len(tokens))
    ids = _ids(tensor)
    request.sampling.target_places.extend(places[ids != -1].tolist())
    request.sampling.target_tokens.extend(ids[ids != -1].tolist())
    if not request.sampling.target_tokens:
        raise invalid("target_prompt_logprobs", "no id", "at least one")
    return request, tensor


def _targets(
    given: bodies.TensorData, num_prompt: int
) -> tuple[tinker_pb2.Tensor, NDArray[np.int64]]:
    """Return [P - 1, K] ids as a message, and the place in the prompt of each one that it has.

    Raises INVALID_ARGUMENT for a shape or a layout that does not fit.
    """
    field, num_rows = "target_prompt_logprobs", num_prompt - 1
    if len(given.shape) != 2 or given.shape[0] != num_rows:
        raise invalid(
            f"{field}.shape", given.shape, f"[{num_rows}, K], a row a place but the first"
        )
    ids = np.array(given.data, "<i8")
    tensor = tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_INT64, shape=given.shape)
    columns, num_columns = given.sparse_col_indices, given.shape[1]
    if given.sparse_crow_indices is None or columns is None:
        if len(ids) != num_rows * num_columns:
            expected = f"{num_rows * num_columns}, as its shape says"
            raise invalid(f"{field}.data", f"{len(ids)} ids", expected)
        tensor.dense = ids.tobytes()
        return tensor, np.repeat(np.arange(1, num_prompt), num_columns)
    ends = np.array(given.sparse_crow_indices, "<i8")
    counts = np.diff(ends)
    if len(ends) != num_prompt or ends[0] or ends[-1] != len(ids) or (counts < 0).any():
        expected = f"{num_prompt} numbers that rise from 0 to {len(ids)}"
        raise invalid(f"{field}.sparse_crow_indices", f"{len(ends)} numbers", expected)
    if len(columns) != len(ids) or max(columns, default=0) >= max(num_columns, 1):
        expected = f"{len(ids)} columns below {num_columns}"
        raise invalid(f"{field}.sparse_col_indices", f"{len(columns)} columns", expected)
    tensor.sparse_csr.values = ids.tobytes()
    tensor.sparse_csr.crow_indices = ends.tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    return tensor, np.repeat(np.arange(1, num_prompt), counts)


def _ids(tensor: tinker_pb2.Tensor) -> NDArray[np.int64]:
    is_dense = tensor.WhichOneof("layout") == "dense"
    return np.frombuffer(tensor.dense if is_dense else tensor.sparse_csr.values, "<i8")


def _set_targets(
    tensor: tinker_pb2.Tensor, targets: tinker_pb2.Tensor, found: NDArray[np.float32]
) -> None:
    """Fill in the log-probs of targets, 0 where none is asked for."""
    ids = _ids(targets)
    logprobs = np.zeros(len(ids), "<f4")
    logprobs[ids != -1] = found
    tensor.CopyFrom(targets)
    tensor.dtype = tinker_pb2.DTYPE_FLOAT32
    if targets.WhichOneof("layout") == "dense":
        tensor.dense = logprobs.tobytes()
    else:
        tensor.sparse_csr.values = logprobs.tobytes()


def sample_answer(
    result: sampling_pb2.SampleResult,
    request: service_pb2.SampleRequest,
    note: tinker_pb2.FutureNote,
) -> bytes:
    """Answer a sample: a serialized `SampleResponse`.

    Raises OPERATION_NOT_FOUND for a note that is not the request's.
    """
    answer = tinker_pb2.SampleResponse()
    for sequence in result.sequences:
        is_stop = sequence.stop_reason == sampling_pb2.STOP_REASON_STOP
        answer.sequences.add(
            stop_reason=tinker_pb2.STOP_REASON_STOP if is_stop else tinker_pb2.STOP_REASON_LENGTH,
            tokens=np.array(sequence.tokens, "<i4").tobytes(),
            logprobs=np.array(sequence.logprobs, "<f4").tobytes(),
        )
    answer.prompt_logprobs = np.array(result.prompt_logprobs, "<f4").tobytes()
    if k := request.sampling.topk_prompt_logprobs:
        logprobs = np.array(result.topk_prompt_logprobs, "<f4")
        answer.topk_prompt_logprobs.k = k
        answer.topk_prompt_logprobs.length = len(request.prompt)
        answer.topk_prompt_logprobs.token_ids = np.array(result.topk_prompt_tokens, "<i4").tobytes()
        answer.topk_prompt_logprobs.logprobs = np.nan_to_num(logprobs, nan=_NO_LOGPROB).tobytes()
    if note.HasField("targets"):
        try:
            found = np.array(result.target_logprobs, "<f4")
            _set_targets(answer.target_prompt_logprobs, note.targets, found)
        except ValueError as err:
            raise not_found(ErrorCode.OPERATION_NOT_FOUND) from err
    return answer.SerializeToString(deterministic=True)
