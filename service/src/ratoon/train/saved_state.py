"""What a checkpoint's manifest says to readers that need no tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratoon.stream.files import DamagedFileError, unseal_document

MANIFEST_NAME = "checkpoint.json"
FORMAT = 5
STATE_DIGEST = "state_digest"


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
    """`state_digest`: of weights, moments and counters."""

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
            version=int(document["version"]),
            as_of=AsOf(seq=int(document["seq"]), replay_from_seq=int(document["replay_from_seq"])),
            state_digest=str(document[STATE_DIGEST]),
            size_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise DamagedFileError(f"another manifest's fields: {err!r}") from err
