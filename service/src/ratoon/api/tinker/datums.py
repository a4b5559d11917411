"""Datums of the Tinker wire to groups of rollouts, and log-probs back to their targets.

A datum is n tokens and n targets. It becomes a group of one rollout: its first token is the prompt,
the others and the last target are the response, so that response token j is target j. Prefixes that
datums share are found by the plan, in whatever order the datums come, so the flat form costs no
sharing. A target that is not the next token can be no part of the sequence: it must weigh nothing,
and has no log-prob (0).

Pure: it runs in a thread.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ratoon.api.tinker.losses import WireLoss
from ratoon.errors import ErrorCode, RatoonError, invalid, shown, unsupported
from ratoon_proto.codec import encode_array
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.v1 import rollout_pb2

_TARGETS = "target_tokens"
_DTYPES: Mapping[int, np.dtype[np.generic]] = MappingProxyType(
    {
        tinker_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
        tinker_pb2.DTYPE_INT64: np.dtype("<i8"),
        tinker_pb2.DTYPE_INT32: np.dtype("<i4"),
        # Its upper half is that of a float32.
        tinker_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
    }
)
# A future's id is the operation's, and what follows this; no operation's id has it.
_MARK = "~"
# Most characters of a note: a million targets whose weights repeat.
MAX_NOTE = 2**19


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Datums as groups, with what their answer needs."""

    groups: list[rollout_pb2.RolloutGroup]
    note: tinker_pb2.FutureNote


