"""A second copy of a policy's files, from which an empty disk is restored: a sent model, bodies and
checkpoints.

With an archive, an operation is acknowledged, and a checkpoint journaled, only after its copy is
durable. Files that the journal no longer needs are deleted from both places: from the archive in
the background, or else by the next start. Forward results and published weights have no copy.

    policies/<policy_id>/{model,bodies,checkpoints}
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from ratoon.engine.commands import SentBody
from ratoon.engine.files.paths import BodyFiles, PolicyPaths
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.rollout.serial import BatchBytes
from ratoon.stream.files import write_atomic

if TYPE_CHECKING:
    from ratoon.stream.object_store import ObjectStore

_LOG = get_logger("archive")
# Timeout of a call to the store, including its retries.
_TIMEOUT_S = 30.0
# Maximum pending deletions per policy.
_MAX_DELETIONS = 65_536


class Archive:
    """Where a policy's copies go. This one keeps none: the local disk has the only copy.

    Methods raise UNAVAILABLE if the store does not answer, except `start` and `drop_*`, which leave
    their work to the next start.
    """

    async def start(self) -> None:
        """Remove what interrupted writers left in the store."""

    async def stop(self) -> None:
        """Begin no more deletions, and wait for the one under way."""

    def abandon(self) -> None:
        """Begin no more deletions. Does not wait for the one under way."""

    async def keep_model(self) -> None:
        """Copy the model that was sent, if the store does not have it."""

    async def restore_model(self) -> None:
        """Restore the model that was sent, if the disk lacks it and the store has it whole."""

    async def keep_body(self, digest: str, body: bytes) -> None:
        """Copy a body to the store."""

    def drop_body(self, digest: str) -> None:
        """Delete a body's copy in the background."""

    async def restore_bodies(self, digests: Collection[str]) -> None:
        """Restore bodies that the disk lacks and the store has."""

    async def body_names(self) -> frozenset[str]:
        """Digests of the bodies in the store."""
        return frozenset()

    async def keep_checkpoint(self, checkpoint_id: str) -> None:
        """Copy a checkpoint that is not journaled yet, replacing any of the same name."""

    def drop_checkpoint(self, checkpoint_id: str) -> None:
        """Delete a checkpoint's copy in the background."""

    async def restore_checkpoint(self, checkpoint_id: str) -> None:
        """Restore a checkpoint that the disk lacks, if the store has it whole; "": do nothing."""

    async def checkpoint_names(self) -> frozenset[str]:
        """Ids of the checkpoints in the store."""
        return frozenset()

    async def forget(self, kept: Collection[str] = ()) -> None:
        """Delete all copies of the policy but those of the `kept` checkpoints."""


class BlobArchive(Archive):
    """Copies in an object store."""

    def __init__(self, store: ObjectStore, paths: PolicyPaths) -> None:
        self._store = store
        self._paths = paths
        self._model = f"policies/{paths.root.name}/model"
        self._bodies = f"policies/{paths.root.name}/bodies"
        self._checkpoints = f"policies/{paths.root.name}/checkpoints"

        self._deletions = _Deletions()

    async def start(self) -> None:
        try:
            await asyncio.to_thread(self._store.remove_leftovers, self._checkpoints)
        except RatoonError as error:
            _left_behind(error.message)

    async def stop(self) -> None:
        await self._deletions.stop()

    def abandon(self) -> None:
        self._deletions.abandon()

    async def keep_model(self) -> None:
        await asyncio.to_thread(self._store.put_folder, self._model, self._paths.model)

    async def restore_model(self) -> None:
        if not self._paths.model.exists():
            with suppress(FileNotFoundError):
                await asyncio.to_thread(self._store.get_folder, self._model, self._paths.model)

    async def keep_body(self, digest: str, body: bytes) -> None:
        key = f"{self._bodies}/{digest}"
        await self._deletions.spare(key)
        await asyncio.to_thread(self._store.put, key, body)

    def drop_body(self, digest: str) -> None:
        self._deletions.add(f"{self._bodies}/{digest}", self._store.delete)

    async def restore_bodies(self, digests: Collection[str]) -> None:
        await asyncio.to_thread(self._restore_bodies, digests)

    def _restore_bodies(self, digests: Collection[str]) -> None:
        missing = {digest for digest in digests if not self._paths.body(digest).exists()}
        if not missing:
            return
        for digest in missing.intersection(self._store.names(self._bodies)):
            body = self._store.get(f"{self._bodies}/{digest}", digest)
            write_atomic(self._paths.body(digest), body)
            _LOG.info("body restored", policy_id=self._paths.root.name, digest=digest)

    async def body_names(self) -> frozenset[str]:
        return frozenset(await asyncio.to_thread(self._store.names, self._bodies))

    async def keep_checkpoint(self, checkpoint_id: str) -> None:
        await self._deletions.spare(self._key(checkpoint_id))
        await asyncio.to_thread(self._keep_checkpoint, checkpoint_id)

    def _keep_checkpoint(self, checkpoint_id: str) -> None:
        folder, key = self._paths.checkpoint(checkpoint_id), self._key(checkpoint_id)
        try:
            self._store.put_folder(key, folder)
        except FileExistsError:
            # An earlier save of that name, never journaled, left another state here.
            self._store.delete_folder(key)
            self._store.put_folder(key, folder)

    def drop_checkpoint(self, checkpoint_id: str) -> None:
        self._deletions.add(self._key(checkpoint_id), self._store.delete_folder)

    async def restore_checkpoint(self, checkpoint_id: str) -> None:
        if not checkpoint_id or self._paths.checkpoint(checkpoint_id).exists():
            return
        folder, key = self._paths.checkpoint(checkpoint_id), self._key(checkpoint_id)
        try:
            await asyncio.to_thread(self._store.get_folder, key, folder)
        except FileNotFoundError:
            return
        except RatoonError as error:
            if error.code is not ErrorCode.INTERNAL:
                raise
            # The checkpoint must not be loaded: recovery takes an older one.
            _LOG.error("archived checkpoint is damaged", error=error.message)
        else:
            policy_id = self._paths.root.name
            _LOG.info("checkpoint restored", policy_id=policy_id, checkpoint_id=checkpoint_id)

    async def checkpoint_names(self) -> frozenset[str]:
        return frozenset(await asyncio.to_thread(self._store.folder_names, self._checkpoints))

    async def forget(self, kept: Collection[str] = ()) -> None:
        await asyncio.to_thread(self._forget, kept)

    def _forget(self, kept: Collection[str]) -> None:
        self._store.delete_folder(self._model)
        for name in {*self._store.folder_names(self._checkpoints)}.difference(kept):
            self._store.delete_folder(self._key(name))
        for name in self._store.names(self._bodies):
            self._store.delete(f"{self._bodies}/{name}")
        self._store.remove_leftovers(self._checkpoints)

    def _key(self, checkpoint_id: str) -> str:
        return f"{self._checkpoints}/{checkpoint_id}"


