"""The files of one policy: request bodies, uploaded parts, results, rollouts, checkpoints, weights.

Every path is built here, from names that cannot leave the policy's folder, and from the model
folders that callers name, which cannot leave the models root. Files appear whole under their names
(see `stream.files`).

    policies/<policy_id>/{model,bodies,uploads,results,rollouts,checkpoints,weights,set-aside,open,position}
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
import time
from collections.abc import Collection
from dataclasses import astuple, dataclass
from pathlib import Path, PurePosixPath

from ratoon.engine.commands import SentBody
from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.log import get_logger
from ratoon.model.folder import ModelFolder
from ratoon.rollout.serial import BatchBytes, buffers_of
from ratoon.stream.files import (
    DamagedFileError,
    find_leftovers,
    fsync_folder,
    keep_file,
    make_folder,
    remove_folder,
    seal_bytes,
    unseal_bytes,
    write_atomic,
)

_LOG = get_logger("position")
_POSITION = struct.Struct(">5Q")
_DIGEST = re.compile(r"[0-9a-f]{32}")
# Folder below the data root. The rest of a folder that is being removed has a temporary name there.
POLICIES = "policies"
_NAME = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,127}")
_EXPECTED = (
    "a model folder below the server's models root, given relative to it (`ratoon doctor` lists"
    " them there)"
)
_MAX_LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPaths:
    """Paths of a policy's files; touches no file."""

    root: Path
    weights: Path
    # All policies may read it; the model folders that callers name are below it.
    models_root: Path

    @property
    def model(self) -> Path:
        """The model folder that was sent, if it was: see `files.sent_models`."""
        return self.root / "model"

    @property
    def bodies(self) -> Path:
        return self.root / "bodies"

    @property
    def uploads(self) -> Path:
        return self.root / "uploads"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def rollouts(self) -> Path:
        """Kept rollouts by seq: see `files.rollouts`."""
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def position(self) -> Path:
        """How far the journal had come: see `Position`."""
        return self.root / "position"

    @property
    def loss(self) -> Path:
        """The journal's loss, while its policy is refused for it: see `files.losses`."""
        return self.root / "loss.json"

    @property
    def decision(self) -> Path:
        """The operator's decision about the loss."""
        return self.root / "decision.json"

    @property
    def set_aside(self) -> Path:
        """Files that starts moved away instead of deleting them. Only operators remove them."""
        return self.root / "set-aside"

    @property
    def weights_set_aside(self) -> Path:
        """Versions that starts moved away, on the file system that versions are on."""
        return self.weights / "set-aside"

    @property
    def folders(self) -> tuple[Path, ...]:
        own = (self.bodies, self.uploads, self.results, self.rollouts, self.checkpoints)
        return (*own, self.weights)

    def body(self, digest: str) -> Path:
        return self.bodies / safe_name("body_digest", digest)

    def checkpoint(self, checkpoint_id: str) -> Path:
        return self.checkpoints / safe_name("checkpoint_id", checkpoint_id)


def policy_paths(
    data_root: Path,
    policy_id: str,
    weights_root: Path | None = None,
    models_root: Path | None = None,
) -> PolicyPaths:
    """Returns a policy's paths. Raises INVALID_ARGUMENT for an id that is not a plain name."""
    name = safe_name("policy_id", policy_id)
    root = data_root / POLICIES / name
    weights = root / "weights" if weights_root is None else weights_root / name
    models_root = models_root or data_root / "models"
    return PolicyPaths(root=root, weights=weights, models_root=models_root)


def safe_name(field: str, name: str) -> str:
    """Returns `name`, if it is one plain path component that does not start with a dot."""
    if not _NAME.fullmatch(name):
        raise invalid(field, repr(name), "letters, digits, '_', '-' and '.', not first")
    return name


def make_policy_folders(paths: PolicyPaths) -> None:
    """Create the folders."""
    for folder in paths.folders:
        make_folder(folder)
    # A killed process may have made them without syncing their names.
    for folder in (paths.root, paths.root.parent, paths.root.parent.parent):
        fsync_folder(folder)


def policy_leftovers(paths: PolicyPaths) -> list[Path]:
    """Temporary files that crashed writers left in the folders."""
    folders = (paths.root, *paths.folders)
    return [path for folder in folders for path in find_leftovers(folder)]


def remove_policy_files(paths: PolicyPaths) -> None:
    """Delete all of the policy's files; the folders may be gone already."""
    for folder in (paths.weights, paths.root):
        remove_folder(folder)


def remove_all_but_checkpoints(paths: PolicyPaths, kept: Collection[str]) -> None:
    """Delete the files of a policy that has ended, but for the `kept` checkpoints and rollouts."""
    for folder in (paths.weights, paths.model, paths.bodies, paths.uploads, paths.results):
        remove_folder(folder)
    for name in {*names_in(paths.checkpoints)}.difference(kept):
        drop_checkpoint_folder(paths, name)


