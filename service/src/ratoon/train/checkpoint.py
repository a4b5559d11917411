"""A policy's state at a step boundary as a folder: safetensors and a manifest with digests, no
gradients.

Each rank writes what it keeps, so a folder of any number of ranks is read by any other number. A
load checks digests, names, shapes, dtypes and the model's spec before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.spec import ModelSpec
from ratoon.stream.files import (
    DamagedFileError,
    digest_file,
    made_folder,
    seal_document,
    unseal_document,
)
from ratoon.train.optim.state import OptimizerState
from ratoon.train.saved_state import (
    FORMAT,
    MANIFEST_NAME,
    NO_OPERATIONS,
    OPTIMIZER_STATES,
    STATE_DIGEST,
    AsOf,
    plain_model,
)
from ratoon.train.spec import OptimizerStates

_NUMBERS = ("version", "seq", "replay_from_seq", "num_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesFile:
    """What the manifest says of one rank's file."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's manifest, whose files are not looked at yet; `model`: the spec as JSON."""

    version: int
    num_steps: int
    state_digest: str
    kind: str
    model: object
    files: tuple[StatesFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Snapshot:
    """A policy between two steps, which goes on without changing it. It can be written once.

    `write_files(folder)` has each rank write its share of the state, which has the digest `digest`.
    """

    write_files: Callable[[Path], Sequence[StatesFile]]
    kind: OptimizerStates
    num_steps: int
    model: ModelSpec
    version: int
    digest: str

    def write(self, folder: Path, as_of: AsOf = NO_OPERATIONS) -> int:
        """Write `folder`, which may not exist, and return its size in bytes. For any thread.

        It appears under its name only when all of it is on disk. Raises `FileExistsError`.
        """
        with made_folder(folder) as made:
            files = self.write_files(made)
            manifest = {
                "format": FORMAT,
                "version": self.version,
                "seq": as_of.seq,
                "replay_from_seq": as_of.replay_from_seq,
                "num_steps": self.num_steps,
                OPTIMIZER_STATES: self.kind.value,
                STATE_DIGEST: self.digest,
                "model": plain_model(self.model),
                "files": [asdict(file) for file in files],
            }
            (made / MANIFEST_NAME).write_bytes(seal_document(manifest))
            return sum(path.stat().st_size for path in made.iterdir())

    def verify(self, folder: Path) -> None:
        """Read back what `write` wrote. Raises INTERNAL naming the file that is damaged."""
        manifest = _read(folder)
        if (got := manifest.state_digest) != self.digest:
            raise _damaged(folder / STATE_DIGEST, got, self.digest)
        for file in manifest.files:
            _verify(folder, file)


def states_name(rank: int, num_ranks: int) -> str:
    """Name of one rank's file."""
    return f"states-{rank + 1:05}-of-{num_ranks:05}.safetensors"


def write_states(folder: Path, state: OptimizerState, rank: int, num_ranks: int) -> StatesFile:
    """Write the file of one rank, whose parts `state` has on the host."""
    path = folder / states_name(rank, num_ranks)
    save_file(_flat(state), path)
    return StatesFile(name=path.name, size_bytes=path.stat().st_size, digest=digest_file(path))


def read_manifest(folder: Path, kind: OptimizerStates, model: ModelSpec) -> Manifest:
    """The manifest of a checkpoint for a policy of this model and kind of states.

    Raises `RatoonError`: CHECKPOINT_NOT_FOUND where there is none, INVALID_ARGUMENT where it is of
    another model or kind of states, INTERNAL where it is damaged.
    """
    manifest = _read(folder)
    if manifest.model != plain_model(model):
        raise invalid("checkpoint.model", manifest.model, f"the policy's own: {plain_model(model)}")
    if manifest.kind != kind.value:
        raise invalid(
            f"checkpoint.{OPTIMIZER_STATES}", manifest.kind, f"the trainer's own: {kind.value}"
        )
    return manifest


def read_states(
    folder: Path, manifest: Manifest, like: OptimizerState, rank: int = 0, num_ranks: int = 1
) -> OptimizerState:
    """The state of a rank's parts, which are those of `like`; verifies the rank's share of files.

    All files are verified once each rank has read. Raises INTERNAL naming a file that is damaged,
    INVALID_ARGUMENT for tensors that are not the model's.
    """
    for file in manifest.files[rank::num_ranks]:
        _verify(folder, file)
    expected = _flat(like)
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for file in manifest.files:
            opened = stack.enter_context(_opened(folder / file.name))
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                if key in expected:
                    tensors[key] = opened.get_tensor(key)
                elif num_ranks == 1:  # Of several, each knows its own parts alone.
                    raise invalid(f"checkpoint.{file.name}", key, "a tensor of the model's")
    _match(folder.name, tensors, expected)
    fields = {
        field: {name: tensors[f"{field}/{name}"] for name in parts}
        for field, parts in like.tensors().items()
    }
    return OptimizerState(kind=like.kind, num_steps=manifest.num_steps, **fields)


def check_digest(folder: Path, manifest: Manifest, got: str) -> None:
    """Raises INTERNAL where `got`, the digest of what was read, is not that of what was saved."""
    if got != manifest.state_digest:
        raise _damaged(folder / STATE_DIGEST, got, manifest.state_digest)


def _flat(state: OptimizerState) -> dict[str, Tensor]:
    """All tensors by the names that they have in a file."""
    return {
        f"{field}/{name}": tensor
        for field, tensors in state.tensors().items()
        for name, tensor in tensors.items()
    }


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise RatoonError(
            ErrorCode.CHECKPOINT_NOT_FOUND, f"no checkpoint {folder.name}", field="checkpoint_id"
        )
    try:
        return _parsed(unseal_document(path.read_bytes()))
    except (DamagedFileError, KeyError, TypeError, ValueError) as err:
        raise _damaged(path, str(err), f"a sealed manifest of format {FORMAT}") from err


def _parsed(document: Mapping[str, Any]) -> Manifest:
    """Raises DamagedFileError, KeyError, TypeError or ValueError for what is no manifest."""
    if document.get("format") != FORMAT:
        raise DamagedFileError(f"format {document.get('format')}")
    numbers = {name: int(document[name]) for name in _NUMBERS}
    files = tuple(StatesFile(**entry) for entry in document["files"])
    if not files or any(Path(file.name).name != file.name for file in files):
        raise DamagedFileError(f"files {[file.name for file in files]}")
    return Manifest(
        version=numbers["version"],
        num_steps=numbers["num_steps"],
        state_digest=str(document[STATE_DIGEST]),
        kind=str(document[OPTIMIZER_STATES]),
        model=document["model"],
        files=files,
    )


def _verify(folder: Path, file: StatesFile) -> None:
    path = folder / file.name
    if not path.is_file():
        raise _damaged(path, "no file", f"{file.size_bytes} bytes")
    if path.stat().st_size != file.size_bytes:
        raise _damaged(path, f"{path.stat().st_size} bytes", f"{file.size_bytes} bytes")
    digest = digest_file(path)
    if digest != file.digest:
        raise _damaged(path, f"digest {digest}", f"digest {file.digest}")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as err:
        raise _damaged(path, "no file", "one") from err
    except SafetensorError as err:
        raise _damaged(path, str(err), "safetensors") from err


def _match(name: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, shapes and dtypes."""
    if missing := sorted(expected.keys() - got.keys()):
        count, first = len(missing), missing[0]
        raise invalid(f"checkpoint.{name}", f"{count} tensors missing, as {first}", "the model's")
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
