"""A `RolloutBatch` as bytes: the body that is journaled, hashed and sent to workers.

Layout, all little-endian: magic (8 bytes), format version uint32, header length uint32, header
(JSON with sorted keys: group ids and name, dtype and shape of each array), then the arrays in the
header's order, each at a multiple of 8 bytes after zeros, and xxh3-128 of all that (16 bytes). The
same batch gives the same bytes, and bytes that `batch_to_bytes` would not write are refused before
anything of a size that they name is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch

_MAGIC = b"RATOONRB"
_VERSION = 1
# Magic, version, header length.
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 8
_DIGEST_BYTES = 16

# dtype and axis of each array, in the order in which they are written.
ARRAYS: Mapping[str, tuple[str, str]] = {
    "group_offsets": ("<i8", "G+1"),
    "prompt_tokens": ("<i4", "prompt"),
    "prompt_offsets": ("<i8", "G+1"),
    "response_tokens": ("<i4", "J"),
    "response_offsets": ("<i8", "S+1"),
    "loss_mask": ("|b1", "J"),
    "sampler_logprobs": ("<f4", "J"),
    "old_logprobs": ("<f4", "J"),
    "reference_logprobs": ("<f4", "J"),
    "rewards": ("<f8", "S"),
    "advantages": ("<f4", "J"),
    "token_weights": ("<f4", "J"),
    "temperature": ("<f4", "S"),
    "sampler_is_raw": ("|b1", "S"),
    "truncated": ("|b1", "S"),
    "policy_version": ("<i8", "S"),
    "top_p": ("<f4", "S"),
    "top_k": ("<i4", "S"),
    "token_version": ("<i8", "J"),
    # Three axes; "<u2" if an expert is above 255.
    "routed_experts": ("|u1", "N"),
    "route_first": ("<i8", "S"),
    "route_offsets": ("<i8", "S+1"),
    "sampling_mask": ("<i4", "K"),
    "mask_offsets": ("<i8", "J+1"),
    "outside_mask": ("|b1", "J"),
    # Two axes each.
    "teacher_tokens": ("<i4", "J"),
    "teacher_logprobs": ("<f4", "J"),
    "returns": ("<f4", "J"),
    "old_values": ("<f4", "J"),
    "sent_group": ("<i8", "G"),
    "sent_rollout": ("<i8", "S"),
    # Two axes.
    "bad_rollouts": ("<i8", "B"),
}
_OPTIONAL = frozenset(
    {
        "sampler_logprobs",
        "old_logprobs",
        "reference_logprobs",
        "rewards",
        "advantages",
        "token_weights",
        "token_version",
        "routed_experts",
        "route_first",
        "route_offsets",
        "sampling_mask",
        "mask_offsets",
        "outside_mask",
        "teacher_tokens",
        "teacher_logprobs",
        "returns",
        "old_values",
        "sent_group",
        "sent_rollout",
        "bad_rollouts",
    }
)
_DTYPES: Mapping[str, tuple[str, ...]] = {"routed_experts": ("|u1", "<u2")}
_RANKS: Mapping[str, int] = {
    "routed_experts": 3,
    "teacher_tokens": 2,
    "teacher_logprobs": 2,
    "bad_rollouts": 2,
}
# Columns that come together or not at all.
_TOGETHER: Mapping[str, frozenset[str]] = {
    "the routes": frozenset({"routed_experts", "route_first", "route_offsets"}),
    "the sampling masks": frozenset({"sampling_mask", "mask_offsets"}),
    "what was sent": frozenset({"sent_ids", "sent_group", "sent_rollout", "bad_rollouts"}),
}
# dtype and shape of an array.
_Form = tuple[str, tuple[int, ...]]


class BatchBytes:
    """The canonical bytes of a batch as the buffers that they lie in, most of them its own arrays.

    `len` is the number of bytes; `bytes` joins the buffers.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        arrays: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(value, value.dtype if name in _DTYPES else dtype)
            for name, (dtype, _) in ARRAYS.items()
            if (value := getattr(batch, name)) is not None
        }
        forms = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        header = _encode_header(batch.group_ids, forms, batch.sent_ids)
        self.buffers: list[bytes | memoryview] = [
            _PREFIX.pack(_MAGIC, _VERSION, len(header)) + header
        ]
        self._size = len(self.buffers[0])
        for array in arrays.values():
            padding = bytes(-self._size % _ALIGNMENT)
            self.buffers += padding, array.reshape(-1).view(np.uint8).data
            self._size += len(padding) + array.nbytes
        checksum = xxhash.xxh3_128()
        for buffer in self.buffers:
            checksum.update(buffer)
        self.buffers.append(checksum.digest())
        self._size += _DIGEST_BYTES

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.buffers)


def batch_to_bytes(batch: RolloutBatch) -> bytes:
    """The canonical bytes of `batch`."""
    return bytes(BatchBytes(batch))


def batch_from_bytes(data: bytes | memoryview) -> RolloutBatch:
    """Inverse of `batch_to_bytes`; the arrays are copies. Raises `RatoonError` MALFORMED_BODY."""
    body = memoryview(data)[:-_DIGEST_BYTES]
    if len(body) < _PREFIX.size:
        raise _malformed(f"{len(data)} bytes", "a serialized batch")
    magic, version, header_size = _PREFIX.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        raise _malformed(f"magic {magic!r}, version {version}", f"{_MAGIC!r}, {_VERSION}")
    if xxhash.xxh3_128_digest(body) != data[-_DIGEST_BYTES:]:
        raise _malformed("another checksum", "that of the bytes")
    if _PREFIX.size + header_size > len(body):
        raise _malformed(f"a header of {header_size} bytes", "one within the body")
    ids, forms = _decode_header(bytes(body[_PREFIX.size : _PREFIX.size + header_size]))
    arrays = _read_arrays(body, _PREFIX.size + header_size, forms)
    _check_together(ids.keys() | arrays.keys())
    _check_axes(len(ids["group_ids"]), arrays)
    absent = {name: None for name in _OPTIONAL if name not in arrays}
    return RolloutBatch(**ids, **arrays, **cast("Any", absent))


