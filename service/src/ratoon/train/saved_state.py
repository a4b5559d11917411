"""What a checkpoint's manifest says to readers that need no tensors. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ratoon.model.spec import ModelSpec
from ratoon.stream.files import (
    DamagedFileError,
    link_or_copy,
    made_folder,
    remove_folder,
    seal_document,
    unseal_document,
)

MANIFEST_NAME = "checkpoint.json"
FORMAT = 5
STATE_DIGEST = "state_digest"
OPTIMIZER_STATES = "optimizer_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class AsOf:
    """The operations that a state includes: all up to `seq`.

    Gradients of a window that was open then are in no state: it began at `replay_from_seq`, which
    is `seq` + 1 where there was none.
    """

    seq: int
    replay_from_seq: int

    @property
    def has_open_window(self) -> bool:
        return self.replay_from_seq <= self.seq


# A state that belongs to no policy's operations.
NO_OPERATIONS = AsOf(seq=0, replay_from_seq=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """`state_digest`: of weights, moments and counters. `optimizer_states`: how they are kept."""

    optimizer_states: str
    version: int
    as_of: AsOf
    state_digest: str
    size_bytes: int


def read_saved_state(folder: Path) -> SavedState:
    """A checkpoint's description; its tensors are not looked at.

    Raises `DamagedFileError` for a manifest that is damaged or of another format, and
    `FileNotFoundError`.
    """
    document = unseal_document((folder / MANIFEST_NAME).read_bytes())
    if document.get("format") != FORMAT:
        raise DamagedFileError(f"format {document.get('format')}, expected {FORMAT}")
    try:
        return SavedState(
            optimizer_states=str(document[OPTIMIZER_STATES]),
            version=int(document["version"]),
            as_of=AsOf(seq=int(document["seq"]), replay_from_seq=int(document["replay_from_seq"])),
            state_digest=str(document[STATE_DIGEST]),
            size_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise DamagedFileError(f"another manifest's fields: {err!r}") from err


def copy_saved_state(source: Path, folder: Path, model: ModelSpec) -> int:
    """Make a checkpoint a new policy's first state, before any operation; returns its bytes.

    Files of tensors are links to the source's where the file system has them, as nobody changes
    them. `model`: the new policy's, of the same shapes. `folder` may exist, from an earlier try.
    Raises `FileNotFoundError` where the source is gone, and `DamagedFileError`.
    """
    document = unseal_document((source / MANIFEST_NAME).read_bytes())
    if document.get("format") != FORMAT:
        raise DamagedFileError(f"format {document.get('format')}, expected {FORMAT}")
    first = asdict(NO_OPERATIONS) | {"version": 0, "model": plain_model(model)}
    if folder.exists():
        remove_folder(folder)
    with made_folder(folder) as made:
        for path in source.iterdir():
            if path.name != MANIFEST_NAME:
                link_or_copy(path, made / path.name)
        (made / MANIFEST_NAME).write_bytes(seal_document(document | first))
        return sum(path.stat().st_size for path in made.iterdir())


def plain_model(model: ModelSpec) -> object:
    """JSON values of a model's spec; without a value head, those of before there were any."""
    plain = json.loads(json.dumps(asdict(model)))
    if not model.value_head:
        del plain["value_head"]
    return plain