def batch_of(
    data: Iterable[tinker_pb2.Datum], loss: WireLoss, *, forward_only: bool, max_datums: int
) -> Batch:
    """Convert the datums of a request. With `forward_only` every target that can is in the mask.

    Raises INVALID_ARGUMENT and UNSUPPORTED naming the datum, as `data[3].loss_fn_inputs.weights`.
    """
    datums = [_datum(f"data[{index}]", datum, loss) for index, datum in enumerate(data)]
    if not 1 <= len(datums) <= max_datums:
        raise invalid("data", f"{len(datums)} datums", f"at least 1 and at most {max_datums}")
    has_terms = any(datum.has_term.any() for datum in datums)
    groups = [
        datum.group(str(index), is_known=forward_only or not has_terms)
        for index, datum in enumerate(datums)
    ]
    note = tinker_pb2.FutureNote(is_mean=loss.is_mean)
    not_next = np.concatenate([~datum.is_next for datum in datums])
    if forward_only:
        weights = np.concatenate([datum.columns["token_weights"] for datum in datums])
        note.weights = weights.astype("<f4").tobytes() if weights.any() else b""
    elif not_next.any():
        note.not_next = np.packbits(not_next).tobytes()
    return Batch(groups=groups, note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Datum:
    """One datum of n targets; arrays are [n].

    `tokens`: int32 [n + 1]. `is_next`: targets that are the next token. `has_term`: those of them
    that the loss has a term of.
    """

    tokens: NDArray[np.int32]
    columns: Mapping[str, NDArray[np.float32]]
    is_next: NDArray[np.bool_]
    has_term: NDArray[np.bool_]

    def group(self, name: str, *, is_known: bool) -> rollout_pb2.RolloutGroup:
        """Build the group. `is_known`: log-probs are wanted, and no term of the loss."""
        mask = self.is_next if is_known else self.has_term
        rollout = rollout_pb2.Rollout(
            response=encode_array(self.tokens[1:]),
            loss_mask=encode_array(mask),
        )
        for column, values in self.columns.items():
            getattr(rollout, column).CopyFrom(encode_array(values))
        prompt = encode_array(self.tokens[:1])
        return rollout_pb2.RolloutGroup(group_id=name, prompt=prompt, rollouts=[rollout])


def _datum(field: str, datum: tinker_pb2.Datum, loss: WireLoss) -> _Datum:
    inputs = datum.loss_fn_inputs
    names = (_TARGETS, *loss.columns)
    for name in names:
        if name not in inputs:
            raise invalid(f"{field}.loss_fn_inputs.{name}", "nothing", "one value a token")
    for name in inputs:
        if name not in names:
            expected = f"one of {', '.join(names)}"
            raise _unsupported(f"{field}.loss_fn_inputs", shown(name), expected)
    tokens = _tokens(f"{field}.model_input", datum)
    path = f"{field}.loss_fn_inputs.{_TARGETS}"
    targets = _array(path, inputs[_TARGETS], len(tokens))
    if targets.dtype.kind != "i":
        raise invalid(f"{path}.dtype", targets.dtype, "int64 or int32")
    columns = {
        column: _floats(f"{field}.loss_fn_inputs.{name}", inputs[name], len(tokens))
        for name, column in loss.columns.items()
    }
    is_next = np.append(targets[:-1] == tokens[1:], True)
    is_active = np.any([values != 0 for values in columns.values()], axis=0)
    weighs = columns.get("token_weights", columns.get("advantages", np.empty(0))) != 0
    if (lost := np.flatnonzero(weighs & ~is_next)).size:
        at = int(lost[0])
        expected = f"{tokens[at + 1]}, the next token of model_input, as it is trained on"
        raise invalid(f"{path}[{at}]", targets[at], expected)
    if not -(2**31) <= targets[-1] < 2**31:
        raise invalid(f"{path}[{len(targets) - 1}]", targets[-1], "a token")
    return _Datum(
        tokens=np.append(tokens, targets[-1]).astype(np.int32),
        columns=columns,
        is_next=is_next,
        has_term=is_next if loss.counts_all else is_next & is_active,
    )


def _tokens(field: str, datum: tinker_pb2.Datum) -> NDArray[np.int32]:
    """Return the tokens of a datum's chunks, one after the other; at least one."""
    parts: list[NDArray[np.int32]] = []
    for index, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            got = kind or "a chunk of an unknown kind"
            raise _unsupported(f"{field}.chunks[{index}]", got, "text: tokens alone are trained on")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise invalid(f"{field}.chunks[{index}]", f"{len(data)} bytes", "int32 tokens")
        parts.append(np.frombuffer(data, "<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not len(tokens):
        raise invalid(field, "no tokens", "at least one")
    return tokens


def _floats(field: str, tensor: tinker_pb2.Tensor, length: int) -> NDArray[np.float32]:
    values = _array(field, tensor, length)
    if tensor.dtype == tinker_pb2.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32)
    if (bad := np.flatnonzero(~np.isfinite(values))).size:
        at = int(bad[0])
        raise invalid(f"{field}[{at}]", values[at], "a finite number")
    return values


def _array(field: str, tensor: tinker_pb2.Tensor, length: int) -> NDArray[np.generic]:
    """Return the elements of a tensor, [length], in its own dtype."""
    if tensor.WhichOneof("layout") == "sparse_csr" or len(tensor.shape) > 1:
        raise _unsupported(field, "several values a token", "one value a token, as a dense tensor")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise invalid(f"{field}.dtype", tensor.dtype, "float32, bfloat16, int64 or int32")
    if tensor.shape and tensor.shape[0] != length:
        raise invalid(f"{field}.shape", f"{tensor.shape[0]} values", f"{length}, one a token")
    if len(tensor.dense) != length * dtype.itemsize:
        expected = f"{length * dtype.itemsize}: {length} values of {dtype.itemsize} bytes"
        raise invalid(field, f"{len(tensor.dense)} bytes", expected)
    return np.frombuffer(tensor.dense, dtype)


def _unsupported(field: str, got: str, expected: str) -> RatoonError:
    return unsupported(field, got, expected, f"{field}: {got} cannot be used, expected {expected}")


def future_id(operation_id: str, note: tinker_pb2.FutureNote) -> str:
    """Return the id of the future of an operation, which carries what its answer needs.

    Raises UNSUPPORTED where that is too long.
    """
    data = note.SerializeToString(deterministic=True)
    if not data:
        return operation_id
    text = base64.urlsafe_b64encode(zlib.compress(data, 9)).decode()
    if len(text) > MAX_NOTE:
        expected = "fewer datums in one call, or weights that repeat"
        raise _unsupported("data", "weights of too many kinds", expected)
    return f"{operation_id}{_MARK}{text}"


def split_future(request_id: str) -> tuple[str, tinker_pb2.FutureNote]:
    """Return the operation of a future, and the note in its id.

    Raises OPERATION_NOT_FOUND for an id that `future_id` has not made.
    """
    operation_id, mark, text = request_id.partition(_MARK)
    if not mark:
        return operation_id, tinker_pb2.FutureNote()
    try:
        inflater = zlib.decompressobj()
        packed = base64.b64decode(text[: MAX_NOTE + 1], altchars=b"-_", validate=True)
        data = inflater.decompress(packed, MAX_NOTE * 8)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("not one whole stream")
        return operation_id, tinker_pb2.FutureNote.FromString(data)
    except (ValueError, binascii.Error, zlib.error, DecodeError) as err:
        raise RatoonError(ErrorCode.OPERATION_NOT_FOUND, "no such future") from err
