"""A trainer's state at a step boundary as a folder: safetensors and a manifest with digests, no
gradients.

A load checks digests, names, shapes, dtypes and the model's spec before it returns.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.spec import ModelSpec
from ratoon.stream.files import (
    DamagedFileError,
    digest_file,
    fsync_tree,
    make_folder,
    rename_folder,
    seal_document,
    temporary_name,
    unseal_document,
)
from ratoon.train.optim.adamw import OptimizerState

MANIFEST_NAME = "checkpoint.json"
WEIGHTS_NAME = "weights.safetensors"
MOMENTS_NAME = "moments.safetensors"
_FORMAT = 3
_KIND = "optimizer_states"
_STATE_DIGEST = "state_digest"
_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A trainer between two steps, which goes on without changing it.

    `state`: on the host, shared with nothing. `digest`: `StateDigest`'s of it.
    """

    state: OptimizerState
    model: ModelSpec
    version: int
    digest: str

    def write(self, folder: Path) -> int:
        """`write_snapshot`."""
        return write_snapshot(folder, self)

    def verify(self, folder: Path) -> None:
        """Read back what `write` wrote. Raises INTERNAL naming the file that is damaged."""
        manifest = _read_manifest(folder)
        if (got := manifest.get(_STATE_DIGEST)) != self.digest:
            raise _damaged(folder / _STATE_DIGEST, str(got), self.digest)
        _verify_files(folder, manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A verified checkpoint, in memory."""

    version: int
    state: OptimizerState


def write_snapshot(folder: Path, snapshot: Snapshot) -> int:
    """Write `folder`, which may not exist, and return its size in bytes. For any thread.

    It appears under its name only when all of it is on disk. Raises `FileExistsError`.
    """
    make_folder(folder.parent)
    temporary = temporary_name(folder)
    temporary.mkdir()
    try:
        save_file(snapshot.state.weights, temporary / WEIGHTS_NAME)
        save_file(_moments(snapshot.state), temporary / MOMENTS_NAME)
        manifest = {
            "format": _FORMAT,
            "version": snapshot.version,
            "num_steps": snapshot.state.num_steps,
            _KIND: snapshot.state.kind.value,
            _STATE_DIGEST: snapshot.digest,
            "model": _plain(snapshot.model),
            "files": [_describe(temporary / name) for name in (WEIGHTS_NAME, MOMENTS_NAME)],
        }
        (temporary / MANIFEST_NAME).write_bytes(seal_document(manifest))
        size_bytes = sum(path.stat().st_size for path in temporary.iterdir())
        fsync_tree(temporary)
        rename_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return size_bytes


def load_checkpoint(
    folder: Path, like: OptimizerState, model: ModelSpec, digest_of: Callable[[OptimizerState], str]
) -> LoadedCheckpoint:
    """Read and verify a checkpoint for a trainer whose state is `like` and whose model is `model`.

    Raises `RatoonError`: CHECKPOINT_NOT_FOUND where there is no manifest, INVALID_ARGUMENT where it
    is of another model or kind of states, INTERNAL naming the file where bytes are damaged, or
    `state_digest` with both where `digest_of` what was read is not what was saved.
    """
    manifest = _read_manifest(folder)
    if manifest["model"] != _plain(model):
        raise invalid("checkpoint.model", manifest["model"], f"the policy's own: {_plain(model)}")
    if (kind := manifest[_KIND]) != like.kind.value:
        raise invalid(f"checkpoint.{_KIND}", kind, f"the trainer's own: {like.kind.value}")
    _verify_files(folder, manifest)
    weights = _load(folder / WEIGHTS_NAME)
    moments = _load(folder / MOMENTS_NAME)
    _match(WEIGHTS_NAME, weights, like.weights)
    _match(MOMENTS_NAME, moments, _moments(like))
    fields = {
        field: {name: moments[f"{field}/{name}"] for name in tensors}
        for field, tensors in like.tensors().items()
        if field != _WEIGHTS
    }
    num_steps = cast("int", manifest["num_steps"])
    state = OptimizerState(kind=like.kind, weights=weights, num_steps=num_steps, **fields)
    if (got := digest_of(state)) != manifest[_STATE_DIGEST]:
        raise _damaged(folder / _STATE_DIGEST, got, str(manifest[_STATE_DIGEST]))
    return LoadedCheckpoint(version=cast("int", manifest["version"]), state=state)


def _moments(state: OptimizerState) -> dict[str, Tensor]:
    """All tensors but the weights, by the names that they have in the file."""
    return {
        f"{field}/{name}": tensor
        for field, tensors in state.tensors().items()
        if field != _WEIGHTS
        for name, tensor in tensors.items()
    }


def _plain(model: ModelSpec) -> object:
    """JSON values of a model's spec."""
    return json.loads(json.dumps(asdict(model)))


def _describe(path: Path) -> dict[str, object]:
    return {"name": path.name, "size_bytes": path.stat().st_size, "digest": digest_file(path)}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise RatoonError(
            ErrorCode.CHECKPOINT_NOT_FOUND, f"no checkpoint {folder.name}", field="checkpoint_id"
        )
    try:
        manifest = unseal_document(path.read_bytes())
    except DamagedFileError as err:
        raise _damaged(path, str(err), "a sealed manifest") from err
    if manifest.get("format") != _FORMAT or not _is_manifest(manifest):
        raise _damaged(path, f"format {manifest.get('format')}", f"a manifest of format {_FORMAT}")
    return manifest


def _is_manifest(manifest: dict[str, object]) -> bool:
    files = manifest.get("files")
    return (
        all(isinstance(manifest.get(name), int) for name in ("version", "num_steps"))
        and all(isinstance(manifest.get(name), str) for name in (_KIND, _STATE_DIGEST))
        and "model" in manifest
        and isinstance(files, list)
        and all(isinstance(entry, dict) for entry in cast("list[object]", files))
        and {entry.get("name") for entry in cast("list[dict[str, object]]", files)}
        == {WEIGHTS_NAME, MOMENTS_NAME}
    )


def _verify_files(folder: Path, manifest: Mapping[str, object]) -> None:
    for entry in cast("list[dict[str, object]]", manifest["files"]):
        _verify(folder, entry)


def _verify(folder: Path, entry: dict[str, object]) -> None:
    path = folder / str(entry["name"])
    if not path.is_file():
        raise _damaged(path, "no file", f"{entry['size_bytes']} bytes")
    if path.stat().st_size != entry.get("size_bytes"):
        raise _damaged(path, f"{path.stat().st_size} bytes", f"{entry['size_bytes']} bytes")
    digest = digest_file(path)
    if digest != entry.get("digest"):
        raise _damaged(path, f"digest {digest}", f"digest {entry['digest']}")


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as err:
        raise _damaged(path, str(err), "safetensors") from err


def _match(name: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, shapes and dtypes."""
    if odd := sorted(got.keys() ^ expected.keys()):
        raise invalid(f"checkpoint.{name}", f"{len(odd)} other tensors, as {odd[0]}", "the model's")
    for key, tensor in expected.items():
        theirs = got[key]
        if theirs.shape != tensor.shape or theirs.dtype != tensor.dtype:
            raise invalid(
                f"checkpoint.{name}[{key}]",
                f"{theirs.dtype} {tuple(theirs.shape)}",
                f"{tensor.dtype} {tuple(tensor.shape)}",
            )


def _damaged(path: Path, got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.INTERNAL,
        f"checkpoint {path.parent.name} is damaged: {path.name}: got {got}, expected {expected}",
        field=path.name,
        got=got,
        expected=expected,
    )
