"""Versions of a policy's weights as folders: publish, read, prune.

A version folder gets its name once its files, and their digests in `manifest.json`, are on disk. A
version number never names two contents. A root has one writer, many readers.

    root/00000007/{manifest.json, config.json, model.safetensors, delta-from-00000006.bin, ...}
    root/.spare/    the version pruned last; the next is written over its pages, as new ones have
                    to be zeroed first
    root/.tmp-announced-00000008/{manifest.json, config.json, delta-from-00000007.bin, ...}
                    the version that is being written: its delta, and what else has no weights
    root/damaged-00000006/    a version that a disk has damaged, for whoever looks into it
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.model.delta_runs import DeltaPart
from ratoon.stream.deltas import join_delta, write_delta_apart
from ratoon.stream.files import (
    TEMPORARY_PREFIX,
    digest_file,
    fsync_folder,
    fsync_tree,
    is_open_elsewhere,
    link_or_copy,
    make_folder,
    remove_folder,
    remove_leftovers,
    remove_paths,
    rename_folder,
    seal_document,
    temporary_name,
    unseal_document,
)
from ratoon.stream.manifest import MadeBy, WeightManifest, from_document, to_document
from ratoon_proto.types import WeightDelta, WeightFile, WeightKind

_LOG = get_logger("versions")
MANIFEST_NAME = "manifest.json"
SPARE_NAME = ".spare"
DAMAGED_PREFIX = "damaged-"
# Largest chunk, which is the wire's own limit.
MAX_CHUNK_BYTES = 16 * 2**20

_VERSION_PATTERN = re.compile(r"[0-9]{8,}")
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")
_MISSING = (errno.ENOENT, errno.ENOTDIR)
# Errors for a name that exists, but is not a readable file.
_UNREADABLE = (errno.EIO, errno.EISDIR)


def version_folder(root: Path, version: int) -> Path:
    """The folder of a version, whether it exists or not."""
    return root / f"{version:08d}"


class Held(Protocol):
    """Weights that are held until they are published."""

    def write_rest(self, folder: Path) -> Mapping[str, str]:
        """Write the files alone that `write_delta` does not describe. Returns the digests, by name,
        of those that it computed; the others are read for theirs."""
        ...

    def write_delta(
        self, path: Path, parents: Mapping[str, str]
    ) -> tuple[Sequence[DeltaPart], Mapping[str, str]] | None:
        """Write parts of a delta, beside `path`, from files whose digests by name are `parents`.

        Returns them in the order of the files, with the digests of all files with changed weights;
        None if the weights were not compared with the parent's.
        """
        ...


def announce_version(
    root: Path,
    policy_id: str,
    version: int,
    kind: WeightKind,
    held: Held,
    created_at: float,
    *,
    made_by: MadeBy = MadeBy(),  # noqa: B008 - it is frozen
) -> WeightManifest | None:
    """Write the delta of `version`, whose weight files `publish_version` is to write next.

    Returns the manifest that it will have, once `find_named` and `open_chunk` find the delta; None,
    and nothing can be found, if the weights were not compared with the newest other version, if the
    delta is of no use or cannot be written, or if the version exists. Raises whatever else `held`
    raises.
    """
    make_folder(root)
    remove_leftovers(root)
    if version_folder(root, version).exists():
        return None
    parent = _newest_other(root, version, policy_id, kind)
    if parent is None:
        return None
    temporary = temporary_name(version_folder(root, version))
    temporary.mkdir()
    try:
        delta = temporary / delta_name(parent.version)
        found = held.write_delta(delta, {file.name: file.digest for file in parent.files})
        if found is None:
            return None
        parts, digests = found
        known = held.write_rest(temporary)
        rest = _describe_files(temporary, known, {part.path.name for part in parts})
        sizes = {file.name: file.size_bytes for file in parent.files}
        weights = (
            WeightFile(name=name, size_bytes=sizes[name], digest=digest)
            for name, digest in digests.items()
        )
        manifest = WeightManifest(
            policy_id=policy_id,
            version=version,
            kind=kind,
            files=tuple(sorted((*rest, *weights), key=lambda file: Path(file.name))),
            created_at=created_at,
            made_by=made_by,
        )
        before = version_folder(root, parent.version)
        share = join_delta(delta, before, parent, manifest.files, parts)
        if not delta.exists():
            return None
        manifest = _with_file(manifest, parent.version, delta, share)
        (temporary / MANIFEST_NAME).write_bytes(seal_document(to_document(manifest)))
        temporary.rename(_announced_folder(root, version))
        return manifest
    except OSError as err:
        _LOG.warning("no delta from the device", version=version, reason=str(err))
        return None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_version(
    root: Path,
    policy_id: str,
    version: int,
    kind: WeightKind,
    write: Callable[[Path], Mapping[str, str]],
    created_at: float,
    *,
    deltas: bool = False,
    made_by: MadeBy = MadeBy(),  # noqa: B008 - it is frozen
    announced: WeightManifest | None = None,
) -> WeightManifest:
    """Make `version` visible with the files that `write` puts in the folder it is given.

    `write` may find files there to overwrite. It returns the digests, by name, of files that it
    computed while writing; the others are read for theirs. If the version exists, its manifest is
    returned without calling `write`: after a crash the same step gives the same bits. A damaged
    version is set aside and written again. With `deltas` the version has a delta from the newest
    other version, if that is small enough. An `announced` version has that manifest, and the delta
    that was written for it. Raises INVALID_ARGUMENT if the existing version is another policy's or
    of another kind, and whatever `write` raises; nothing else is visible then.
    """
    if version < 0:
        raise invalid("version", version, "at least 0")
    make_folder(root)
    target = version_folder(root, version)
    there = _existing(root, version)
    if there is not None:
        # The process that published it may have been killed before it synced the name.
        fsync_folder(root)
        return _same_version(root, there, policy_id, kind)
    early = _announced_folder(root, version)
    remove_leftovers(root, spared=None if announced is None else early)
    temporary = temporary_name(target)
    spares = _take_spare(root, temporary)
    try:
        known = write(temporary)
        for path in spares:
            if path.exists() and path.stat().st_mtime_ns == 0:
                path.unlink()
        manifest = WeightManifest(
            policy_id=policy_id,
            version=version,
            kind=kind,
            files=_describe_files(temporary, known),
            created_at=created_at,
            made_by=made_by,
        )
        assert manifest.files, "a version without files"
        if announced is not None:
            assert announced.files == manifest.files, "what was announced is written"
            manifest = announced
            for delta in announced.deltas:
                link_or_copy(early / delta.file.name, temporary / delta.file.name)
        elif deltas:
            manifest = _with_delta(root, temporary, manifest)
        (temporary / MANIFEST_NAME).write_bytes(seal_document(to_document(manifest)))
        fsync_tree(temporary)
        return _name(temporary, target, manifest)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def delta_name(parent_version: int) -> str:
    """Name of the delta from a version."""
    return f"delta-from-{parent_version:08d}.bin"


def _announced_folder(root: Path, version: int) -> Path:
    return root / f"{TEMPORARY_PREFIX}announced-{version:08d}"


def _announced_file(
    root: Path, version: int | None, is_wanted: Callable[[WeightFile], bool]
) -> tuple[Path, WeightFile] | None:
    """A file of the announced versions, or of one of them, that is not published yet.

    Raises WEIGHTS_NOT_FOUND with the field `version` for a file that is still to be written.
    """
    for folder in root.glob(f"{TEMPORARY_PREFIX}announced-*"):
        try:
            manifest = from_document(unseal_document((folder / MANIFEST_NAME).read_bytes()))
        except FileNotFoundError:  # It is removed.
            continue
        if version not in (None, manifest.version):
            continue
        for file in filter(is_wanted, manifest.fetchable):
            if not (folder / file.name).is_file():
                raise RatoonError(
                    ErrorCode.WEIGHTS_NOT_FOUND,
                    f"{file.name} of version {manifest.version} is still being written",
                    field="version",
                    got=str(manifest.version),
                    expected="a published version",
                )
            return folder / file.name, file
    return None


def _with_delta(root: Path, folder: Path, manifest: WeightManifest) -> WeightManifest:
    """Writes the delta from the newest other version to `folder`, and returns the manifest with
    it."""
    parent = _newest_other(root, manifest.version, manifest.policy_id, manifest.kind)
    if parent is None:
        return manifest
    path = folder / delta_name(parent.version)
    before = version_folder(root, parent.version)
    try:
        share = write_delta_apart(path, before, parent, folder, manifest.files)
    except OSError as err:
        # Readers need only the whole files.
        _LOG.warning("no delta", version=manifest.version, reason=str(err))
        path.unlink(missing_ok=True)
        return manifest
    return _with_file(manifest, parent.version, path, share)


def _with_file(
    manifest: WeightManifest, parent_version: int, path: Path, share: float | None
) -> WeightManifest:
    """The manifest with a delta, if there is one at `path`."""
    deltas: tuple[WeightDelta, ...] = ()
    if path.exists():
        deltas = (WeightDelta(parent_version=parent_version, file=_describe(path, path.name)),)
    return replace(manifest, deltas=deltas, changed_share=share)


def _newest_other(
    root: Path, version: int, policy_id: str, kind: WeightKind
) -> WeightManifest | None:
    """Newest version but `version`; None if it cannot be read, or belongs to another policy or
    kind."""
    others = [other for other in list_versions(root) if other != version]
    if not others:
        return None
    try:
        parent = whole_version(root, others[-1])
    except RatoonError:
        return None
    return parent if (parent.policy_id, parent.kind) == (policy_id, kind) else None


def _existing(root: Path, version: int) -> WeightManifest | None:
    """Manifest of a complete version; None if there is none, or no longer."""
    if not version_folder(root, version).exists():
        return None
    try:
        return whole_version(root, version)
    except RatoonError as err:
        if err.code is not ErrorCode.WEIGHTS_NOT_FOUND:
            raise
        set_aside(root, version, err.message)
        return None


def _name(temporary: Path, target: Path, manifest: WeightManifest) -> WeightManifest:
    """Give a version its name, or return the manifest of the same files that have it already."""
    try:
        rename_folder(temporary, target)
        return manifest
    except FileExistsError:
        # A replaced worker that has not noticed may have published meanwhile.
        there = read_manifest(target.parent, manifest.version)
        if there.files != manifest.files:
            raise
    shutil.rmtree(temporary)
    return _same_version(target.parent, there, manifest.policy_id, manifest.kind)


def read_manifest(root: Path, version: int, policy_id: str = "") -> WeightManifest:
    """Manifest of a published version of this policy ("": any).

    Raises WEIGHTS_NOT_FOUND if there is none or it is damaged, and UNAVAILABLE if it cannot be read
    now.
    """
    path = version_folder(root, version) / MANIFEST_NAME
    try:
        manifest = from_document(unseal_document(path.read_bytes()))
    except OSError as err:
        if err.errno in _MISSING:
            raise RatoonError(
                ErrorCode.WEIGHTS_NOT_FOUND,
                f"version {version} is not published or was removed",
                field="version",
                got=str(version),
                expected="a published version",
            ) from err
        if err.errno in _UNREADABLE:
            raise _damaged(version, f"its manifest cannot be read: {err.strerror}") from err
        raise _unavailable(version, err) from err
    except (ValueError, KeyError, TypeError) as err:
        raise _damaged(version, f"its manifest is unreadable: {err}") from err
    if manifest.version != version or policy_id not in ("", manifest.policy_id):
        other = f"version {manifest.version} of policy {manifest.policy_id}"
        raise _damaged(version, f"its manifest is that of {other}")
    return manifest


def whole_version(root: Path, version: int, policy_id: str = "") -> WeightManifest:
    """Manifest of a version that has all its files, by their sizes. Raises what `read_manifest`
    raises.

    Deltas may be missing: readers then fetch whole files.
    """
    manifest = read_manifest(root, version, policy_id)
    for file in manifest.files:
        _whole_path(root, version, file)
    return manifest


def set_aside(root: Path, version: int, reason: str) -> Path | None:
    """Rename the folder of a damaged version, which is kept for inspection.

    The first such folder of each version is kept. Returns it, or None if there was nothing to keep.
    """
    folder, kept = version_folder(root, version), root / f"{DAMAGED_PREFIX}{version:08d}"
    if kept.exists():
        remove_folder(folder)
    else:
        with contextlib.suppress(FileNotFoundError):
            rename_folder(folder, kept)
    found = kept if kept.exists() else None
    _LOG.error("version damaged", root=str(root), version=version, reason=reason, kept=str(found))
    return found


def _whole_path(root: Path, version: int, file: WeightFile) -> Path:
    """Path of a version's file, which must have the size in the manifest."""
    path = version_folder(root, version) / file.name
    try:
        size_bytes = path.stat().st_size
    except OSError as err:
        if err.errno in (*_MISSING, *_UNREADABLE):
            raise _damaged(version, f"{file.name}: {err.strerror}") from err
        raise _unavailable(version, err) from err
    if size_bytes != file.size_bytes:
        reason = f"{file.name} has {size_bytes} bytes, expected {file.size_bytes}"
        raise _damaged(version, reason)
    return path


