"""A version as a Hugging Face folder of its own: to publish, to serve, to keep.

In: a version, and for an adapter its base. Out: a new folder with weights, config, tokenizer and
README.md, which gets its name once it is whole. An adapter names its base, or is merged into it:
each adapted weight is W + alpha / r B A (rsLoRA: alpha / sqrt(r)), computed in float32 and rounded
once to W's dtype; an embedding, which has a row for each token, W + alpha / r (B A)^T. The base and
the pulled files are never written to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratoon_client.caller import Caller
from ratoon_client.errors import IntegrityError, InvalidArgumentError
from ratoon_client.weights.disk import in_thread
from ratoon_client.weights.pull import PulledWeights, pull_weights
from ratoon_proto.types import WeightKind

_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_CONFIG = "config.json"
_PREFIX, _HEAD = "base_model.model.", "lm_head.weight"
# Ends of the names of an adapter's two factors: of a linear map, and of an embedding.
_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
_README = "README.md"
# Files of a base that make tokens of text.
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("tekken.json", "tiktoken.model"),
)
_VALUE_HEAD = "value_head/*.safetensors"
_TEMPLATES = ("chat_template*", "additional_chat_templates/*.jinja")
# By safetensors' names; numpy has no bfloat16, whose bits are the upper half of a float32's.
_DTYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Bits = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]


async def export_weights(
    caller: Caller,
    policy_id: str,
    folder: Path,
    *,
    version: int | None,
    name: str | None,
    base: str | Path | None,
    merge: bool,
) -> PulledWeights:
    """See `AsyncRatoonClient.export_weights`; the answer's folder is `folder`."""
    await in_thread(_check, folder, base, merge)
    # On the same file system, so that the last step is a rename.
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        place = Path(temporary)
        pull = pull_weights(
            caller, policy_id, place / "pull", version=version, name=name, keep=None
        )
        pulled = await pull
        await in_thread(_write, pulled, place / "export", base, merge)
        (place / "export").rename(folder)
    return replace(pulled, folder=folder)


def _check(folder: Path, base: str | Path | None, merge: bool) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgumentError("folder", str(folder), "a folder that is new or empty")
    if merge and (base is None or not Path(base).is_dir()):
        raise InvalidArgumentError("base", repr(base), "the folder that the adapter is merged into")
    folder.parent.mkdir(parents=True, exist_ok=True)


def _write(pulled: PulledWeights, out: Path, base: str | Path | None, merge: bool) -> None:
    is_adapter = pulled.manifest.kind is WeightKind.ADAPTER
    if not is_adapter and (base is not None or merge):
        raise InvalidArgumentError("base", repr(base), "none: the version is a whole model")
    if is_adapter and base is None:
        expected = "the folder, or the id on a hub, of the model that the adapter is of"
        raise InvalidArgumentError("base", "None", expected)
    out.mkdir()
    if merge:
        _copy(Path(str(base)), out, ("*", *_TEMPLATES))
        merge_adapter(pulled.folder, out)
        _copy(pulled.folder, out, (_VALUE_HEAD,))
    else:
        for file in pulled.manifest.files:
            _take(pulled.folder / file.name, out / file.name)
        if is_adapter:
            _name_base(out, str(base))
    name = str(base) if is_adapter else ""
    library = "peft" if is_adapter and not merge else "transformers"
    (out / _README).write_text(_card(pulled, name, library), encoding="utf-8")


def _take(source: Path, target: Path) -> None:
    """Move a file of the pull, or copy it where it is the service's or another version's too."""
    target.parent.mkdir(exist_ok=True)
    if source.stat().st_nlink == 1:
        source.rename(target)
    else:
        shutil.copyfile(source, target)


