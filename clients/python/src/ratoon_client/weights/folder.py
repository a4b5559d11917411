"""A local folder of pulled versions.

    version-12/          whole, with its manifest beside its files
    latest               link to the version that was newest at the last pull
    .partial/            files on their way, by digest
    .lock                held while a pull changes any of this
    .receiver.json       what a receiver committed last; .receiver.lock while there is one

`version-N` is either whole and verified or not there; it gets its name by one rename. A manifest is
written only with names of one path component, or of two for chat templates, and digests that may be
file names.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ratoon_client.errors import IntegrityError
from ratoon_client.weights.chunks import is_whole
from ratoon_client.weights.disk import open_lock
from ratoon_proto.types import WeightFile, WeightManifest

# Ours, beside a version's files.
MANIFEST_NAME = ".ratoon-manifest.json"
# The folders are those of a tokenizer's named chat templates and of a value head.
_FILE_NAME = re.compile(
    r"((additional_chat_templates|value_head)/)?(?!\.{1,2}$)[a-zA-Z0-9._-]{1,255}"
)
_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,255}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"version-(\d{1,19})")
_STAGED = ".staged-"
_LOCK_POLL_S = 0.05
COMMITTED_NAME = ".receiver.json"


def is_plain_name(name: str) -> bool:
    """Whether it is one path component, and neither `.` nor `..`."""
    return _NAME.fullmatch(name) is not None


def check_manifest(manifest: WeightManifest, *, policy_id: str, version: int | None) -> None:
    """Raises IntegrityError naming the file at fault."""
    if manifest.policy_id != policy_id or version not in (None, manifest.version):
        raise IntegrityError(
            f"asked for {policy_id} version {version}, got {manifest.policy_id!r:.80} version"
            f" {manifest.version}"
        )
    if manifest.version < 0 or not manifest.files:
        raise IntegrityError(f"{policy_id}: version {manifest.version} names no files")
    names: set[str] = set()
    for file in (*manifest.files, *(delta.file for delta in manifest.deltas)):
        if not _FILE_NAME.fullmatch(file.name) or file.name == MANIFEST_NAME:
            raise IntegrityError(f"{policy_id}: {file.name!r:.80} is no name of a weight file")
        if file.name in names:
            raise IntegrityError(f"{policy_id}: the manifest names {file.name} twice")
        if _DIGEST.fullmatch(file.digest) is None or file.size_bytes < 0:
            raise IntegrityError(f"{policy_id}: {file.name} has no valid digest or size")
        names.add(file.name)


class VersionsFolder:
    """Made where it is not there. All methods that change it want the lock held."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def locked(self) -> AsyncGenerator[None]:
        """One pull at a time, over all processes of this machine."""
        descriptor = open_lock(self._root / ".lock")
        try:
            # The holder may be another process: there is no event to wait for.
            while not _try_lock(descriptor):  # noqa: ASYNC110
                await asyncio.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def version_folder(self, version: int) -> Path:
        return self._root / f"version-{version}"

    def partial_path(self, digest: str) -> Path:
        """Where a file on its way is kept."""
        folder = self._root / ".partial"
        folder.mkdir(exist_ok=True)
        return folder / digest

    def has(self, manifest: WeightManifest) -> bool:
        """Whether these very files are there under this version, with these very bytes."""
        folder = self.version_folder(manifest.version)
        return files_of(folder) == set(manifest.files) and all(
            is_whole(folder / file.name, file) for file in manifest.files
        )

    def find(self, file: WeightFile) -> Path | None:
        """A file of a local version with these bytes."""
        for folder in self._versions():
            for known in files_of(folder):
                path = folder / known.name
                if known.digest == file.digest and is_whole(path, file):
                    return path
        return None

    def listed(self) -> dict[int, dict[str, Path]]:
        """Files of local versions by digest, as they were when they were pulled."""
        return {
            int(folder.name.removeprefix("version-")): {
                file.digest: folder / file.name for file in files_of(folder)
            }
            for folder in self._versions()
        }

    def add(self, manifest: WeightManifest, sources: Mapping[str, Path]) -> Path:
        """Make version-N of whole files, by digest; those in `.partial` move, others are linked."""
        staged = self._root / f"{_STAGED}{uuid.uuid4().hex}"
        staged.mkdir()
        placed: dict[str, Path] = {}
        for file in manifest.files:
            source = placed.get(file.digest, sources[file.digest])
            target = staged / file.name
            target.parent.mkdir(exist_ok=True)
            if source.parent == self._root / ".partial":
                source.replace(target)
            else:
                _link(source, target)
            placed[file.digest] = target
        listed = asdict(manifest) | {"created_at": manifest.created_at.isoformat()}
        _write_json(staged / MANIFEST_NAME, listed)
        for folder in {(staged / file.name).parent for file in manifest.files} | {staged}:
            _fsync_folder(folder)
        self._put(staged, self.version_folder(manifest.version))
        return self.version_folder(manifest.version)

    def point_latest(self, version: int) -> None:
        """Readers of `latest` see the old or the new version, never none."""
        link = self._root / f"{_STAGED}{uuid.uuid4().hex}"
        link.symlink_to(f"version-{version}")
        link.replace(self._root / "latest")
        _fsync_folder(self._root)

    def clean(self) -> None:
        """Remove what interrupted pulls left half done; files on their way stay."""
        for path in self._root.glob(f"{_STAGED}*"):
            _remove(path)

    def drop_partial(self) -> None:
        _remove(self._root / ".partial")

    def prune(self, *, keep: int, versions: Iterable[int]) -> None:
        """Keep `versions` and what `latest` names, and the last pulled, up to `keep`."""
        latest = self._root / "latest"
        held = {self.version_folder(version) for version in versions}
        if latest.is_symlink():
            held.add(self._root / latest.readlink())
        for folder in self._versions():
            if len(held) < keep:
                held.add(folder)
        for folder in self._versions():
            if folder not in held:
                doomed = self._root / f"{_STAGED}{uuid.uuid4().hex}"
                folder.rename(doomed)
                shutil.rmtree(doomed)

    def _versions(self) -> list[Path]:
        """Folders of whole versions, the last pulled first."""
        folders = [
            path
            for path in self._root.iterdir()
            if _VERSION.fullmatch(path.name) and (path / MANIFEST_NAME).is_file()
        ]
        return sorted(folders, key=lambda path: -(path / MANIFEST_NAME).stat().st_mtime_ns)

    def _put(self, staged: Path, target: Path) -> None:
        """A version of that number but other files is of a policy that was made anew: it goes."""
        doomed = self._root / f"{_STAGED}{uuid.uuid4().hex}"
        if target.exists():
            target.rename(doomed)
        staged.rename(target)
        _fsync_folder(self._root)
        _remove(doomed)


def files_of(folder: Path) -> set[WeightFile]:
    """What a local version was pulled with; empty where it is not one."""
    try:
        data = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        return {WeightFile(**file) for file in cast("Iterable[Any]", data["files"])}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    """A second name of the same bytes; a copy where the file system has no such thing."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """`tag` is the adapter's after the commit; None: it cannot tell, or another commit began."""

    policy_id: str
    version: int
    tag: str | None


def read_committed(root: Path, policy_id: str) -> Committed | None:
    """None where nothing of this policy was committed, as far as the file can tell."""
    try:
        data = json.loads((root / COMMITTED_NAME).read_text(encoding="utf-8"))
        committed = Committed(**data)
    except (OSError, ValueError, TypeError):
        return None
    is_ours = committed.policy_id == policy_id and isinstance(cast("Any", committed.version), int)
    return committed if is_ours else None


def write_committed(root: Path, committed: Committed) -> None:
    # Named as what an interrupted pull leaves, which the next one removes.
    staged = root / f".staged-{COMMITTED_NAME}"
    _write_json(staged, asdict(committed))
    staged.replace(root / COMMITTED_NAME)