def require_known(data_root: Path, policy_ids: Collection[str]) -> None:
    """Raises INTERNAL if files exist for a policy that the journal does not know.

    A policy's row is written before its first file and deleted after its last, so the journal must
    have been replaced by an empty or older one.
    """
    folder = data_root / POLICIES
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    unknown = sorted(name for name in names - {*policy_ids} if not name.startswith("."))
    if unknown:
        raise RatoonError(
            ErrorCode.INTERNAL,
            f"database_url: the journal does not know {', '.join(unknown[:3])}, of which there are "
            f"files in {folder}: restore the journal from a backup, or move them away",
            field="database_url",
            got=f"{len(policy_ids)} policies",
            expected=f"{len(unknown)} more",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileId:
    inode: int
    modified_ns: int


class BodyFiles:
    """Request bodies by digest, each kept while some operation holds it.

    A holder is an operation's id. It is *in flight* until the journal decides its fate (`land`),
    and `reconcile` keeps its body until then. `hold` returns after the file is durable. Only files
    that this process wrote or listed are deleted, so one that a newer controller wrote in their
    place stays.
    """

    def __init__(self, paths: PolicyPaths) -> None:
        self._paths = paths
        self._holders: dict[str, set[str]] = {}
        # Identity of each digest's file when it was last written or listed here.
        self._known: dict[str, _FileId | None] = {}
        self._in_flight: set[str] = set()
        # Serialises writes and deletions, so that no file is deleted under a new holder.
        self._lock = asyncio.Lock()

    async def hold(self, holder: str, digest: str, body: bytes | BatchBytes | SentBody) -> None:
        """Hold a body, writing its file if it is missing."""
        async with self._lock:
            path = self._paths.body(digest)
            if digest not in self._holders or not path.exists():
                self._known[digest] = await asyncio.to_thread(_write_body, path, body)
            self._holders.setdefault(digest, set()).add(holder)
            self._in_flight.add(holder)

    def held(self) -> frozenset[str]:
        """Digests of all bodies with a holder."""
        return frozenset(self._holders)

    def is_held(self, digest: str) -> bool:
        return digest in self._holders

    def land(self, holder: str) -> None:
        """The journal has the operation, or will say that it does not."""
        self._in_flight.discard(holder)

    async def release(self, holder: str, digest: str) -> None:
        """Drop a holder; the last one's release deletes the file."""
        async with self._lock:
            if self._take_off(holder, digest):
                await self._delete(digest)

    async def forget(self, holder: str, digest: str) -> None:
        """Drop a holder, but keep the file: an operation in the journal needs it.

        That operation may belong to another controller, which has taken over.
        """
        async with self._lock:
            self._take_off(holder, digest)

    def _take_off(self, holder: str, digest: str) -> bool:
        """Remove a holder; returns whether the body has none left."""
        self._in_flight.discard(holder)
        holders = self._holders.get(digest, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(digest, None)
        return not holders

    async def names(self) -> frozenset[str]:
        """Digests of all files present, whoever wrote them."""
        async with self._lock:
            known = await asyncio.to_thread(_file_ids, self._paths.bodies)
            self._known = {**known}
            return frozenset(known)

    async def set_aside(self, needed: Collection[str], folder: Path) -> None:
        """Move bodies that are neither `needed` nor in flight to `folder`."""
        async with self._lock:
            spared = {d for d, holders in self._holders.items() if holders & self._in_flight}
            names = await asyncio.to_thread(names_in, self._paths.bodies)
            doomed = {*names} - {*needed} - spared
            paths = [self._paths.bodies / name for name in doomed if not name.startswith(".")]
            await asyncio.to_thread(move_to, folder, paths)

    async def reconcile(self, needed: Collection[tuple[str, str]], listed: Collection[str]) -> None:
        """Hold only bodies that operations need (holder, digest) and those in flight.

        Delete others that were `listed` before the journal was read: newer files may belong to a
        controller that is taking over.
        """
        async with self._lock:
            kept = {digest: holders & self._in_flight for digest, holders in self._holders.items()}
            for holder, digest in needed:
                kept.setdefault(digest, set()).add(holder)
            self._holders = {digest: holders for digest, holders in kept.items() if holders}
            # Files restored from an archive since then belong to this process too.
            for digest in self._holders.keys() - self._known.keys():
                path = self._paths.body(digest)
                self._known[digest] = await asyncio.to_thread(_file_id, path)
            for name in set(listed) - set(self._holders):
                await self._delete(name)

    async def _delete(self, digest: str) -> None:
        known = self._known.pop(digest, None)
        await asyncio.to_thread(_unlink_same, self._paths.bodies / digest, known)


def _write_body(path: Path, body: bytes | BatchBytes | SentBody) -> _FileId | None:
    if isinstance(body, SentBody):
        keep_file(path.with_name(body.name), path)
    else:
        write_atomic(path, *buffers_of(body))
    return _file_id(path)


def _unlink_same(path: Path, known: _FileId | None) -> None:
    if known is not None and _file_id(path) == known:
        path.unlink(missing_ok=True)


def _file_ids(folder: Path) -> dict[str, _FileId]:
    found = {path.name: _file_id(path) for path in folder.iterdir()}
    return {name: file_id for name, file_id in found.items() if file_id is not None}


def _file_id(path: Path) -> _FileId | None:
    """Identity of a file, which changes with each write: the old file exists until the new one
    takes its name."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return _FileId(inode=stat.st_ino, modified_ns=stat.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the journal has come, by the file `position` of the policy's folder.

    The journal counts the writes that callers are told of, and after which files are deleted; after
    each of them the file is written. A journal whose count is lower than the file's has lost
    committed writes, whatever the cause. The file is not synced, as it need not survive what the
    journal survives: a power cut may leave it older than the journal, which says nothing. It is
    never newer than what was committed.

    `count`: of the journal's writes. `token`: the newest fencing token. `max_seq`: the highest seq
    accepted. `last_seq`: the highest that ended in its turn.
    """

    count: int = 0
    token: int = 0
    max_seq: int = 0
    last_seq: int = 0
    version: int = 0


def read_position(path: Path) -> Position | None:
    """Read the file; None: there is none, or a power cut or a disk has torn it."""
    try:
        values = _POSITION.unpack(unseal_bytes(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError, struct.error) as err:
        _LOG.warning("position unreadable", path=str(path), reason=str(err))
        return None
    count, token, max_seq, last_seq, version = values
    return Position(count=count, token=token, max_seq=max_seq, last_seq=last_seq, version=version)


def write_position(path: Path, position: Position) -> None:
    """Write all of it in place, by one call, into the page cache. Never raises `OSError`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(descriptor, seal_bytes(_POSITION.pack(*astuple(position))), 0)
        finally:
            os.close(descriptor)
    except OSError as err:
        _LOG.warning("position not written", path=str(path), reason=str(err))


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def move_to(folder: Path, paths: Collection[Path]) -> None:
    """Move files and folders, any of which may be gone, to `folder` durably."""
    changed: set[Path] = set()
    for path in paths:
        make_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            path.rename(folder / path.name)
            changed |= {folder, path.parent}
    for one in changed:
        fsync_folder(one)


def drop_checkpoint_folder(paths: PolicyPaths, name: str) -> None:
    """Delete a checkpoint, or a partial one; it may be gone already."""
    folder = paths.checkpoints / name
    if folder.exists():
        remove_folder(folder)


def drop_expired_results(paths: PolicyPaths, ttl_s: float, protected: frozenset[str]) -> None:
    """Delete result files older than `ttl_s`, except those that open operations name."""
    horizon = time.time() - ttl_s
    for path in paths.results.iterdir():
        if path.stem not in protected and path.stat().st_mtime < horizon:
            path.unlink(missing_ok=True)


def read_result(paths: PolicyPaths, digest: str, offset: int, length: int) -> bytes | None:
    """Returns bytes [offset, offset + length) of a result file, fewer at its end; None: no such
    file.

    Raises INVALID_ARGUMENT and RANGE_NOT_SATISFIABLE as `stream.versions.open_chunk` does.
    """
    if not _DIGEST.fullmatch(digest):
        raise invalid("digest", repr(digest), "32 lower-case hexadecimal digits")
    path = paths.results / digest
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            if offset < 0:
                raise invalid("offset", offset, "at least 0")
            if offset >= size_bytes:
                raise RatoonError(
                    ErrorCode.RANGE_NOT_SATISFIABLE,
                    f"offset: got {offset}, expected below the file's {size_bytes} bytes",
                    field="offset",
                    got=str(offset),
                    expected=f"below {size_bytes}",
                    details={"size_bytes": str(size_bytes)},
                )
            file.seek(offset)
            return file.read(length)
    except FileNotFoundError:
        return None


def plain_path(field: str, given: str) -> str:
    """Returns `given` in its normal form, if its text alone leads below the root it is relative to.

    Raises INVALID_ARGUMENT. It reads no folder, so that a retry has the same form whatever happened
    to the folder.
    """
    path = PurePosixPath(given)
    if (
        len(given) > _MAX_LENGTH
        or "\0" in given
        or path.is_absolute()
        or not path.parts
        or ".." in path.parts
    ):
        raise _refused(field, given)
    return str(path)


def model_folder(field: str, given: str, models_root: Path) -> Path:
    """Returns a caller's model folder, absolute. Its entries are files and folders, and after links
    are resolved all of them are below `models_root`.

    Readers check a file again (`ModelFolder.open`). Raises INVALID_ARGUMENT; the message reveals
    nothing about folders outside the root.
    """
    if not given or "\0" in given or Path(given).is_absolute():
        raise _refused(field, given)
    root = models_root.resolve()
    try:
        folder = (root / given).resolve()
        is_folder = folder.is_relative_to(root) and folder != root and folder.is_dir()
    except (OSError, RuntimeError) as err:
        raise _refused(field, given) from err
    if not is_folder:
        raise _refused(field, given)
    try:
        ModelFolder(path=folder, root=root).check_kinds()
    except RatoonError as err:
        raise invalid(field, f"{shown(given)}, where {err.message}", _EXPECTED) from err
    return folder


def _refused(field: str, given: str) -> RatoonError:
    return invalid(field, shown(given), _EXPECTED)