def _damaged(version: int, reason: str) -> RatoonError:
    return RatoonError(
        ErrorCode.WEIGHTS_NOT_FOUND,
        f"version {version} is damaged: {reason}",
        field="version",
        got=str(version),
        expected="a version whose files are whole",
    )


def _unavailable(version: int, error: OSError) -> RatoonError:
    text = f"version {version} cannot be read now: {error.strerror}"
    return RatoonError(ErrorCode.UNAVAILABLE, text)


def list_versions(root: Path) -> tuple[int, ...]:
    """Published versions, ascending; none if the root is missing."""
    if not root.is_dir():
        return ()
    return tuple(
        sorted(
            int(path.name)
            for path in root.iterdir()
            if _VERSION_PATTERN.fullmatch(path.name) and (path / MANIFEST_NAME).exists()
        )
    )


def prune_versions(root: Path, kept: Collection[int | None]) -> tuple[int, ...]:
    """Remove all versions but the kept; returns the removed."""
    removed = tuple(version for version in list_versions(root) if version not in kept)
    for version in removed[:-1]:
        remove_folder(version_folder(root, version))
    if removed:
        _make_spare(root, removed[-1])
    return removed


def _make_spare(root: Path, version: int) -> None:
    """Replace the spare folder by the version's."""
    spare = root / SPARE_NAME
    remove_paths([spare])
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        rename_folder(version_folder(root, version), spare)


