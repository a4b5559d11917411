"""Weights of a policy into a local folder.

Every byte of a version-N has been verified against its file's digest before the folder got its
name; whatever fails leaves the versions and `latest` as they were.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratoon_client.caller import Caller, retried
from ratoon_client.config import weights_root
from ratoon_client.errors import IntegrityError, RatoonApiError
from ratoon_client.weights.calls import weight_manifest
from ratoon_client.weights.chunks import ChunkRange, PartialFile, chunk_ranges
from ratoon_client.weights.disk import in_thread
from ratoon_client.weights.folder import VersionsFolder, check_manifest
from ratoon_client.weights.sources import Rebuilt, published_folder, rebuild_missing, take_published
from ratoon_proto.types import WeightDelta, WeightFile, WeightManifest

KEEP_VERSIONS = 2
# A version may be retired while it is pulled; then the newest is another one.
_MAX_MANIFESTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledWeights:
    """`folder` is that of the version; bytes that were not fetched were here already.

    `parent_version` is the local version that deltas began with; None: none was applied. `fetch_s`
    are the seconds in which bytes came, which are verified meanwhile; `verify_s` those of what was
    verified, rebuilt and written before and after.
    """

    policy_id: str
    version: int
    folder: Path
    manifest: WeightManifest
    fetched_bytes: int
    parent_version: int | None
    fetch_s: float
    verify_s: float


@dataclass(slots=True, kw_only=True)
class _Fetched:
    """What came, and in how many seconds."""

    num_bytes: int = 0
    seconds: float = 0.0
    parent_version: int | None = None


async def pull_weights(
    caller: Caller,
    policy_id: str,
    root: Path,
    *,
    version: int | None,
    name: str | None = None,
    keep: int | None,
) -> PulledWeights:
    """Pull `version`, that of this `name`, or the newest published, which `latest` then names.

    `keep` is how many of the last pulled versions stay; None: all. Files that an earlier version or
    the service's folder on this host has are linked, what an interrupted pull fetched is used, and
    deltas are fetched in place of files where they are fewer bytes. Raises IntegrityError where
    bytes are not what their digests say.
    """
    folder = VersionsFolder(root)
    async with folder.locked():
        await in_thread(folder.clean)
        delta_from = None
        if weights_root(caller.config) is None:
            # Else whole files are linked, for which a version has to be written.
            delta_from = max(await in_thread(folder.listed), default=None)
        manifest = await _manifest(caller, policy_id, version, name, delta_from)
        for _ in range(_MAX_MANIFESTS):
            try:
                begun = time.monotonic()
                fetched = await _pull(caller, folder, manifest)
                verify_s = time.monotonic() - begun - fetched.seconds
                break
            except RatoonApiError as error:
                if version is not None or error.code != "WEIGHTS_NOT_FOUND":
                    raise
                newer = await _manifest(caller, policy_id, version, name, delta_from)
                if newer == manifest:
                    raise
                manifest = newer
        else:
            raise IntegrityError(f"{policy_id}: versions are retired faster than they are pulled")
        is_latest = version is None and name is None
        await in_thread(_settle, folder, manifest.version, is_latest=is_latest, keep=keep)
    return PulledWeights(
        policy_id=policy_id,
        version=manifest.version,
        folder=folder.version_folder(manifest.version),
        manifest=manifest,
        fetched_bytes=fetched.num_bytes,
        parent_version=fetched.parent_version,
        fetch_s=fetched.seconds,
        verify_s=verify_s,
    )


def _settle(folder: VersionsFolder, version: int, *, is_latest: bool, keep: int | None) -> None:
    """After a pull: `latest`, and what is not needed any more."""
    if is_latest:
        folder.point_latest(version)
    folder.drop_partial()
    if keep is not None:
        folder.prune(keep=keep, versions=[version])


async def _manifest(
    caller: Caller,
    policy_id: str,
    version: int | None,
    name: str | None = None,
    delta_from: int | None = None,
) -> WeightManifest:
    manifest = await weight_manifest(caller, policy_id, version, name=name, delta_from=delta_from)
    check_manifest(manifest, policy_id=policy_id, version=version)
    return manifest


async def _pull(caller: Caller, folder: VersionsFolder, manifest: WeightManifest) -> _Fetched:
    """Make the version's folder where it is not there."""
    fetched = _Fetched()
    if await in_thread(folder.has, manifest):
        return fetched
    sources: dict[str, Path] = {}
    missing: dict[str, WeightFile] = {}
    wanted = {file.digest: file for file in manifest.files}
    here = await asyncio.gather(*(_find(caller, folder, manifest, f) for f in wanted.values()))
    for file, path in zip(wanted.values(), here, strict=True):
        if path is None:
            missing[file.digest] = file
        else:
            sources[file.digest] = path
    rebuilt = await _rebuild(caller, folder, manifest, missing.values(), fetched)
    sources |= rebuilt.files
    with ExitStack() as open_files, _first_error():
        # A file is verified and written to the disk while the next one comes.
        async with asyncio.TaskGroup() as finishing:
            for digest, file in missing.items():
                if digest in rebuilt.files:
                    continue
                path = folder.partial_path(digest)
                partial = open_files.enter_context(PartialFile(path, size_bytes=file.size_bytes))
                await _fetch_missing(caller, manifest, file, partial, fetched)
                finishing.create_task(_finish(manifest, file, partial))
                sources[digest] = path
    await in_thread(folder.add, manifest, sources)
    fetched.parent_version = rebuilt.parent_version
    return fetched


