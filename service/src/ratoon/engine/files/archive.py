"""A second copy of a policy's bodies and checkpoints, from which an empty disk is restored.

With an archive, an operation is acknowledged, and a checkpoint journaled, only after its copy is
durable. What the journal no longer needs is deleted from both places, from the archive by the next
start at the latest. Forward results and published weights have no copy.

    policies/<policy_id>/{bodies,checkpoints}
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from ratoon.engine.files.paths import BodyFiles, PolicyPaths
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.stream.blobs import Blobs
from ratoon.stream.files import write_atomic

if TYPE_CHECKING:
    from ratoon.stream.object_store import ObjectStore

_LOG = get_logger("archive")
# Per call to the store, with its retries.
_TIMEOUT_S = 30.0


class Archive(Protocol):
    """All but the drops raise UNAVAILABLE where the store does not answer."""

    async def start(self) -> None:
        """Remove what interrupted writers left."""
        ...

    async def keep_body(self, digest: str, body: bytes) -> None: ...

    async def drop_body(self, digest: str) -> None: ...

    async def restore_bodies(self, digests: Collection[str]) -> None:
        """Restore bodies that the disk lacks and the archive has."""
        ...

    async def body_names(self) -> frozenset[str]: ...

    async def keep_checkpoint(self, checkpoint_id: str) -> None:
        """Copy a checkpoint that is not journaled yet, replacing any of the same name."""
        ...

    async def drop_checkpoint(self, checkpoint_id: str) -> None: ...

    async def restore_checkpoint(self, checkpoint_id: str) -> None:
        """Restore a missing checkpoint, if the archive has it whole; "": there is none."""
        ...

    async def checkpoint_names(self) -> frozenset[str]: ...

    async def forget(self) -> None:
        """Delete everything of the policy. Raises UNAVAILABLE."""
        ...


class NoArchive:
    """No archive: the local disk has the only copy."""

    async def start(self) -> None:
        """Nothing."""

    async def keep_body(self, digest: str, body: bytes) -> None:
        """Nothing."""

    async def drop_body(self, digest: str) -> None:
        """Nothing."""

    async def restore_bodies(self, digests: Collection[str]) -> None:
        """Nothing."""

    async def body_names(self) -> frozenset[str]:
        return frozenset()

    async def keep_checkpoint(self, checkpoint_id: str) -> None:
        """Nothing."""

    async def drop_checkpoint(self, checkpoint_id: str) -> None:
        """Nothing."""

    async def restore_checkpoint(self, checkpoint_id: str) -> None:
        """Nothing."""

    async def checkpoint_names(self) -> frozenset[str]:
        return frozenset()

    async def forget(self) -> None:
        """Nothing."""


class BlobArchive:
    """An archive in an object store, or any other `Blobs`."""

    def __init__(self, blobs: Blobs, paths: PolicyPaths) -> None:
        self._blobs = blobs
        self._paths = paths
        self._bodies = f"policies/{paths.root.name}/bodies"
        self._checkpoints = f"policies/{paths.root.name}/checkpoints"

    async def start(self) -> None:
        await asyncio.to_thread(self._blobs.remove_leftovers, self._checkpoints)

    async def keep_body(self, digest: str, body: bytes) -> None:
        await asyncio.to_thread(self._blobs.put, f"{self._bodies}/{digest}", body)

    async def drop_body(self, digest: str) -> None:
        try:
            await asyncio.to_thread(self._blobs.delete, f"{self._bodies}/{digest}")
        except RatoonError as error:
            _left_behind(error)

    async def restore_bodies(self, digests: Collection[str]) -> None:
        await asyncio.to_thread(self._restore_bodies, digests)

    def _restore_bodies(self, digests: Collection[str]) -> None:
        missing = {digest for digest in digests if not self._paths.body(digest).exists()}
        if not missing:
            return
        for digest in missing.intersection(self._blobs.names(self._bodies)):
            body = self._blobs.get(f"{self._bodies}/{digest}", digest)
            write_atomic(self._paths.body(digest), body)
            _LOG.info("body restored", policy_id=self._paths.root.name, digest=digest)

    async def body_names(self) -> frozenset[str]:
        return frozenset(await asyncio.to_thread(self._blobs.names, self._bodies))

    async def keep_checkpoint(self, checkpoint_id: str) -> None:
        await asyncio.to_thread(self._keep_checkpoint, checkpoint_id)

    def _keep_checkpoint(self, checkpoint_id: str) -> None:
        folder, key = self._paths.checkpoint(checkpoint_id), self._key(checkpoint_id)
        try:
            self._blobs.put_folder(key, folder)
        except FileExistsError:
            # A save of that name, never journaled, left another state here.
            self._blobs.delete_folder(key)
            self._blobs.put_folder(key, folder)

    async def drop_checkpoint(self, checkpoint_id: str) -> None:
        try:
            await asyncio.to_thread(self._blobs.delete_folder, self._key(checkpoint_id))
        except RatoonError as error:
            _left_behind(error)

    async def restore_checkpoint(self, checkpoint_id: str) -> None:
        if not checkpoint_id or self._paths.checkpoint(checkpoint_id).exists():
            return
        folder, key = self._paths.checkpoint(checkpoint_id), self._key(checkpoint_id)
        try:
            await asyncio.to_thread(self._blobs.get_folder, key, folder)
        except FileNotFoundError:
            return
        except RatoonError as error:
            if error.code is not ErrorCode.INTERNAL:
                raise
            # Do not load it: recovery takes an older one.
            _LOG.error("archived checkpoint is damaged", error=error.message)
        else:
            policy_id = self._paths.root.name
            _LOG.info("checkpoint restored", policy_id=policy_id, checkpoint_id=checkpoint_id)

    async def checkpoint_names(self) -> frozenset[str]:
        return frozenset(await asyncio.to_thread(self._blobs.folder_names, self._checkpoints))

    async def forget(self) -> None:
        await asyncio.to_thread(self._forget)

    def _forget(self) -> None:
        for name in self._blobs.folder_names(self._checkpoints):
            self._blobs.delete_folder(self._key(name))
        for name in self._blobs.names(self._bodies):
            self._blobs.delete(f"{self._bodies}/{name}")
        self._blobs.remove_leftovers(self._checkpoints)

    def _key(self, checkpoint_id: str) -> str:
        return f"{self._checkpoints}/{checkpoint_id}"


class ArchivedBodyFiles(BodyFiles):
    """`BodyFiles` whose bodies are in the archive before `hold` returns."""

    def __init__(self, paths: PolicyPaths, archive: Archive) -> None:
        super().__init__(paths)
        self._archive = archive
        self._archived: set[str] = set()
        # Serialises changes of both places.
        self._both = asyncio.Lock()

    async def hold(self, holder: str, digest: str, body: bytes) -> None:
        async with self._both:
            await super().hold(holder, digest, body)
            if digest in self._archived:
                return
            try:
                await self._archive.keep_body(digest, body)
            except BaseException:
                await super().release(holder, digest)
                raise
            self._archived.add(digest)

    async def release(self, holder: str, digest: str) -> None:
        async with self._both:
            await super().release(holder, digest)
            if not self.is_held(digest):
                self._archived.discard(digest)
                await self._archive.drop_body(digest)

    async def names(self) -> frozenset[str]:
        return await super().names() | await self._archive.body_names()

    async def reconcile(self, digests: Mapping[str, str], listed: Collection[str]) -> None:
        async with self._both:
            await self._archive.restore_bodies(digests.values())
            await super().reconcile(digests, listed)
            self._archived = {digest for digest in self._archived if self.is_held(digest)}
            for digest in await self._archive.body_names() & frozenset(listed) - self.held():
                await self._archive.drop_body(digest)


def open_archive(storage_url: str, paths: PolicyPaths) -> Archive:
    """The archive of one policy; "": none. Raises INVALID_ARGUMENT for a URL of another kind."""
    return BlobArchive(open_store(storage_url), paths) if storage_url else NoArchive()


def check_store(storage_url: str) -> None:
    """Raises INVALID_ARGUMENT for a read-only store, UNAVAILABLE where it does not answer."""
    if storage_url:
        open_store(storage_url).check()


def open_store(storage_url: str) -> ObjectStore:
    try:
        # An optional dependency; and the AWS libraries are large.
        from ratoon.stream.object_store import ObjectStore
    except ImportError as err:
        raise invalid("storage_url", f"no library for it ({err})", "ratoon[s3] installed") from err
    return ObjectStore(storage_url, timeout_s=_TIMEOUT_S)


def _left_behind(error: RatoonError) -> None:
    """Log it; the next start deletes what is left."""
    _LOG.warning("not deleted from the archive", error=error.message)