def _take_spare(root: Path, temporary: Path) -> list[Path]:
    """Create `temporary` with the weight files of the spare folder that nobody reads any more.

    Their modification time is 0 until they are overwritten. The folder loses its version's name
    before they are checked, on which clients that link files rely:
    `ratoon_client.weights.sources`.
    """
    try:
        (root / SPARE_NAME).rename(temporary)
    except FileNotFoundError:
        temporary.mkdir()
        return []
    paths = list(temporary.iterdir())
    spares = [p for p in paths if p.suffix == ".safetensors" and not is_open_elsewhere(p)]
    for path in spares:
        os.utime(path, ns=(0, 0))
    remove_paths(set(paths).difference(spares))
    return spares


def find_named(root: Path, version: int, name: str, policy_id: str = "") -> tuple[Path, WeightFile]:
    """A file that the manifest of a published or announced version names.

    Raises WEIGHTS_NOT_FOUND for any other name, and with the field `version` if the version is
    damaged or the file is still to be written.
    """
    try:
        manifest = read_manifest(root, version, policy_id)
    except RatoonError:
        found = _announced_file(root, version, lambda file: file.name == name)
        if found is None:
            raise
        return found
    for file in manifest.fetchable:
        if file.name == name:
            return _whole_path(root, version, file), file
    raise RatoonError(
        ErrorCode.WEIGHTS_NOT_FOUND,
        f"version {version} has no file of that name",
        field="name",
        got=name,
        expected="a file of the manifest",
    )


