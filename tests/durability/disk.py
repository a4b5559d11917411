"""What a disk holds after a power cut, from the record of what was done to it.

Enters events in order, leaves images. Invariant: an image holds only what some file system may
leave: the strict one, nothing that was not synced; a torn one, some of it.

The model, of POSIX and no more: fsync of a file puts its content on the disk, not its name; fsync
of a folder puts its names on the disk, not their content. A rename survives with its folder's
fsync, and a file whose content was never synced is empty behind whatever name survives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tests.durability.recorder import Event, Kind

# Size that a disk writes whole, and size of which it may write a part.
PAGE_BYTES = 4096
SECTOR_BYTES = 512

# Content by path below the root; None for a folder.
Image = Mapping[str, bytes | None]
IsDone = Callable[[Event], bool]


@dataclass(slots=True, eq=False)
class _File:
    durable: bytes = b""
    content: bytearray = field(default_factory=bytearray)
    is_dirty: bool = False


@dataclass(slots=True, eq=False)
class _Folder:
    durable: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    names: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    # Changes of names since the last fsync: each is one call, whole or not at all.
    pending: list[dict[str, _Node | None]] = field(default_factory=list[dict[str, "_Node | None"]])

    def change(self, names: dict[str, _Node | None]) -> None:
        _change(self.names, names)
        self.pending.append(names)


_Node = _File | _Folder


class Disk:
    """Starts as an empty folder; `is_done` says which fsyncs reach it."""

    def __init__(self, is_done: IsDone = lambda _event: True) -> None:
        self._is_done = is_done
        self._root = _Folder()
        self._nodes: dict[int, _Node] = {}
        self._paths: dict[int, str] = {}

    def apply(self, event: Event) -> None:
        match event.kind:
            case Kind.CREATE | Kind.MKDIR:
                node = _File() if event.kind is Kind.CREATE else _Folder()
                self._nodes[event.inode], self._paths[event.inode] = node, event.path
                self._change(event.path, node)
            case Kind.WRITE | Kind.TRUNCATE:
                self._write(event)
            case Kind.SYNC:
                self._sync(event)
            case Kind.RENAME:
                self._rename(event.path, event.target)
                self._paths[event.inode] = event.target
            case Kind.UNLINK | Kind.RMDIR:
                self._change(event.path, None)
            case Kind.LINK:
                self._change(event.path, self._nodes[event.inode])
            case _:
                pass

    def now(self) -> Image:
        """What the running process sees, which a killed one leaves."""
        return dict(
            _walk(self._root, lambda folder: folder.names, lambda file: bytes(file.content))
        )

    def strict(self) -> Image:
        """Everything that was not synced is lost."""
        return dict(_walk(self._root, lambda folder: folder.durable, lambda file: file.durable))

    def torn(self, seed: int) -> Image:
        """Image in which any part of the unsynced data survived: each change of a name, each page
        or sector."""
        generator = random.Random(seed)
        return dict(
            _walk(
                self._root,
                lambda folder: _some_names(folder, generator),
                lambda file: _some_pages(file, generator),
            )
        )

    def _folder(self, path: str) -> tuple[_Folder, str]:
        """The folder of a path, and the last name."""
        *parents, name = path.split("/")
        folder = self._root
        for parent in parents:
            child = folder.names[parent]
            assert isinstance(child, _Folder)
            folder = child
        return folder, name

    def _change(self, path: str, node: _Node | None) -> None:
        folder, name = self._folder(path)
        folder.change({name: node})

    def _rename(self, source: str, target: str) -> None:
        folder, name = self._folder(source)
        other, new_name = self._folder(target)
        node = folder.names[name]
        if folder is other:
            folder.change({name: None, new_name: node})
        else:
            other.change({new_name: node})
            folder.change({name: None})

    def _seen(self, event: Event) -> _Node | None:
        """The file of an event. A rename that Rust made by a system call shows in its path."""
        if event.path == ".":
            return self._root
        node, before = self._nodes.get(event.inode), self._paths.get(event.inode, event.path)
        if before != event.path and _parent(before) == _parent(event.path):
            self._rename(before, event.path)
        self._paths[event.inode] = event.path
        return node

    def _write(self, event: Event) -> None:
        node = self._seen(event)
        assert isinstance(node, _File), event.path
        node.is_dirty = True
        content, offset = node.content, event.offset
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        if event.kind is Kind.TRUNCATE:
            del content[offset:]
        else:
            content[offset : offset + len(event.data)] = event.data

    def _sync(self, event: Event) -> None:
        node = self._seen(event)
        assert node is not None, event.path
        if not self._is_done(event):
            return
        if isinstance(node, _Folder):
            node.durable = dict(node.names)
            node.pending.clear()
        elif node.is_dirty:
            node.durable, node.is_dirty = bytes(node.content), False


def image_digest(image: Image) -> str:
    hasher = xxhash.xxh3_128()
    for path, content in sorted(image.items()):
        hasher.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        hasher.update(content or b"")
    return hasher.hexdigest()


def write_image(image: Image, root: Path) -> None:
    """Put an image into the folder `root`, which is made."""
    root.mkdir()
    for path, content in sorted(image.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def read_image(root: Path, ignored: str) -> Image:
    """A folder as an image, without files whose names end as `ignored`."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
        if not path.name.endswith(ignored)
    }


def _walk(
    folder: _Folder,
    names: Callable[[_Folder], Mapping[str, _Node]],
    content: Callable[[_File], bytes],
    prefix: str = "",
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names(folder).items():
        if isinstance(node, _Folder):
            yield prefix + name, None
            yield from _walk(node, names, content, f"{prefix}{name}/")
        else:
            yield prefix + name, content(node)


def _change(names: dict[str, _Node], changes: Mapping[str, _Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _names(folder: _Folder) -> Mapping[str, _Node]:
    return folder.names


def _some_names(folder: _Folder, generator: random.Random) -> Mapping[str, _Node]:
    names = dict(folder.durable)
    for changes in folder.pending:
        if generator.random() < 0.5:
            _change(names, changes)
    return names


def _some_pages(file: _File, generator: random.Random) -> bytes:
    """The old or the new size; each page old, new, or new in some sectors; a hole is zeros."""
    old, new = file.durable, bytes(file.content)
    if not file.is_dirty:
        return old
    size_bytes = generator.choice((len(old), len(new)))
    pages: list[bytes] = []
    for start in range(0, size_bytes, PAGE_BYTES):
        before, after = (_padded(data[start : start + PAGE_BYTES]) for data in (old, new))
        pages.append(generator.choice((before, after, _some_sectors(before, after, generator))))
    return b"".join(pages)[:size_bytes]


def _some_sectors(before: bytes, after: bytes, generator: random.Random) -> bytes:
    starts: Sequence[int] = range(0, PAGE_BYTES, SECTOR_BYTES)
    return b"".join(
        generator.choice((before, after))[start : start + SECTOR_BYTES] for start in starts
    )


def _padded(page: bytes) -> bytes:
    return page.ljust(PAGE_BYTES, b"\0")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
