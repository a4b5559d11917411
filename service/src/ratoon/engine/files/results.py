"""Stores results as files: log-probs of a Forward, with an index of their rollouts, or of a
ForwardBackward.

`<digest>` is a serialized `ForwardOutput`; `<digest>.<operation>` is its sealed index, 16 bytes per
rollout. A loss with `from_forward` reads both. Old log-probs are found by the rollout's tokens,
mask and temperature, never by position alone, so they cannot belong to other tokens, and a
mini-batch of the Forward's batch finds its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.rollout.bad import as_sent
from ratoon.rollout.batch import RolloutBatch, sent_field
from ratoon.rollout.questions import Answer
from ratoon.stream.files import (
    DamagedFileError,
    digest_bytes,
    digest_file,
    fsync_file,
    fsync_folder,
    seal_bytes,
    temporary_name,
    unseal_bytes,
    write_atomic,
)
from ratoon_proto.codec import decode_tensor, encode_array
from ratoon_proto.types import ResultFile
from ratoon_proto.v1.tensor_pb2 import Tensor
from ratoon_proto.v1.training_pb2 import ForwardOutput

_KEY_BYTES = 16
_FIELD = "loss.old_logprobs.forward_operation_id"


def write_forward_output(
    folder: Path,
    operation_id: str,
    batch: RolloutBatch,
    logprobs_J: NDArray[np.floating],
    entropy_J: NDArray[np.floating] | None,
    *,
    is_reference: bool,
    teacher_JK: tuple[NDArray[np.int32], NDArray[np.floating]] | None = None,
    value_J: NDArray[np.floating] | None = None,
) -> tuple[str, int]:
    """Write both files; return the digest and the size in bytes of the output.

    `teacher_JK`: tokens and their log-probs.
    """
    output = _output(batch, logprobs_J, entropy_J)
    if teacher_JK is not None:
        tokens, logprobs = (encode_array(column) for column in teacher_JK)
        output.MergeFrom(ForwardOutput(teacher_tokens=tokens, teacher_logprobs=logprobs))
    if value_J is not None:
        output.values.CopyFrom(encode_array(value_J))
    data = output.SerializeToString(deterministic=True)
    digest = digest_bytes(data)
    keys = b"".join(_rollout_keys(batch, is_reference=is_reference))
    write_atomic(folder / f"{digest}.{operation_id.rpartition('.')[2]}", seal_bytes(keys))
    write_atomic(folder / digest, data)
    return digest, len(data)


def write_logprobs(
    folder: Path,
    batch: RolloutBatch,
    logprobs_J: NDArray[np.floating],
    entropy_J: NDArray[np.floating] | None,
) -> ResultFile:
    """Write a `ForwardOutput` that no loss reads by its rollouts."""
    data = _output(batch, logprobs_J, entropy_J).SerializeToString(deterministic=True)
    file = ResultFile(digest=digest_bytes(data), size_bytes=len(data))
    write_atomic(folder / file.digest, data)
    return file


def _output(
    batch: RolloutBatch,
    logprobs_J: NDArray[np.floating],
    entropy_J: NDArray[np.floating] | None,
) -> ForwardOutput:
    offsets, logprobs_J = as_sent(batch, logprobs_J)
    output = ForwardOutput(logprobs=encode_array(logprobs_J), offsets=encode_array(offsets))
    if entropy_J is not None:
        output.entropy.CopyFrom(encode_array(as_sent(batch, entropy_J)[1]))
    return output


def read_answer(data: bytes) -> Answer:
    """What a teacher's Forward has answered, from a serialized `ForwardOutput`."""
    output = ForwardOutput.FromString(data)

    def column(tensor: Tensor) -> NDArray[Any]:
        return decode_tensor(tensor, max_bytes=len(data))

    has_tokens = output.HasField("teacher_tokens")
    return Answer(
        logprobs=column(output.logprobs),
        tokens=column(output.teacher_tokens) if has_tokens else None,
        token_logprobs=column(output.teacher_logprobs) if has_tokens else None,
    )


def keep_result(folder: Path, write: Callable[[Path], None]) -> tuple[str, int]:
    """Keep the new file that `write` makes at the given path; return its digest and its size in
    bytes.

    The digest becomes its name. Raises what `write` raises; nothing is kept then.
    """
    temporary = temporary_name(folder / "result")
    try:
        write(temporary)
        digest, size_bytes = digest_file(temporary), temporary.stat().st_size
        fsync_file(temporary)
        temporary.replace(folder / digest)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(folder)
    return digest, size_bytes


def read_old_logprobs(keys_path: Path, batch: RolloutBatch) -> NDArray[np.floating]:
    """Reads old log-probs of `batch`, [J] in the dtype they were taken in, from the Forward's
    files.

    Raises INVALID_ARGUMENT if the files have expired, are damaged, are of the reference, or lack a
    rollout of the batch.
    """
    output, sources = _read(keys_path, batch)
    return _at_rollouts(output, output.logprobs, batch, sources)