class _Deletions:
    """Deletes from a store in the background, one key at a time.

    If the store does not answer, pending deletions are left to the next start.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[str], None]] = {}
        # The lock is held while `_key` is being deleted.
        self._lock = asyncio.Lock()
        self._key = ""
        self._task: asyncio.Task[None] | None = None

    def add(self, key: str, delete: Callable[[str], None]) -> None:
        if len(self._waiting) >= _MAX_DELETIONS:
            _left_behind("too much is waiting")
            return
        self._waiting[key] = delete
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def spare(self, key: str) -> None:
        """Cancel the deletion of a key, or wait for its end if it is under way."""
        self._waiting.pop(key, None)
        if key == self._key:
            async with self._lock:
                pass

    async def stop(self) -> None:
        """Delete nothing more, and wait for the deletion under way."""
        self.abandon()
        async with self._lock:
            pass

    def abandon(self) -> None:
        """Delete nothing more. Does not wait for the deletion under way."""
        self._waiting.clear()

    async def _run(self) -> None:
        while self._waiting:
            async with self._lock:
                # The deletions may have been stopped or spared while this waited for the lock.
                key = self._key = next(iter(self._waiting), "")
                if not key:
                    return
                delete = self._waiting.pop(key)
                try:
                    await asyncio.to_thread(delete, key)
                except Exception as err:  # noqa: BLE001 - whatever it is, the copy may stay
                    self._waiting.clear()
                    _left_behind(str(err))
                finally:
                    self._key = ""


class ArchivedBodyFiles(BodyFiles):
    """`BodyFiles` whose bodies are in the archive before `hold` returns."""

    def __init__(self, paths: PolicyPaths, archive: Archive) -> None:
        super().__init__(paths)
        self._archive = archive
        self._archived: set[str] = set()

    async def hold(self, holder: str, digest: str, body: bytes | BatchBytes | SentBody) -> None:
        await super().hold(holder, digest, body)
        if digest in self._archived:
            return
        try:
            if isinstance(body, SentBody):
                body = await asyncio.to_thread(self._paths.body(digest).read_bytes)
            await self._archive.keep_body(digest, bytes(body))
        except BaseException:
            await super().release(holder, digest)
            raise
        self._archived.add(digest)

    async def release(self, holder: str, digest: str) -> None:
        await super().release(holder, digest)
        if not self.is_held(digest):
            self._archived.discard(digest)
            self._archive.drop_body(digest)

    async def names(self) -> frozenset[str]:
        here = await super().names()
        try:
            return here | await self._archive.body_names()
        except RatoonError as error:
            _left_behind(error.message)
            return here

    async def reconcile(self, needed: Collection[tuple[str, str]], listed: Collection[str]) -> None:
        await self._archive.restore_bodies({digest for _, digest in needed})
        await super().reconcile(needed, listed)
        held = self.held()
        self._archived &= held
        for digest in frozenset(listed) - held:
            self._archive.drop_body(digest)


def open_archive(storage_url: str, paths: PolicyPaths) -> Archive:
    """The archive of one policy; `storage_url` "": it keeps no copies.

    Raises INVALID_ARGUMENT for a URL of another kind.
    """
    return BlobArchive(open_store(storage_url), paths) if storage_url else Archive()


def check_store(storage_url: str) -> None:
    """Raises INVALID_ARGUMENT for a read-only store, UNAVAILABLE if it does not answer."""
    if storage_url:
        open_store(storage_url).check()


def open_store(storage_url: str) -> ObjectStore:
    try:
        # The dependency is optional, and the AWS libraries are large.
        from ratoon.stream.object_store import ObjectStore
    except ImportError as err:
        raise invalid("storage_url", f"no library for it ({err})", "ratoon[s3] installed") from err
    return ObjectStore(storage_url, timeout_s=_TIMEOUT_S)


def _left_behind(reason: str) -> None:
    """Log that a deletion is left to the next start."""
    _LOG.warning("not deleted from the archive", error=reason)
