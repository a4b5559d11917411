"""Files of a version made of those that are here, by the deltas that manifests offer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_client.weights.folder import VersionsFolder
from ratoon_client.weights.threads import in_thread
from ratoon_proto.types import WeightDelta, WeightFile, WeightManifest

# Of a version that is still published; raises WEIGHTS_NOT_FOUND.
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
    """Those of `missing` that deltas make for less than the files themselves.

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