def _copy(base: Path, out: Path, patterns: tuple[str, ...]) -> None:
    """Copy files of the base's folder itself, but not what describes another model."""
    for pattern in patterns:
        for path in sorted(base.glob(pattern)):
            if path.is_file() and path.name != _README and not path.name.startswith("."):
                target = out / path.relative_to(base)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _name_base(out: Path, base: str) -> None:
    """Let the adapter's config name the base, and bring the tokenizer of one that is here."""
    here = Path(base)
    if here.is_dir():
        _copy(here, out, (*_TOKENIZER, *_TEMPLATES))
        base = str(here.resolve())
    config = _json(out / _ADAPTER_CONFIG)
    config["base_model_name_or_path"] = base
    text = json.dumps(config, indent=2, sort_keys=True)
    (out / _ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def _card(pulled: PulledWeights, base: str, library: str) -> str:
    """A model card, with the fields that hubs read."""
    fields = {"library_name": library, "base_model": base, "tags": "[lora]" if base else ""}
    head = "".join(f"{name}: {value}\n" for name, value in fields.items() if value)
    what = f"Version {pulled.version} of the policy `{pulled.policy_id}`, trained with Ratoon."
    return f"---\n{head}---\n\n# {pulled.policy_id}\n\n{what}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """Where a tensor's values are in a file of safetensors' format; dtype by its name there."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def open(self, mode: str) -> Bits:
        """The values in the file; they are written there with mode `r+`."""
        if self.dtype not in _DTYPES:
            raise _misfit(self, self.dtype, f"one of {', '.join(_DTYPES)}")
        if not prod(self.shape):
            return np.empty(self.shape, _DTYPES[self.dtype])
        return np.memmap(self.path, _DTYPES[self.dtype], mode, self.offset, self.shape)  # type: ignore[call-overload]


def _misfit(tensor: _Tensor, got: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"base/{tensor.path.name}", got, expected)


def merge_adapter(adapter: Path, folder: Path) -> None:
    """Add an adapter to the weights of a model folder, in place.

    Raises InvalidArgumentError naming a weight that the folder lacks, or has in another shape or
    dtype, and for an adapter of the embedding or the LM head where they are one weight; the
    folder's weights are then of no use.
    """
    config = _json(adapter / _ADAPTER_CONFIG)
    rank = config["r"]
    divisor = sqrt(rank) if config.get("use_rslora") else rank
    scale = np.float32(config["lora_alpha"] / divisor)
    factors = _tensors(adapter / _ADAPTER)
    weights: dict[str, _Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= _tensors(path)
    for name, down in factors.items():
        is_embedding = name.endswith(_EMBEDDING)
        first, second = _EMBEDDING if is_embedding else _LINEAR
        if not name.endswith(first):
            continue
        stem = name.removesuffix(first)
        own = stem.removeprefix(_PREFIX) + ".weight"
        up, weight = factors[stem + second], weights.get(own)
        if (is_embedding or own == _HEAD) and _is_tied(folder, weights):
            expected = "a base whose embedding and LM head are two weights"
            raise InvalidArgumentError("base", f"one that ties {own} to another weight", expected)
        if weight is None:
            expected = "a folder that has every adapted weight under its own name"
            raise InvalidArgumentError("base", f"one without {own}", expected)
        wanted = (up.shape[0], down.shape[1])[:: -1 if is_embedding else 1]
        if weight.shape != wanted:
            raise _misfit(weight, f"{own} of shape {weight.shape}", f"{wanted}, as the adapter")
        values = weight.open("r+")
        merged = _float32(up.open("r")) @ _float32(down.open("r"))
        merged = np.ascontiguousarray(merged.T) if is_embedding else merged
        merged *= scale
        merged += _float32(values)
        values[...] = _rounded(merged, values.dtype)


def _is_tied(folder: Path, weights: Collection[str]) -> bool:
    """Whether the folder's model has one weight for embedding and LM head."""
    config = _json(folder / _CONFIG)
    said = config.get(
        "tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")
    )
    return bool(said) or not any(name.endswith(_HEAD) for name in weights)


def _float32(values: Bits) -> NDArray[np.float32]:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


def _rounded(values: NDArray[np.float32], dtype: np.dtype[Any]) -> Bits:
    """`values` in the dtype, each to the nearest, and between two to the even one."""
    if dtype != np.uint16:
        return values.astype(dtype)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _tensors(path: Path) -> dict[str, _Tensor]:
    """The tensors of a file by name. Raises IntegrityError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: _Tensor(
                path=path,
                dtype=said["dtype"],
                shape=tuple(said["shape"]),
                offset=8 + length + said["data_offsets"][0],
            )
            for name, said in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as err:
        raise IntegrityError(f"{path.name} is no file of safetensors: {err}") from err


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
