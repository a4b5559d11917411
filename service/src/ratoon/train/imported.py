"""A folder's weights for a trainer's model: read whole and checked whole, before any is applied.

All safetensors files of the folder are read, whatever an index says, and each byte once: what is
checked and digested is what is applied, even if the folder changes meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ratoon.errors import invalid, shown
from ratoon.model.export import exported_like, imported_values, part_experts
from ratoon.model.policy_model import PolicyModel
from ratoon.stream.files import digest_bytes, digest_file
from ratoon.train.optim.state import are_finite

_FIELD = "model_folder"
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
# Of all files' headers together.
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


def read_weights(model: PolicyModel, folder: Path, digest: str) -> ImportedWeights:
    """Read `folder` for `model`; `digest`: of the files that it must have, "": any.

    Takes as much of the host's memory as all files and the largest of them. Raises INVALID_ARGUMENT
    naming the file or tensor: names and shapes must be those of the model's export, where experts
    may be fused, values bfloat16 or float32, and finite.
    """
    expected = exported_like(model)
    try:
        files = _files(folder, sum(tensor.numel() for tensor in expected.values()))
        if digest:
            # First, for a folder that was changed may not even load.
            _check_digest(_digest({path.name: digest_file(path) for path in files}), digest)
        if model.adapter is not None:
            from ratoon.model.lora import check_adapter_config

            check_adapter_config(model.adapter, folder)
        tensors: dict[str, Tensor] = {}
        digests: dict[str, str] = {}
        for path, size in files.items():
            with path.open("rb") as file:
                data = file.read(size)
            digests[path.name] = digest_bytes(data)
            _add(tensors, path.name, data)
    except OSError as err:
        raise invalid(_FIELD, f"a file that cannot be read ({err.strerror})", "whole ones") from err
    if digest:
        _check_digest(_digest(digests), digest)
    _check(tensors, expected)
    return ImportedWeights(
        values=imported_values(model, tensors),
        digest=_digest(digests),
        num_tensors=len(tensors),
        size_bytes=sum(files.values()),
        dtypes=tuple(sorted({_DTYPES[tensor.dtype] for tensor in tensors.values()})),
    )


def _files(folder: Path, num_elements: int) -> dict[Path, int]:
    """Its safetensors files by name, with their sizes: no more bytes than the model in float32."""
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    if not paths:
        raise invalid(_FIELD, "no weights", "*.safetensors files")
    for path in paths:
        if not path.is_file():
            raise invalid(f"{_FIELD}/{shown(path.name)}", "no file", "a safetensors file")
    files = {path: path.stat().st_size for path in paths}
    size, most = sum(files.values()), 4 * num_elements + _MAX_HEADER_BYTES
    if size > most:
        raise invalid(_FIELD, f"{size} bytes of weights", f"at most {most}: the model's as float32")
    return files


def _add(tensors: dict[str, Tensor], file: str, data: bytes) -> None:
    """Add the tensors of a file's bytes."""
    try:
        found = load(data)
    except (SafetensorError, KeyError, ValueError) as err:
        got = f"no safetensors file that can be read ({shown(str(err))})"
        raise invalid(f"{_FIELD}/{shown(file)}", got, "one") from err
    for name, tensor in found.items():
        parts = part_experts({name: tensor})
        if twice := parts.keys() & tensors.keys():
            raise invalid(_of(min(twice)), "there twice", "each tensor once")
        tensors.update(parts)


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises INVALID_ARGUMENT naming the first tensor that is not the model's, or not finite."""
    for kind, names in (
        ("missing", expected.keys() - tensors.keys()),
        ("not the policy's", tensors.keys() - expected.keys()),
    ):
        if names:
            got = f"{len(names)} tensors {kind}, the first of them this one"
            raise invalid(_of(min(names)), got, "every weight of the policy and no other")
    for name, like in expected.items():
        tensor = tensors[name]
        if tensor.shape != like.shape:
            raise invalid(_of(name), f"shape {tuple(tensor.shape)}", f"{tuple(like.shape)}")
        if tensor.dtype not in _DTYPES:
            raise invalid(_of(name), tensor.dtype, "bfloat16 or float32")
        if not are_finite(tensor):
            raise invalid(_of(name), "a value that is not finite", "below 2**127 in magnitude")


def _check_digest(got: str, expected: str) -> None:
    if got != expected:
        what = "the bytes that were imported at first, which recovery needs, of digest"
        raise invalid(_FIELD, f"files of digest {got}", f"{what} {expected}")


def _digest(digests: Mapping[str, str]) -> str:
    return digest_bytes("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


def _of(name: str) -> str:
    return f"{_FIELD}[{shown(name)}]"
