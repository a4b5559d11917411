"""Files by which a start finds that the journal has lost operations, and what becomes of it.

Versions and checkpoints name the operation that they are of, the position file (`files.paths`) how
far the journal had come. A start that finds the journal behind any of them writes `loss.json` and
refuses the policy; `ratoon recover` writes the operator's decision beside it, which the next start
carries out. A decision is about one state of the journal: for any other it says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ratoon.engine.files.paths import PolicyPaths, names_in
from ratoon.errors import RatoonError, invalid
from ratoon.stream.files import (
    DamagedFileError,
    digest_bytes,
    seal_document,
    unseal_document,
    write_atomic,
)
from ratoon.stream.manifest import MadeBy
from ratoon.stream.versions import list_versions, read_manifest
from ratoon.train.saved_state import SavedState, read_saved_state


class Choice(StrEnum):
    """Way to continue: from the journal as it is, or from the newest checkpoint."""

    ACCEPT_LOSS = "accept-loss"
    FROM_EVIDENCE = "from-evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How far the policy had come: `last_seq` had ended, and `max_seq` was accepted."""

    last_seq: int
    max_seq: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLoss:
    """`journal`: what remains. `told`: what callers had been told; None: not known.

    `versions`, `checkpoints`: those that the journal cannot have made. `adoptable`: the checkpoint
    that the policy can continue from; "": none, and `obstacle` says why.
    """

    journal: Facts
    position: int
    told: Facts | None
    versions: tuple[int, ...]
    checkpoints: tuple[str, ...]
    adoptable: str
    obstacle: str

    @property
    def text(self) -> str:
        """The loss in words, for the policy's failure, the log and the operator."""
        left = self.journal
        known = [f"what is left has {_come_to(left)}"]
        if self.told == self.journal:
            known.append(
                "later writes are lost: the end of what was cancelled, or a checkpoint by which "
                "files were deleted"
            )
        elif self.told is not None:
            known.append(f"callers were told of {_come_to(self.told)}")
        if self.versions:
            known.append(f"there are versions {', '.join(map(str, self.versions))}")
        if self.checkpoints:
            known.append(f"there are checkpoints {', '.join(self.checkpoints)}")
        way = f"--{Choice.FROM_EVIDENCE} goes on from checkpoint {self.adoptable}"
        if not self.adoptable:
            way = f"--{Choice.FROM_EVIDENCE} is not possible: {self.obstacle}"
        return (
            f"the journal has lost its end: {'; '.join(known)}. Nothing was deleted. Restore the "
            "journal, or decide by `ratoon recover`: "
            f"--{Choice.ACCEPT_LOSS} goes on from the journal, {way}"
        )


def find_versions(paths: PolicyPaths) -> dict[int, MadeBy | None]:
    """What made every published version; None: its manifest cannot be read.

    The journal may not know the version.
    """
    found: dict[int, MadeBy | None] = {}
    for version in list_versions(paths.weights):
        try:
            found[version] = read_manifest(paths.weights, version).made_by
        except (RatoonError, OSError):
            found[version] = None
    return found


def find_checkpoints(
    paths: PolicyPaths, names: Sequence[str] | None = None
) -> dict[str, SavedState | None]:
    """The state that each checkpoint's manifest names; None: it cannot be read.

    `names`: of the checkpoints to look at; None: all.
    """
    there = names_in(paths.checkpoints) if paths.checkpoints.is_dir() else []
    found: dict[str, SavedState | None] = {}
    for name in sorted(set(there if names is None else names)):
        if name.startswith("."):
            continue
        try:
            found[name] = read_saved_state(paths.checkpoint(name))
        except (DamagedFileError, OSError):
            found[name] = None
    return found


def write_loss(paths: PolicyPaths, loss: JournalLoss) -> None:
    """Record why the policy is refused."""
    write_atomic(paths.loss, seal_document(asdict(loss)))


def read_loss(paths: PolicyPaths) -> JournalLoss | None:
    """Reads why the policy is refused; None: it is not. Raises `DamagedFileError`."""
    try:
        document = unseal_document(paths.loss.read_bytes())
    except FileNotFoundError:
        return None
    try:
        return _loss(document)
    except (KeyError, TypeError) as err:
        raise DamagedFileError(f"{paths.loss}: other fields: {err!r}") from err


def write_decision(paths: PolicyPaths, choice: Choice) -> JournalLoss:
    """Record a decision about the loss that the policy is refused for, and return the loss.

    Raises INVALID_ARGUMENT if there is no loss, or the choice is not possible, and
    `DamagedFileError`.
    """
    loss = read_loss(paths)
    if loss is None:
        raise invalid("policy", paths.root.name, "a policy whose journal has lost operations")
    if choice is Choice.FROM_EVIDENCE and not loss.adoptable:
        raise invalid("choice", f"--{choice}", f"--{Choice.ACCEPT_LOSS}: {loss.obstacle}")
    document = {"choice": choice.value, "loss": digest_bytes(paths.loss.read_bytes())}
    write_atomic(paths.decision, seal_document(document))
    return loss


def read_decision(paths: PolicyPaths, loss: JournalLoss) -> Choice | None:
    """The decision for the journal as it is now; None: there is none."""
    try:
        document = unseal_document(paths.decision.read_bytes())
        decided = read_loss(paths)
        if decided is None or document["loss"] != digest_bytes(paths.loss.read_bytes()):
            return None
        choice = Choice(document["choice"])
    except (OSError, DamagedFileError, KeyError, ValueError):
        return None
    is_same = (decided.journal, decided.position) == (loss.journal, loss.position)
    return choice if is_same else None


def forget_loss(paths: PolicyPaths, folder: Path | None = None) -> None:
    """End the refusal of the policy. `folder`: where the decision is kept; None: nowhere."""
    for path in (paths.decision, paths.loss):
        if folder is not None and path.exists():
            path.rename(folder / path.name)
        path.unlink(missing_ok=True)


def _come_to(facts: Facts) -> str:
    return (
        f"version {facts.version}, the end of seq {facts.last_seq} and the acceptance of seq "
        f"{facts.max_seq}"
    )


def _loss(document: dict[str, Any]) -> JournalLoss:
    told = document["told"]
    return JournalLoss(
        journal=Facts(**document["journal"]),
        position=document["position"],
        told=None if told is None else Facts(**told),
        versions=tuple(document["versions"]),
        checkpoints=tuple(document["checkpoints"]),
        adoptable=document["adoptable"],
        obstacle=document["obstacle"],
    )
