"""Every kind of file of a data root, torn: is what is left of it ever taken for what was written?

Enters a data root that nothing uses, leaves counts; the root is not changed. Invariant: a file is
read by the code that reads it in the service or in its client, from a copy; a mutation is a
truncation, or one byte changed, of a file that was whole.

Outcomes: `refused`, with an error of ours; `same`, the bytes do not matter (room in a page that
nothing uses); `older`, the journal as of an earlier commit; `loaded`, anything else; `unnamed`, an
error that does not say what is damaged.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sqlalchemy import select

from ratoon.auth.keys import KeyFile, access_folder
from ratoon.engine.files.paths import policy_paths, read_result, require_known
from ratoon.engine.files.uploads import UploadFiles
from ratoon.engine.journal.integrity import DamagedRowError
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import METADATA, open_database
from ratoon.engine.types import PolicySpec
from ratoon.errors import RatoonError
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.stream.files import DamagedFileError, digest_bytes
from ratoon.stream.versions import MAX_CHUNK_BYTES, list_versions, open_chunk, read_manifest
from ratoon.train.trainer import Trainer
from tests.durability.machine import DATABASE_NAME
from tests.engine.harness import trainer_spec

PAGE_BYTES = 4096
LOG_NAME = f"{DATABASE_NAME}-wal"
_LOG_HEADER_BYTES = 32
_FRAME_BYTES = 24 + PAGE_BYTES
# Least number of flips, that of a file of one page, so that small files are not left out.
_MIN_FLIPS = 6
_RESULT_BYTES = 2**28
_REFUSALS = (RatoonError, DamagedRowError, DamagedFileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A file that is torn. Paths are relative to the data root.

    `parts`: files and folders that are read with it. `read`: its content, below a copy of the root.
    """

    kind: str
    file: str
    parts: tuple[str, ...]
    read: Callable[[Path], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tear:
    """`size_bytes` are left, and the byte at `place` is changed by `mask`; 0: it is not."""

    size_bytes: int
    place: int
    mask: int

    def of(self, whole: bytes) -> bytes:
        torn = bytearray(whole[: self.size_bytes])
        if self.mask:
            torn[self.place] ^= self.mask
        return bytes(torn)


@dataclass(frozen=True, slots=True, kw_only=True)
class TornCounts:
    """How often each outcome was, by (kind of file, outcome); `faults` says which were bad."""

    counts: Counter[tuple[str, str]]
    faults: tuple[str, ...]

    @property
    def num_torn(self) -> int:
        return self.counts.total()

    @property
    def num_loaded(self) -> int:
        """Taken for what was written, or met with an error that says nothing."""
        return len(self.faults)

    def __str__(self) -> str:
        return f"{self.num_torn} torn files, {self.num_loaded} loaded"


def tear_all(root: Path, seed: int, limit: int) -> TornCounts:
    """Tear at most `limit` files of the data root `root`, of every kind that is there.

    All kinds in turn, each in random order, until there are `limit` or every page of every file was
    torn at some place.
    """
    generator = random.Random(seed)
    by_kind: dict[str, list[tuple[Target, Tear]]] = defaultdict(list)
    for target in targets_of(root):
        size_bytes = (root / target.file).stat().st_size
        # An empty file, such as a log that was just written back, has nothing to tear.
        tears = tears_of(size_bytes, generator) if size_bytes else ()
        by_kind[target.kind] += [(target, tear) for tear in tears]
    for tears in by_kind.values():
        generator.shuffle(tears)
    counts, faults = Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory(prefix="torn-", dir=root.parent) as scratch:
        judge = Judge(root, Path(scratch))
        for target, tear in _in_turn(by_kind, limit):
            outcome, what = judge.outcome(target, tear)
            counts[target.kind, outcome] += 1
            if outcome in ("loaded", "unnamed"):
                faults.append(f"{target.file}: {tear}: {outcome}: {what}")
    return TornCounts(counts=counts, faults=tuple(faults))


def tears_of(size_bytes: int, generator: random.Random) -> list[Tear]:
    """Some truncations, and a changed byte at a random place of every page."""
    sizes = {0, size_bytes - 1, size_bytes // 2, generator.randrange(size_bytes)}
    sizes |= {generator.randrange(size_bytes) // PAGE_BYTES * PAGE_BYTES for _ in range(2)}
    tears = [Tear(size_bytes=size, place=0, mask=0) for size in sorted(sizes)]
    places = [
        min(start + generator.randrange(PAGE_BYTES), size_bytes - 1)
        for start in range(0, size_bytes, PAGE_BYTES)
    ]
    places += [generator.randrange(size_bytes) for _ in range(_MIN_FLIPS - len(places))]
    tears += [
        Tear(size_bytes=size_bytes, place=place, mask=1 << generator.randrange(8))
        for place in places
    ]
    return tears


def targets_of(root: Path) -> Iterator[Target]:
    """Every file of a data root that the service reads back."""
    log = (LOG_NAME,) if (root / LOG_NAME).exists() else ()
    for kind, file in zip(("journal", "journal's log"), (DATABASE_NAME, *log), strict=False):
        parts = (DATABASE_NAME, *log)
        yield Target(kind=kind, file=file, parts=parts, read=_journal_reader(root))
    if (access_folder(root) / "keys.json").exists():
        file = str((access_folder(root) / "keys.json").relative_to(root))
        yield Target(kind="keys", file=file, parts=(file,), read=_read_keys)
    for spec in _specs(root):
        yield from _policy_targets(root, spec)


class Judge:
    """Tears copies of a root's files in a scratch folder."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self._root, self._scratch = root, scratch
        self._whole: dict[str, Hashable] = {}
        self._older: dict[int, Hashable] = {}

    def outcome(self, target: Target, tear: Tear) -> tuple[str, str]:
        """The outcome's name, and what was read or raised."""
        if target.file not in self._whole:
            self._whole[target.file] = self._read(target, None)
        torn = tear.of((self._root / target.file).read_bytes())
        try:
            got = self._read(target, torn)
        except _REFUSALS as err:
            return "refused", str(err)
        except Exception as err:  # noqa: BLE001 - which error it is is what is looked at
            return "unnamed", f"{type(err).__name__}: {err}"
        if got == self._whole[target.file]:
            return "same", ""
        if target.kind == "journal's log" and got == self._before(target, tear):
            return "older", ""
        return "loaded", f"{got!r:.200}"

    def _read(self, target: Target, torn: bytes | None) -> Hashable:
        copy = self._scratch / "copy"
        try:
            for part in target.parts:
                _copy(self._root / part, copy / part)
            if torn is not None:
                (copy / target.file).write_bytes(torn)
            return target.read(copy)
        finally:
            shutil.rmtree(copy)

    def _before(self, target: Target, tear: Tear) -> Hashable:
        """The journal as of the last commit before the place that was torn."""
        whole = (self._root / target.file).read_bytes()
        stop = tear.place if tear.mask else tear.size_bytes
        commit = max((end for end in _commits(whole) if end <= stop), default=0)
        if commit not in self._older:
            self._older[commit] = self._read(target, whole[:commit])
        return self._older[commit]


def _commits(log: bytes) -> Iterator[int]:
    """Where in SQLite's log the last frame of each transaction ends, in bytes."""
    for start in range(_LOG_HEADER_BYTES, len(log), _FRAME_BYTES):
        if any(log[start + 4 : start + 8]):
            yield start + _FRAME_BYTES


def _journal_reader(root: Path) -> Callable[[Path], Hashable]:
    """Every row of every table, as a service that has the files of `root` finds them."""

    def read(copy: Path) -> Hashable:
        engine = open_database(f"sqlite:///{copy / DATABASE_NAME}")
        try:
            require_known(root, [row.spec.policy_id for row in SqlStore(engine).policies()])
            with engine.begin() as connection:
                return tuple(
                    (table.name, frozenset(map(tuple, connection.execute(select(table)))))
                    for table in METADATA.sorted_tables
                )
        finally:
            engine.dispose()

    return read


def _specs(root: Path) -> Sequence[PolicySpec]:
    with tempfile.TemporaryDirectory(prefix="torn-", dir=root.parent) as scratch:
        for name in (DATABASE_NAME, LOG_NAME):
            if (root / name).exists():
                shutil.copy(root / name, scratch)
        engine = open_database(f"sqlite:///{Path(scratch) / DATABASE_NAME}")
        specs = [row.spec for row in SqlStore(engine).policies()]
        engine.dispose()
    return specs


def _policy_targets(root: Path, spec: PolicySpec) -> Iterator[Target]:
    policy_id, paths = spec.policy_id, policy_paths(root, spec.policy_id)

    def targets(kind: str, folder: Path, read: Callable[[Path], Hashable]) -> Iterator[Target]:
        """Each file of a folder that is read as a whole."""
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            file, part = str(path.relative_to(root)), str(folder.relative_to(root))
            yield Target(kind=f"{kind}{_suffix(path)}", file=file, parts=(part,), read=read)

    for body in paths.bodies.iterdir():
        file = str(body.relative_to(root))
        yield Target(kind="body", file=file, parts=(file,), read=_body_reader(file))
    for upload in paths.uploads.iterdir():
        yield from targets("upload part", upload, _upload_reader(policy_id, upload.name))
    for result in paths.results.iterdir():
        file = str(result.relative_to(root))
        if not result.suffix:
            yield Target(
                kind="result", file=file, parts=(file,), read=_result_reader(policy_id, result.name)
            )
    make_trainer = cache(lambda: Trainer.create(trainer_spec(spec)))
    for checkpoint in paths.checkpoints.iterdir():
        read = _checkpoint_reader(policy_id, checkpoint.name, make_trainer)
        yield from targets("checkpoint", checkpoint, read)
    for version in list_versions(paths.weights):
        folder = paths.weights / f"{version:08d}"
        yield from targets("version", folder, _version_reader(policy_id, version))


def _suffix(path: Path) -> str:
    return {".json": "'s manifest", ".safetensors": "'s tensors"}.get(path.suffix, "")


def _read_keys(root: Path) -> Hashable:
    return frozenset(map(repr, KeyFile(root).keys().values()))


def _body_reader(file: str) -> Callable[[Path], Hashable]:
    return lambda root: batch_to_bytes(batch_from_bytes((root / file).read_bytes()))


def _upload_reader(policy_id: str, upload_id: str) -> Callable[[Path], Hashable]:
    def read(root: Path) -> Hashable:
        paths = policy_paths(root, policy_id)
        num_parts = len([*(paths.uploads / upload_id).iterdir()])
        many = 2**40
        uploads = UploadFiles(paths, ttl_s=1e9, max_upload_bytes=many, max_total_bytes=many)
        return tuple(uploads.get(upload_id, num_parts))

    return read


def _result_reader(policy_id: str, digest: str) -> Callable[[Path], Hashable]:
    def read(root: Path) -> Hashable:
        """As `ratoon_client.weights.calls` does."""
        data = read_result(policy_paths(root, policy_id), digest, 0, _RESULT_BYTES)
        if data is None or digest_bytes(data) != digest:
            raise DamagedFileError(f"result {digest}")
        return data

    return read


def _checkpoint_reader(
    policy_id: str, checkpoint_id: str, make_trainer: Callable[[], Trainer]
) -> Callable[[Path], Hashable]:
    def read(root: Path) -> Hashable:
        trainer = make_trainer()
        trainer.load_checkpoint(policy_paths(root, policy_id).checkpoint(checkpoint_id))
        return trainer.state_digest(), trainer.version

    return read


def _version_reader(policy_id: str, version: int) -> Callable[[Path], Hashable]:
    def read(root: Path) -> Hashable:
        """As `ratoon_client.weights.pull` does."""
        weights = policy_paths(root, policy_id).weights
        manifest = read_manifest(weights, version)
        for file in manifest.files:
            data = b"".join(
                open_chunk(weights, file.digest, offset, MAX_CHUNK_BYTES)
                for offset in range(0, max(file.size_bytes, 1), MAX_CHUNK_BYTES)
            )
            if digest_bytes(data) != file.digest:
                raise DamagedFileError(f"{file.name} of version {version}")
        return repr(manifest)

    return read


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def _in_turn(
    by_kind: dict[str, list[tuple[Target, Tear]]], limit: int
) -> Iterator[tuple[Target, Tear]]:
    """One of each kind, and again, until none or `limit` are left."""
    num_given = 0
    while any(by_kind.values()):
        for tears in by_kind.values():
            if tears and num_given < limit:
                num_given += 1
                yield tears.pop()
        if num_given >= limit:
            return