def buffers_of(body: bytes | BatchBytes) -> Sequence[bytes | memoryview]:
    """The buffers whose bytes, one after the other, are those of `body`."""
    return body.buffers if isinstance(body, BatchBytes) else (body,)


def batch_digest(body: bytes | BatchBytes) -> str:
    """SHA-256 of the bytes of a batch, hexadecimal: the name of its body."""
    digest = hashlib.sha256()
    for buffer in buffers_of(body):
        digest.update(buffer)
    return digest.hexdigest()


def _malformed(got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.MALFORMED_BODY,
        f"body: got {got}, expected {expected}",
        field="body",
        got=got,
        expected=expected,
    )


def _encode_header(
    group_ids: Sequence[str], forms: Mapping[str, _Form], sent_ids: Sequence[str] | None
) -> bytes:
    arrays = [
        {"name": name, "dtype": dtype, "shape": list(shape)}
        for name, (dtype, shape) in forms.items()
    ]
    header: dict[str, object] = {"arrays": arrays, "group_ids": list(group_ids)}
    if sent_ids is not None:
        header["sent_ids"] = list(sent_ids)
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _decode_header(header: bytes) -> tuple[dict[str, tuple[str, ...]], dict[str, _Form]]:
    """Ids by their fields, and the form of each array in the order in which they are written."""
    try:
        fields: Any = json.loads(header)
        ids: dict[str, tuple[str, ...]] = {"group_ids": tuple(fields["group_ids"])}
        if "sent_ids" in fields:
            ids["sent_ids"] = tuple(fields["sent_ids"])
        forms: dict[str, _Form] = {
            array["name"]: (array["dtype"], tuple(array["shape"])) for array in fields["arrays"]
        }
        encoded = _encode_header(ids["group_ids"], forms, ids.get("sent_ids"))
        is_canonical = encoded == header
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as err:
        raise _malformed("a header that cannot be read", "that of a batch") from err
    is_known = list(forms) == [name for name in ARRAYS if name in forms or name not in _OPTIONAL]
    if not (
        is_canonical
        and is_known
        and all(type(group_id) is str for each in ids.values() for group_id in each)
        and all(_is_form(name, *form) for name, form in forms.items())
    ):
        raise _malformed("another header", "the canonical one of a batch")
    return ids, forms


def _is_form(name: str, dtype: object, shape: tuple[object, ...]) -> bool:
    return (
        dtype in _DTYPES.get(name, (ARRAYS[name][0],))
        and len(shape) == _RANKS.get(name, 1)
        and all(type(extent) is int and extent >= 0 for extent in shape)
    )


def _read_arrays(
    body: memoryview, start: int, forms: Mapping[str, _Form]
) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, (kind, shape) in forms.items():
        dtype, size = np.dtype(kind), math.prod(shape)
        aligned = start + -start % _ALIGNMENT
        stop = aligned + size * dtype.itemsize
        if stop > len(body) or any(body[start:aligned]):
            raise _malformed(f"{name} of {size} values", "what the body holds")
        arrays[name] = np.frombuffer(body[aligned:stop], dtype).reshape(shape).copy()
        if dtype == np.bool_ and (arrays[name].view(np.uint8) > 1).any():
            raise _malformed(f"{name} with other bytes", "0 and 1")
        start = stop
    if start != len(body):
        raise _malformed(f"{len(body) - start} bytes after the last array", "none")
    return arrays


def _check_together(names: Set[str]) -> None:
    for what, together in _TOGETHER.items():
        if names & together not in (set[str](), together):
            raise _malformed(f"part of {what}", "all of it or none")


def _check_axes(num_groups: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Every array has the length of its axis, and offsets are offsets."""
    axes = {
        "G": num_groups,
        "G+1": num_groups + 1,
        "prompt": len(arrays["prompt_tokens"]),
        "J": len(arrays["response_tokens"]),
        "J+1": len(arrays["response_tokens"]) + 1,
        "S+1": len(arrays["response_offsets"]),
        "S": len(arrays["response_offsets"]) - 1,
        "N": len(arrays["routed_experts"]) if "routed_experts" in arrays else 0,
        "K": len(arrays["sampling_mask"]) if "sampling_mask" in arrays else 0,
        "B": len(arrays["bad_rollouts"]) if "bad_rollouts" in arrays else 0,
    }
    for name, array in arrays.items():
        axis = ARRAYS[name][1]
        if len(array) != axes[axis]:
            raise _malformed(f"{name} of {len(array)} values", f"{axes[axis]}")
    for name, total, least in (
        ("group_offsets", axes["S"], 1),
        ("prompt_offsets", axes["prompt"], 0),
        ("response_offsets", axes["J"], 0),
        ("route_offsets", axes["N"], 0),
        ("mask_offsets", axes["K"], 0),
    ):
        if name not in arrays:
            continue
        offsets = arrays[name]
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != total:
            raise _malformed(f"{name} that do not span", f"0 to {total}")
        if (np.diff(offsets) < least).any():
            raise _malformed(f"{name} out of order", "ascending offsets")