def read_entropy(keys_path: Path, batch: RolloutBatch) -> NDArray[np.floating]:
    """Reads entropies in the same way. Raises INVALID_ARGUMENT also if the Forward has kept
    none."""
    output, sources = _read(keys_path, batch)
    if not output.HasField("entropy"):
        raise invalid("loss.top_entropy_share", "a Forward without", "a Forward with_entropy")
    return _at_rollouts(output, output.entropy, batch, sources)


def num_rollouts(keys_path: Path) -> int:
    """Number of rollouts that the Forward ran. Raises what `read_old_logprobs` raises for lost
    files."""
    return len(_read_keys(keys_path)) // _KEY_BYTES


def _at_rollouts(
    output: ForwardOutput, column: Tensor, batch: RolloutBatch, sources: list[int]
) -> NDArray[np.floating]:
    """Values of the batch's rollouts, [J], at the Forward's `sources`."""
    most = output.ByteSize()
    values = cast("NDArray[np.floating]", decode_tensor(column, max_bytes=most))
    offsets = decode_tensor(output.offsets, max_bytes=most).astype(np.int64)
    taken = np.zeros(len(batch.response_tokens), values.dtype)
    starts, stops = batch.response_offsets[:-1], batch.response_offsets[1:]
    for start, stop, source in zip(starts, stops, sources, strict=True):
        taken[start:stop] = values[offsets[source] : offsets[source + 1]]
    return taken


def _read(keys_path: Path, batch: RolloutBatch) -> tuple[ForwardOutput, list[int]]:
    """The Forward's output, and the index in it of each of the batch's rollouts."""
    keys, data_path = _read_keys(keys_path), keys_path.with_suffix("")
    try:
        data = data_path.read_bytes()
    except FileNotFoundError as err:
        raise _expired() from err
    if digest_bytes(data) != data_path.name:
        raise _refused("a Forward whose result is damaged", "the bytes that were written")
    output = ForwardOutput.FromString(data)
    place = {
        keys[start : start + _KEY_BYTES]: index
        for index, start in enumerate(range(0, len(keys), _KEY_BYTES))
    }
    sources: list[int] = []
    for sequence, key in enumerate(_rollout_keys(batch, is_reference=False)):
        source = place.get(key)
        if source is None:
            raise _refused(
                f"a Forward without {sent_field(batch, sequence)}",
                "a Forward of the policy with every rollout of this batch",
            )
        sources.append(source)
    return output, sources


def _read_keys(keys_path: Path) -> bytes:
    try:
        return unseal_bytes(keys_path.read_bytes())
    except FileNotFoundError as err:
        raise _expired() from err
    except DamagedFileError as err:
        what = "a Forward whose rollouts are damaged"
        raise _refused(what, "the bytes that were written") from err


def _rollout_keys(batch: RolloutBatch, *, is_reference: bool) -> list[bytes]:
    """One hash per rollout of everything that decides its log-probs."""
    prompts = [
        batch.prompt_tokens[start:stop].tobytes()
        for start, stop in zip(batch.prompt_offsets[:-1], batch.prompt_offsets[1:], strict=True)
    ]
    keys: list[bytes] = []
    for group, prompt in enumerate(prompts):
        for sequence in range(batch.group_offsets[group], batch.group_offsets[group + 1]):
            tokens = slice(batch.response_offsets[sequence], batch.response_offsets[sequence + 1])
            hasher = hashlib.blake2b(digest_size=_KEY_BYTES)
            hasher.update(b"reference" if is_reference else b"policy")
            hasher.update(len(prompt).to_bytes(8, "little"))
            hasher.update(prompt)
            hasher.update(batch.response_tokens[tokens].tobytes())
            hasher.update(batch.loss_mask[tokens].tobytes())
            hasher.update(batch.temperature[sequence : sequence + 1].tobytes())
            hasher.update(_mask_bytes(batch, tokens))
            if not is_reference:
                hasher.update(_route_bytes(batch, sequence))
            keys.append(hasher.digest())
    return keys


def _route_bytes(batch: RolloutBatch, sequence: int) -> bytes:
    """Bytes of recorded routes, which a reference does not replay; b"" if there are none."""
    if batch.routed_experts is None or batch.route_first is None or batch.route_offsets is None:
        return b""
    rows = batch.routed_experts[batch.route_offsets[sequence] : batch.route_offsets[sequence + 1]]
    return batch.route_first[sequence].tobytes() + rows.tobytes() if len(rows) else b""


def _mask_bytes(batch: RolloutBatch, tokens: slice) -> bytes:
    """Bytes of what these response tokens keep; b"" if truncation left no less than all."""
    if batch.sampling_mask is None or batch.mask_offsets is None:
        return b""
    offsets = batch.mask_offsets[tokens.start : tokens.stop + 1]
    kept = batch.sampling_mask[offsets[0] : offsets[-1]]
    return np.diff(offsets).tobytes() + kept.tobytes() if len(kept) else b""


def _expired() -> RatoonError:
    return _refused("a Forward whose result has expired", "a Forward that is kept")


def _refused(got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"{_FIELD}: got {got}, expected {expected}",
        field=_FIELD,
        got=got,
        expected=expected,
    )