def find_file(root: Path, digest: str) -> tuple[Path, WeightFile]:
    """Newest published or announced file with this digest; damaged versions are skipped.

    Raises INVALID_ARGUMENT for an invalid digest, WEIGHTS_NOT_FOUND if no file has it, with the
    field `version` if it is still to be written.
    """
    if not _DIGEST_PATTERN.fullmatch(digest):
        raise invalid("digest", repr(digest), "32 lower-case hexadecimal digits")
    for version in reversed(list_versions(root)):
        try:
            for file in read_manifest(root, version).fetchable:
                if file.digest == digest:
                    return _whole_path(root, version, file), file
        except RatoonError as err:
            if err.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                raise
            # The version was damaged, or pruned since it was listed.
    found = _announced_file(root, None, lambda file: file.digest == digest)
    if found is None:
        raise _digest_not_found(digest)
    return found


def open_chunk(root: Path, digest: str, offset: int, length: int) -> bytes:
    """Returns bytes [offset, offset + length) of the file with this digest, fewer at its end.

    Raises INVALID_ARGUMENT for a bad digest, offset < 0, length < 1 or length > MAX_CHUNK_BYTES;
    WEIGHTS_NOT_FOUND; RANGE_NOT_SATISFIABLE for an offset at or past the end (0 of an empty file is
    b"").
    """
    if offset < 0:
        raise invalid("offset", offset, "at least 0")
    if not 1 <= length <= MAX_CHUNK_BYTES:
        raise invalid("length", length, f"1 to {MAX_CHUNK_BYTES}")
    path, file = find_file(root, digest)
    if offset >= max(file.size_bytes, 1):
        raise RatoonError(
            ErrorCode.RANGE_NOT_SATISFIABLE,
            f"offset: got {offset}, expected below the file's {file.size_bytes} bytes",
            field="offset",
            got=str(offset),
            expected=f"below {file.size_bytes}",
            details={"size_bytes": str(file.size_bytes)},
        )
    try:
        with path.open("rb") as handle:
            handle.seek(offset)
            return handle.read(min(length, file.size_bytes - offset))
    except FileNotFoundError as err:
        raise _digest_not_found(digest) from err