async def _find(
    caller: Caller, folder: VersionsFolder, manifest: WeightManifest, file: WeightFile
) -> Path | None:
    """A verified file of a local version, or from the service's own folder."""
    path = await in_thread(folder.find, file)
    root = weights_root(caller.config)
    if path is not None or root is None:
        return path
    published = published_folder(root, manifest.policy_id, manifest.version)
    if published is None:
        return None
    # Not the path of a file on its way: that may be fetched further.
    path = folder.partial_path(f"{file.digest}.here")
    is_taken = await in_thread(take_published, published / file.name, path, file)
    return path if is_taken else None


async def _rebuild(
    caller: Caller,
    folder: VersionsFolder,
    manifest: WeightManifest,
    missing: Collection[WeightFile],
    fetched: _Fetched,
) -> Rebuilt:
    """What deltas make of missing files; nothing where one is not whole."""

    async def fetch(of: WeightManifest, file: WeightFile) -> Path:
        return await _fetch_whole(caller, folder, of, file, fetched)

    def parent(version: int) -> Awaitable[WeightManifest]:
        return _manifest(caller, manifest.policy_id, version)

    try:
        return await rebuild_missing(folder, manifest, missing, parent, fetch)
    except (IntegrityError, OSError):
        pass
    except RatoonApiError as error:
        # A version between was retired; or this one, which the files themselves will tell.
        if error.code != "WEIGHTS_NOT_FOUND":
            raise
    return Rebuilt(files={}, parent_version=None)


async def fetch_delta(
    caller: Caller, root: Path, manifest: WeightManifest, delta: WeightDelta
) -> Path:
    """Fetch a delta of this version into the folder of pulled versions, where `pull_weights` finds
    it. Raises IntegrityError where its bytes are not what its digest says."""
    check_manifest(manifest, policy_id=manifest.policy_id, version=manifest.version)
    folder = VersionsFolder(root)
    async with folder.locked():
        return await _fetch_whole(caller, folder, manifest, delta.file, _Fetched())


async def _fetch_whole(
    caller: Caller,
    folder: VersionsFolder,
    manifest: WeightManifest,
    file: WeightFile,
    fetched: _Fetched,
) -> Path:
    path = folder.partial_path(file.digest)
    with PartialFile(path, size_bytes=file.size_bytes) as partial:
        await _fetch_missing(caller, manifest, file, partial, fetched)
        await _finish(manifest, file, partial)
    return path


async def _fetch_missing(
    caller: Caller,
    manifest: WeightManifest,
    file: WeightFile,
    partial: PartialFile,
    fetched: _Fetched,
) -> None:
    begun = time.monotonic()
    ranges = list(chunk_ranges(file.size_bytes, await caller.chunk_bytes()))
    missing = await in_thread(partial.missing, ranges)
    rest = iter(missing)

    async def fetch(part: ChunkRange) -> None:
        data = await retried(
            lambda left_s: caller.transport.read_file(
                manifest.policy_id,
                manifest.version,
                file,
                offset=part.offset,
                length=part.length,
                timeout_s=min(left_s, caller.config.attempt_timeout_s),
            ),
            timeout_s=caller.config.timeout_s,
        )
        await in_thread(partial.write, part.offset, data)

    async def fetch_rest() -> None:
        """One after the other: after one that fails, none begins."""
        for part in rest:
            await fetch(part)

    with _first_error():
        async with asyncio.TaskGroup() as tasks:
            for _ in range(caller.config.fetches_in_flight):
                tasks.create_task(fetch_rest())
    fetched.num_bytes += sum(part.length for part in missing)
    fetched.seconds += time.monotonic() - begun


async def _finish(manifest: WeightManifest, file: WeightFile, partial: PartialFile) -> None:
    try:
        await in_thread(partial.finish, file.digest)
    except IntegrityError as err:
        raise IntegrityError(f"{file.name} of version {manifest.version}: {err}") from err


@contextmanager
def _first_error() -> Generator[None, None, None]:
    """The error that ended a group of tasks, in the group's place."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
