"""A folder's weights for a trainer's model: read whole and checked whole, before any is applied.

All safetensors files of the folder are read, whatever an index says, and each byte once: what is
checked and digested is what is applied, even if the folder changes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ratoon.errors import invalid, shown
from ratoon.model.aside import Base
from ratoon.model.export import importable_like, imported_values
from ratoon.model.families import family_of
from ratoon.model.families.family import Family
from ratoon.model.families.wrapped import Names
from ratoon.model.folder import FIELD, ModelFolder, file_field
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import (
    check_finite,
    check_names_and_shapes,
    tensor_field,
)
from ratoon.stream.files import digest_bytes, digest_stream

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
# Bound of all files' headers together.
_MAX_HEADER_BYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedWeights:
    """`values`: by the names of `named_trainable()`, bfloat16 or float32, finite, on the CPU.

    `digest`: of the files' names and bytes, 32 hexadecimal digits. Tensors are counted as an export
    has them, their `dtypes` are those of the files.
    """

    values: dict[str, Tensor]
    digest: str
    num_tensors: int
    size_bytes: int
    dtypes: tuple[str, ...]


def read_weights(model: PolicyModel, folder: ModelFolder, digest: str) -> ImportedWeights:
    """Read `folder` for `model`; `digest`: of the files that it must have, "": any.

    Takes as much of the host's memory as all files and the largest of them. Raises INVALID_ARGUMENT
    naming the file or tensor: names and shapes must be those of the model's export, where experts
    may be fused, values bfloat16 or float32, and finite.
    """
    expected, base = importable_like(model), model.base
    most = 4 * sum(tensor.numel() for tensor in expected.values()) + _MAX_HEADER_BYTES
    files = _files(folder, most + (base.aside.num_bytes if base.aside else 0))
    if digest:
        # First, for a folder that was changed may not even load.
        _check_digest(_digest({name: _digest_of(folder, name) for name in files}), digest)
    if model.adapter is not None:
        from ratoon.model.lora import check_adapter_config

        check_adapter_config(model.adapter, folder)
    tensors: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for name, size in files.items():
        data = folder.read(name, size)
        digests[name] = digest_bytes(data)
        _add(tensors, name, data, family_of(model.config), base)
    if digest:
        _check_digest(_digest(digests), digest)
    _check(tensors, expected, base.names)
    return ImportedWeights(
        values=imported_values(model, tensors),
        digest=_digest(digests),
        num_tensors=len(tensors),
        size_bytes=sum(files.values()),
        dtypes=tuple(sorted({_DTYPES[tensor.dtype] for tensor in tensors.values()})),
    )


def _files(folder: ModelFolder, most: int) -> dict[str, int]:
    """Its safetensors files by name, with their sizes: at most `most` bytes, the model's in
    float32."""
    files: dict[str, int] = {}
    for name in folder.names():
        if name.endswith(".safetensors"):
            with folder.open(name) as file:
                files[name] = os.fstat(file.fileno()).st_size
    if not files:
        raise invalid(FIELD, "no weights", "*.safetensors files")
    if (size := sum(files.values())) > most:
        raise invalid(FIELD, f"{size} bytes of weights", f"at most {most}: the model's as float32")
    return files


def _digest_of(folder: ModelFolder, name: str) -> str:
    with folder.open(name) as file:
        return digest_stream(file)


def _add(tensors: dict[str, Tensor], file: str, data: bytes, family: Family, base: Base) -> None:
    """Add the tensors of a file's bytes, less those that stay as the policy's folder has them."""
    try:
        found = load(data)
    except (SafetensorError, KeyError, ValueError) as err:
        got = f"no safetensors file that can be read ({shown(str(err))})"
        raise invalid(file_field(file), got, "one") from err
    aside = base.aside.digests if base.aside else {}
    for name, tensor in found.items():
        if name in aside:
            if digest_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) != aside[name]:
                expected = "the bytes of the policy's own folder: it is not trained"
                raise invalid(tensor_field(name), "another tensor", expected)
            continue
        parts = family.exported({base.names.own(name) or name: tensor})
        if twice := parts.keys() & tensors.keys():
            raise invalid(tensor_field(min(twice)), "there twice", "each tensor once")
        tensors.update(parts)


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: Names) -> None:
    """Raises INVALID_ARGUMENT naming the first tensor that is not the model's, or not finite."""
    tensors = {names.there(name): tensor for name, tensor in tensors.items()}
    check_names_and_shapes(tensors, {names.there(name): like for name, like in expected.items()})
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise invalid(tensor_field(name), tensor.dtype, "bfloat16 or float32")
        check_finite(name, tensor)


def _check_digest(got: str, expected: str) -> None:
    if got != expected:
        what = "the bytes that were imported at first, which recovery needs, of digest"
        raise invalid(FIELD, f"files of digest {got}", f"{what} {expected}")


def _digest(digests: Mapping[str, str]) -> str:
    return digest_bytes("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())