def _digest_not_found(digest: str) -> RatoonError:
    return RatoonError(
        ErrorCode.WEIGHTS_NOT_FOUND,
        "no published version has a file with this digest",
        field="digest",
        got=digest,
        expected="a digest of a manifest",
    )


def _same_version(
    root: Path, manifest: WeightManifest, policy_id: str, kind: WeightKind
) -> WeightManifest:
    if (manifest.policy_id, manifest.kind) != (policy_id, kind):
        version = manifest.version
        raise RatoonError(
            ErrorCode.INVALID_ARGUMENT,
            f"version {version} of policy {policy_id} ({kind}) cannot be written, as that version"
            f" exists: it is of policy {manifest.policy_id} ({manifest.kind}) in {root}. Move it"
            " away, or give each service a weights_root of its own",
            field="version",
            got=str(version),
            expected="a version that does not exist",
        )
    return manifest


def _describe_files(
    folder: Path, known: Mapping[str, str], ignored: Collection[str] = ()
) -> tuple[WeightFile, ...]:
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    paths = {n: path for n, path in paths.items() if n not in ignored and not path.is_dir()}
    unseen = known.keys() - paths.keys()
    if unseen:
        raise FileNotFoundError(
            errno.ENOENT, "another rank wrote where this one cannot see", *unseen
        )
    assert all(path.is_file() and not path.is_symlink() for path in paths.values()), "only files"
    assert MANIFEST_NAME not in paths, "manifest.json is ours"
    return tuple(_describe(path, name, known.get(name)) for name, path in paths.items())


def _describe(path: Path, name: str, digest: str | None = None) -> WeightFile:
    size_bytes = path.stat().st_size
    return WeightFile(name=name, size_bytes=size_bytes, digest=digest or digest_file(path))
