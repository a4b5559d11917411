"""Weights of a policy into a local folder.

Every byte of a version-N has been verified against its file's digest before the folder got its
name; whatever fails leaves the versions and `latest` as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratoon_client.caller import Caller, retried
from ratoon_client.errors import IntegrityError, RatoonApiError
from ratoon_client.results import WeightFile, WeightManifest
from ratoon_client.weights.checks import check_manifest
from ratoon_client.weights.chunks import ChunkRange, chunk_ranges
from ratoon_client.weights.folder import VersionsFolder
from ratoon_client.weights.partial import PartialFile
from ratoon_client.weights.threads import in_thread
from ratoon_client.wire.decode import decode
from ratoon_client.wire.rpcs import GET_WEIGHT_MANIFEST
from ratoon_proto.v1 import service_pb2

KEEP_VERSIONS = 2
# A version may be retired while it is pulled; then the newest is another one.
_MAX_MANIFESTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledWeights:
    """`folder` is that of the version; bytes that were not fetched were here already."""

    policy_id: str
    version: int
    folder: Path
    manifest: WeightManifest
    fetched_bytes: int


async def pull_weights(
    caller: Caller, policy_id: str, root: Path, *, version: int | None, keep: int | None
) -> PulledWeights:
    """Pull `version`, or the newest published, which `latest` then names.

    `keep` is how many of the last pulled versions stay; None: all. Files that an earlier version
    has are linked, what an interrupted pull fetched is used. Raises IntegrityError where bytes are
    not what their digests say.
    """
    folder = VersionsFolder(root)
    async with folder.locked():
        await in_thread(folder.clean)
        manifest = await _manifest(caller, policy_id, version)
        for _ in range(_MAX_MANIFESTS):
            try:
                fetched_bytes = await _pull(caller, folder, manifest)
                break
            except RatoonApiError as error:
                if version is not None or error.code != "WEIGHTS_NOT_FOUND":
                    raise
                newer = await _manifest(caller, policy_id, version)
                if newer == manifest:
                    raise
                manifest = newer
        else:
            raise IntegrityError(f"{policy_id}: versions are retired faster than they are pulled")
        await in_thread(_settle, folder, manifest.version, is_latest=version is None, keep=keep)
    return PulledWeights(
        policy_id=policy_id,
        version=manifest.version,
        folder=folder.version_folder(manifest.version),
        manifest=manifest,
        fetched_bytes=fetched_bytes,
    )


def _settle(folder: VersionsFolder, version: int, *, is_latest: bool, keep: int | None) -> None:
    """After a pull: `latest`, and what is not needed any more."""
    if is_latest:
        folder.point_latest(version)
    folder.drop_partial()
    if keep is not None:
        folder.prune(keep=keep, current=version)


async def _manifest(caller: Caller, policy_id: str, version: int | None) -> WeightManifest:
    request = service_pb2.GetWeightManifestRequest(policy_id=policy_id, version=version)
    manifest = decode(await caller.call(GET_WEIGHT_MANIFEST, request), WeightManifest)
    check_manifest(manifest, policy_id=policy_id, version=version)
    return manifest


async def _pull(caller: Caller, folder: VersionsFolder, manifest: WeightManifest) -> int:
    """Make the version's folder where it is not there. Gives the bytes that were fetched."""
    if await in_thread(folder.has, manifest):
        return 0
    sources: dict[str, Path] = {}
    fetched_bytes = 0
    with ExitStack() as open_files, _first_error():
        # A file is verified and written to the disk while the next one comes.
        async with asyncio.TaskGroup() as finishing:
            for file in manifest.files:
                if file.digest in sources:
                    continue
                local = await in_thread(folder.find, file)
                if local is None:
                    local = folder.partial_path(file.digest)
                    partial = open_files.enter_context(
                        PartialFile(local, size_bytes=file.size_bytes)
                    )
                    fetched_bytes += await _fetch_missing(caller, manifest, file, partial)
                    finishing.create_task(_finish(manifest, file, partial))
                sources[file.digest] = local
    await in_thread(folder.add, manifest, sources)
    return fetched_bytes


async def _fetch_missing(
    caller: Caller, manifest: WeightManifest, file: WeightFile, partial: PartialFile
) -> int:
    """Gives the bytes that were missing."""
    ranges = list(chunk_ranges(file.size_bytes, await caller.chunk_bytes()))
    in_flight = asyncio.Semaphore(caller.config.fetches_in_flight)

    async def fetch(part: ChunkRange) -> None:
        async with in_flight:
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

    missing = await in_thread(partial.missing, ranges)
    with _first_error():
        async with asyncio.TaskGroup() as tasks:
            for part in missing:
                tasks.create_task(fetch(part))
    return sum(part.length for part in missing)


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
