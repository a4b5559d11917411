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
import struct
from collections.abc import Mapping, Sequence
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
_ARRAYS: Mapping[str, tuple[str, str]] = {
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
    }
)


def batch_to_bytes(batch: RolloutBatch) -> bytes:
    """The canonical bytes of `batch`."""
    arrays: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(value, dtype)
        for name, (dtype, _) in _ARRAYS.items()
        if (value := getattr(batch, name)) is not None
    }
    lengths = {name: len(array) for name, array in arrays.items()}
    header = _encode_header(batch.group_ids, lengths)
    parts: list[bytes | memoryview] = [_PREFIX.pack(_MAGIC, _VERSION, len(header)), header]
    size = _PREFIX.size + len(header)
    for array in arrays.values():
        padding = -size % _ALIGNMENT
        parts += [bytes(padding), array.view(np.uint8).data]
        size += padding + array.nbytes
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return b"".join([*parts, hasher.digest()])


def batch_from_bytes(data: bytes) -> RolloutBatch:
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
    group_ids, lengths = _decode_header(bytes(body[_PREFIX.size : _PREFIX.size + header_size]))
    arrays = _read_arrays(body, _PREFIX.size + header_size, lengths)
    _check_axes(len(group_ids), arrays)
    absent = {name: None for name in _OPTIONAL if name not in arrays}
    return RolloutBatch(group_ids=tuple(group_ids), **arrays, **cast("Any", absent))


def batch_digest(data: bytes) -> str:
    """SHA-256 of the bytes of a batch, hexadecimal: the name of its body."""
    return hashlib.sha256(data).hexdigest()


def _malformed(got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.MALFORMED_BODY,
        f"body: got {got}, expected {expected}",
        field="body",
        got=got,
        expected=expected,
    )


def _encode_header(group_ids: Sequence[str], lengths: Mapping[str, int]) -> bytes:
    arrays = [
        {"name": name, "dtype": _ARRAYS[name][0], "shape": [length]}
        for name, length in lengths.items()
    ]
    header = {"arrays": arrays, "group_ids": list(group_ids)}
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _decode_header(header: bytes) -> tuple[list[str], dict[str, int]]:
    """Group ids, and the length of each array in the order in which they are written."""
    try:
        fields: Any = json.loads(header)
        group_ids: list[str] = fields["group_ids"]
        lengths: dict[str, int] = {array["name"]: array["shape"][0] for array in fields["arrays"]}
        is_canonical = _encode_header(group_ids, lengths) == header
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as err:
        raise _malformed("a header that cannot be read", "that of a batch") from err
    is_known = list(lengths) == [
        name for name in _ARRAYS if name in lengths or name not in _OPTIONAL
    ]
    if not (
        is_canonical
        and is_known
        and all(type(group_id) is str for group_id in group_ids)
        and all(type(length) is int and length >= 0 for length in lengths.values())
    ):
        raise _malformed("another header", "the canonical one of a batch")
    return group_ids, lengths


def _read_arrays(
    body: memoryview, start: int, lengths: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, length in lengths.items():
        dtype = np.dtype(_ARRAYS[name][0])
        aligned = start + -start % _ALIGNMENT
        stop = aligned + length * dtype.itemsize
        if stop > len(body) or any(body[start:aligned]):
            raise _malformed(f"{name} of {length} values", "what the body holds")
        arrays[name] = np.frombuffer(body[aligned:stop], dtype).copy()
        if dtype == np.bool_ and (arrays[name].view(np.uint8) > 1).any():
            raise _malformed(f"{name} with other bytes", "0 and 1")
        start = stop
    if start != len(body):
        raise _malformed(f"{len(body) - start} bytes after the last array", "none")
    return arrays


def _check_axes(num_groups: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Every array has the length of its axis, and offsets are offsets."""
    axes = {
        "G+1": num_groups + 1,
        "prompt": len(arrays["prompt_tokens"]),
        "J": len(arrays["response_tokens"]),
        "S+1": len(arrays["response_offsets"]),
        "S": len(arrays["response_offsets"]) - 1,
    }
    for name, array in arrays.items():
        axis = _ARRAYS[name][1]
        if len(array) != axes[axis]:
            raise _malformed(f"{name} of {len(array)} values", f"{axes[axis]}")
    for name, total, least in (
        ("group_offsets", axes["S"], 1),
        ("prompt_offsets", axes["prompt"], 0),
        ("response_offsets", axes["J"], 0),
    ):
        offsets = arrays[name]
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != total:
            raise _malformed(f"{name} that do not span", f"0 to {total}")
        if (np.diff(offsets) < least).any():
            raise _malformed(f"{name} out of order", "ascending offsets")
