"""Reads the tensors of a model folder's safetensors files in place.

In: a folder, and names and shapes of the tensors that it must have. Out: the tensors, mapped from
the files. Invariant: names, shapes and dtypes are checked by the files' headers, before anything is
allocated; values are finite, and each is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ratoon.errors import invalid, shown
from ratoon.model.config_fields import unsupported
from ratoon.model.folder import FIELD, ModelFolder, file_field
from ratoon.model.safetensors_files import INDEX_NAME, WEIGHTS_NAME

# A safetensors tensor, which `[...]` reads.
Stored = Any
_MAX_INDEX_BYTES = 2**24
_MAX_FILES = 1024
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth")
_ADAPTER_CONFIG = "adapter_config.json"
_DTYPES = {"F64", "F32", "F16", "BF16"}
# Bound below which bfloat16 and float32 hold a value, however it is rounded.
_MAX_WEIGHT = 2.0**127

# Parameters [E, F, D] that hold all experts of a layer, with the projections that follow one
# another in the features F.
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def are_finite(weights: Tensor) -> bool:
    """Whether all weights are finite, and stay so however they are rounded; there must be at least
    one."""
    low, high = weights.aminmax()
    # A NaN is in no range.
    return bool((low > -_MAX_WEIGHT) & (high < _MAX_WEIGHT))


def weight_files(folder: ModelFolder) -> list[str]:
    """Names of the files with a model's weights: one, or those that an index names.

    Raises UNSUPPORTED for pickles, and for an adapter beside a model; INVALID_ARGUMENT for an index
    that names anything but safetensors files in the folder itself.
    """
    names = folder.names()
    if _ADAPTER_CONFIG in names:
        raise unsupported(FIELD, _ADAPTER_CONFIG, "a model without an adapter beside it")
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME]
    if INDEX_NAME in names:
        return _indexed(folder)
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise unsupported(FIELD, shown(", ".join(pickles))[1:-1], "safetensors: no pickle is read")
    raise invalid(FIELD, "no weights", f"{WEIGHTS_NAME}, or {INDEX_NAME} and the files it names")


def _indexed(folder: ModelFolder) -> list[str]:
    weight_map = folder.read_object(INDEX_NAME, _MAX_INDEX_BYTES).get("weight_map")
    field = f"{file_field(INDEX_NAME)}: weight_map"
    if not isinstance(weight_map, dict) or not weight_map:
        raise invalid(field, shown(weight_map), "a file's name by tensor")
    files = set[str]()
    for file in cast("dict[str, object]", weight_map).values():
        if not isinstance(file, str) or not file.endswith(_SUFFIX) or "/" in file:
            expected = f"the name of a {_SUFFIX} file of the folder itself"
            raise invalid(field, shown(file), expected)
        files.add(file)
        if len(files) > _MAX_FILES:
            raise invalid(field, "more files", f"at most {_MAX_FILES}")
    return sorted(files)


def open_tensors(folder: ModelFolder) -> dict[str, Stored]:
    """Opens all tensors of a model's files by name, in file order.

    Their bytes are mapped: replacing one of the files later changes nothing. Raises what
    `weight_files` and `ModelFolder.open` raise, INVALID_ARGUMENT for a file that is not safetensors
    and for a duplicate tensor, and UNSUPPORTED for a tensor that is not of floats.
    """
    tensors: dict[str, Stored] = {}
    for name in weight_files(folder):
        with folder.open(name) as file:
            try:
                # The library opens the file by its descriptor, and so maps the very file that was
                # checked.
                opened = cast("Any", safe_open(f"/dev/fd/{file.fileno()}", framework="pt"))
            except (SafetensorError, OSError, ValueError) as err:
                got = f"no safetensors file that can be read ({shown(str(err))})"
                raise invalid(file_field(name), got, "one") from err
        for key in opened.offset_keys():
            if key in tensors:
                raise invalid(tensor_field(key), "there twice", "each tensor once")
            tensors[key] = opened.get_slice(key)
            if tensors[key].get_dtype() not in _DTYPES:
                got = tensors[key].get_dtype()
                raise unsupported(tensor_field(key), got, "floats of 16, 32 or 64 bits")
    return tensors


def check_names_and_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises INVALID_ARGUMENT naming the first tensor that is missing, not the model's, or of
    another shape."""
    for kind, names in (
        ("missing", expected.keys() - found.keys()),
        ("not the model's", found.keys() - expected.keys()),
    ):
        if names:
            got = f"{len(names)} tensors {kind}, the first of them this one"
            raise invalid(tensor_field(min(names)), got, "every weight of the model and no other")
    for name, like in expected.items():
        if found[name].shape != like.shape:
            got = f"shape {tuple(found[name].shape)}"
            raise invalid(tensor_field(name), got, f"{tuple(like.shape)}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises INVALID_ARGUMENT naming the tensor."""
    if not are_finite(tensor):
        raise invalid(tensor_field(name), "a value that is not finite", "below 2**127 in magnitude")


def on_meta(stored: Stored) -> Tensor:
    """A tensor of the same shape without values."""
    return torch.empty(stored.get_shape(), device="meta")


def tensor_field(name: str) -> str:
    """Name of a folder's tensor in errors."""
    return f"{FIELD}[{shown(name)}]"


def part_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits fused experts into a view for each projection of each expert, as the hub has them.

    A tensor with such a name and another shape stays unchanged.
    """
    parted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, leaf = name.rpartition(".")
        parts = _FUSED_EXPERTS.get(leaf, ())
        if not parts or tensor.ndim != 3 or tensor.shape[1] % len(parts):
            parted[name] = tensor
            continue
        for expert, fused in enumerate(tensor.unbind()):
            for part, rows in zip(parts, fused.tensor_split(len(parts)), strict=True):
                parted[f"{experts}.{expert}.{part}.weight"] = rows
    return parted
