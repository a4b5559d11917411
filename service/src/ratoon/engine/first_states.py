"""The first state of a policy that begins with another one's checkpoint.

The state becomes a checkpoint of the new policy's own, as of before its first operation, so that
recovery begins there and the source may go. Its files are made before the journal has them, and the
controller starts after that: a crash in between leaves a folder that the next try replaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ratoon.engine.files.archive import Archive
from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import Checkpoint, automatic_id
from ratoon.engine.refusals import checkpoint_not_found, disk_fault, policy_not_found
from ratoon.engine.types import CheckpointInfo, PolicySpec
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.spec import FolderBase, ModelSpec, PresetBase
from ratoon.stream.files import DamagedFileError
from ratoon.train.saved_state import copy_saved_state
from ratoon_proto.types import FullTuning, LoraTuning


class FirstStates:
    """Its methods do nothing for a policy that begins with its model's own weights."""

    def __init__(
        self,
        journal: Journal,
        paths_of: Callable[[str], PolicyPaths],
        archive_of: Callable[[PolicyPaths], Archive],
        now: Callable[[], float],
    ) -> None:
        self._journal = journal
        self._paths_of = paths_of
        self._archive_of = archive_of
        self._now = now

    async def check(self, spec: PolicySpec) -> None:
        """Check that the source is there and fits.

        Raises POLICY_NOT_FOUND, CHECKPOINT_NOT_FOUND, and INVALID_ARGUMENT naming what of the spec
        does not fit the checkpoint's state.
        """
        if spec.from_checkpoint is not None:
            await self._source(spec)

    async def take(self, spec: PolicySpec) -> None:
        """Give a policy without a controller its first state, once.

        Raises as `check`, INTERNAL where the source's files are damaged, RESOURCE_EXHAUSTED where
        the disk is full.
        """
        origin = spec.from_checkpoint
        if origin is None or await self._journal.checkpoints(spec.policy_id):
            return
        found = await self._source(spec)
        name, theirs = found.info.checkpoint_id, self._paths_of(origin.policy_id)
        own, checkpoint_id = self._paths_of(spec.policy_id), automatic_id(0, 0)
        await self._archive_of(theirs).restore_checkpoint(name)
        folders = theirs.checkpoint(name), own.checkpoint(checkpoint_id)
        try:
            size_bytes = await asyncio.to_thread(copy_saved_state, *folders, spec.model)
        except FileNotFoundError as err:
            raise checkpoint_not_found(origin.checkpoint_id) from err
        except DamagedFileError as err:
            message = f"checkpoint {origin.checkpoint_id} is damaged: {err}"
            raise RatoonError(ErrorCode.INTERNAL, message) from err
        except OSError as err:
            raise disk_fault("checkpoint", err) from err
        await self._archive_of(own).keep_checkpoint(checkpoint_id)
        info = CheckpointInfo(
            checkpoint_id=checkpoint_id,
            version=0,
            seq=0,
            replay_from_seq=1,
            created_at=self._now(),
            size_bytes=size_bytes,
        )
        first = Checkpoint(info=info, weights_digest=found.weights_digest)
        await self._journal.insert_first_state(spec.policy_id, first)

    async def _source(self, spec: PolicySpec) -> Checkpoint:
        """The checkpoint that a policy is created from. Raises as `check`."""
        origin = spec.from_checkpoint
        assert origin is not None
        row = await self._journal.policy(origin.policy_id)
        if row is None:
            raise policy_not_found(origin.policy_id)
        known = await self._journal.checkpoints(origin.policy_id)
        found = next((c for c in known if c.info.name == origin.checkpoint_id), None)
        if found is None:
            raise checkpoint_not_found(origin.checkpoint_id)
        check_fits(spec.model, row.spec.model)
        own, theirs = spec.optimizer.muon, row.spec.optimizer.muon
        if (own is None) != (theirs is None):
            expected = "absent" if theirs is None else "present"
            text = f"{expected}, as for the source that from_checkpoint names"
            raise invalid("spec.optimizer.muon", "absent" if own is None else "muon", text)
        return found


def check_fits(model: ModelSpec, source: ModelSpec) -> None:
    """Check that a state of `source` is one of `model`. Raises INVALID_ARGUMENT by field. Pure."""
    # The weights of a preset that an adapter leaves frozen come from the seed.
    is_seeded = isinstance(model.base, PresetBase) and isinstance(model.tuning, LoraTuning)
    base = "preset" if isinstance(model.base, PresetBase) else "model_folder"
    own, theirs = model.base, source.base
    if isinstance(own, FolderBase) and isinstance(theirs, FolderBase) and own.is_sent:
        base, own = "sent_model", replace(own, folder=theirs.folder)
    for name, got, expected in (
        (base, own, theirs),
        ("lora", model.tuning, source.tuning),
        ("value_head", model.value_head, source.value_head),
        ("dtype", model.dtype, source.dtype),
        ("seed", model.seed, source.seed if is_seeded else model.seed),
    ):
        if got != expected:
            text = f"the source's {_shown(expected)}, as from_checkpoint says"
            raise invalid(f"spec.{name}", _shown(got), text)


def _shown(value: object) -> str:
    """A field of a spec in words; no path of the server."""
    if isinstance(value, PresetBase):
        return value.name
    if isinstance(value, FolderBase):
        return Path(value.folder).name
    return "full tuning" if isinstance(value, FullTuning) else str(value)
