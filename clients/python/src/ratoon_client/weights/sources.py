"""Files of a version made of those that this host has: by deltas, or from the service's folder.

A file of the service's folder that belongs to this user is linked, any other is copied, and both
are verified after that.

Why nothing that is linked is written over: the service uses the files of a pruned version again in
three steps. It renames the version's folder; it checks that a file has no other name and that
nobody has it open; it writes. A link that is there before the check is seen by it. So once a file
is linked it is looked up under the version's name again: while it is there, the folder was not yet
renamed, and the check is still to come. Else the link may have come too late, and is removed. Bytes
that were written over before, or are of another version of that number, have another digest. Where
a file system has no leases (fcntl(2)), as networks' have none, the service writes over no file.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratoon_client.weights.chunks import is_whole
from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_client.weights.disk import in_thread
from ratoon_client.weights.folder import VersionsFolder, is_plain_name
from ratoon_proto.types import WeightDelta, WeightFile, WeightManifest

# The manifest of a version that is still published; raises WEIGHTS_NOT_FOUND.
GetManifest = Callable[[int], Awaitable[WeightManifest]]
# A file of a version, verified.
FetchFile = Callable[[WeightManifest, WeightFile], Awaitable[Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A delta, and the manifest of the version that it leads to."""

    manifest: WeightManifest
    delta: WeightDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """Files by digest, made of those of the local version `parent_version`."""

    files: dict[str, Path]
    parent_version: int | None


async def find_chain(
    manifest: WeightManifest, local: Collection[int], max_bytes: int, get_manifest: GetManifest
) -> tuple[Step, ...]:
    """Deltas from a local version to `manifest`, the oldest first, together below `max_bytes`.

    Empty where there is none.
    """
    chain: list[Step] = []
    seen = {manifest.version}
    while True:
        offered = [delta for delta in manifest.deltas if delta.parent_version not in seen]
        if not offered:
            return ()
        near = [delta for delta in offered if delta.parent_version in local]
        delta = min(near or offered, key=lambda delta: delta.file.size_bytes)
        chain.insert(0, Step(manifest=manifest, delta=delta))
        max_bytes -= delta.file.size_bytes
        if max_bytes <= 0:
            return ()
        if near:
            return tuple(chain)
        seen.add(delta.parent_version)
        manifest = await get_manifest(delta.parent_version)


async def rebuild_missing(
    folder: VersionsFolder,
    manifest: WeightManifest,
    missing: Collection[WeightFile],
    get_manifest: GetManifest,
    fetch: FetchFile,
) -> Rebuilt:
    """Make the files of `missing` that deltas make for less than the files themselves.

    Raises IntegrityError where a delta does not make what it says.
    """
    local = await in_thread(folder.listed)
    max_bytes = sum(file.size_bytes for file in missing)
    chain = await find_chain(manifest, local, max_bytes, get_manifest)
    made: dict[str, Path] = {}
    for step in chain:
        path = await fetch(step.manifest, step.delta.file)
        parents = local[chain[0].delta.parent_version] | made
        made |= await in_thread(_rebuild, folder, step, path, parents)
    files = {file.digest: made[file.digest] for file in missing if file.digest in made}
    return Rebuilt(files=files, parent_version=chain[0].delta.parent_version if files else None)


def _rebuild(
    folder: VersionsFolder, step: Step, delta: Path, parents: Mapping[str, Path]
) -> dict[str, Path]:
    """The files of the step's version that the delta makes of `parents`, which are not verified."""
    promised = {(file.digest, file.size_bytes) for file in step.manifest.files}
    made: dict[str, Path] = {}
    for file in read_delta(delta):
        parent = parents.get(file.parent_digest)
        if parent is not None and (file.digest, file.size_bytes) in promised:
            target = folder.partial_path(f"{file.digest}.rebuilt")
            rebuild(file, parent, target)
            made[file.digest] = target
    return made


def published_folder(weights_root: Path, policy_id: str, version: int) -> Path | None:
    """Where the service puts a version; None for an id that would lead elsewhere."""
    return weights_root / policy_id / f"{version:08d}" if is_plain_name(policy_id) else None


def take_published(source: Path, target: Path, file: WeightFile) -> bool:
    """Make `target` of the service's `source`; whether that was possible and it is `file`.

    Nothing is left at `target` otherwise.
    """
    try:
        target.unlink(missing_ok=True)
        if source.stat().st_size == file.size_bytes:
            if not _is_linked(source, target):
                _copy(source, target)
            if is_whole(target, file):
                return True
        target.unlink(missing_ok=True)
    except OSError:  # Pruned, not ours to read, no room: what is wrong shows in the fetch.
        target.unlink(missing_ok=True)
    return False


def _is_linked(source: Path, target: Path) -> bool:
    """Another user could change what is linked after it was verified."""
    try:
        target.hardlink_to(source)
        linked = target.lstat()
        is_ours = stat.S_ISREG(linked.st_mode) and linked.st_uid == os.geteuid()
        if is_ours and os.path.samestat(linked, source.lstat()):
            return True
    except OSError:  # Another file system, or pruned meanwhile.
        pass
    target.unlink(missing_ok=True)
    return False


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as copied:
        os.fsync(copied.fileno())
