"""Reads files of a folder that a caller names. Imports no torch.

In: a folder, the root that its files must be below, and names. Out: open regular files, bytes and
JSON objects. Invariant: the bytes read belong to the file that was checked, because a file is
opened once, without following a link, at the place below the root that its name leads to.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import cast

from ratoon.errors import RatoonError, invalid, shown

FIELD = "model_folder"
# The folder of a tokenizer's named chat templates, the only one within a model's that is read.
TEMPLATES = "additional_chat_templates"
# Devices and FIFOs are not opened: a file's kind is checked before it is opened, and again after.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_JSON_LEVELS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """`path` and `root` are absolute, with links followed; `path` is `root` or below it."""

    path: Path
    root: Path

    @classmethod
    def of(cls, folder: Path, models_root: Path | None = None) -> ModelFolder:
        """Opens the folder at an absolute path; its files may be links to files below
        `models_root`.

        If the folder is not below that root, because there is none or it was moved since the folder
        was named, its files must be in the folder itself. Raises INVALID_ARGUMENT if there is no
        such folder, or a link in its path leads elsewhere.
        """
        root = None if models_root is None else models_root.resolve()
        if root is None or not folder.is_relative_to(root):
            root = folder.parent.resolve() / folder.name
        try:
            path = folder.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as err:
            raise invalid(FIELD, shown(folder.name), "a folder that exists") from err
        if not path.is_dir() or not path.is_relative_to(root):
            raise invalid(FIELD, shown(folder.name), "a folder that exists")
        return cls(path=path, root=root)

    def names(self) -> list[str]:
        """Names of the folder's entries, sorted. Raises INVALID_ARGUMENT if it cannot be listed."""
        try:
            return sorted(path.name for path in self.path.iterdir())
        except OSError as err:
            raise _unreadable(self.path.name, err) from err

    def check_kinds(self) -> None:
        """Raises INVALID_ARGUMENT for the first entry that is neither a file nor a folder, or is a
        link to something outside the root."""
        for name in self.names():
            try:
                mode = self._place(name).lstat().st_mode
            except OSError as err:
                raise _unreadable(name, err) from err
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise _not_regular(name)

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name, of any kind."""
        return os.path.lexists(self.path / name)

    def below(self, name: str) -> ModelFolder:
        """A folder within it. Raises INVALID_ARGUMENT for anything else of that name, and for a
        link to something outside the root."""
        try:
            place = self._place(name)
        except OSError as err:
            raise _unreadable(name, err) from err
        if not place.is_dir():
            raise invalid(file_field(name), "no folder", "a folder")
        return ModelFolder(path=place, root=self.root)

    @contextmanager
    def open(self, name: str) -> Iterator[FileIO]:
        """Opens a file of the folder, by its plain name, for reading.

        Raises INVALID_ARGUMENT for a name with a folder in it, for an entry that is not a regular
        file, for a link to something outside the root, and for a file that is missing or cannot be
        read.
        """
        try:
            descriptor = self._descriptor(name)
        except OSError as err:
            raise _unreadable(name, err) from err
        with FileIO(descriptor) as file:
            yield file

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns a file's bytes. Raises what `open` raises, and INVALID_ARGUMENT for more than
        `max_bytes`."""
        with self.open(name) as file:
            try:
                # A raw file may give less than it was asked for.
                parts, left = list[bytes](), max_bytes + 1
                while left and (part := file.read(left)):
                    parts.append(part)
                    left -= len(part)
            except OSError as err:
                raise _unreadable(name, err) from err
        if not left:
            raise invalid(file_field(name), "more bytes", f"at most {max_bytes}")
        return b"".join(parts)

    def read_object(self, name: str, max_bytes: int) -> dict[str, object]:
        """Returns a file's JSON object, of at most 16 levels. Raises what `read` raises."""
        data = self.read(name, max_bytes)
        try:
            document: object = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise invalid(
                file_field(name), f"no JSON ({shown(str(err))})", "a JSON object"
            ) from err
        if not isinstance(document, dict):
            raise invalid(file_field(name), "JSON that is no object", "a JSON object")
        if not _is_shallow(cast("object", document), _MAX_JSON_LEVELS):
            raise invalid(file_field(name), "deeper JSON", f"at most {_MAX_JSON_LEVELS} levels")
        return cast("dict[str, object]", document)

    def _place(self, name: str) -> Path:
        """Path that a name leads to after links are resolved; raises `OSError` and
        INVALID_ARGUMENT."""
        if "\0" in name or name in {"", ".", ".."} or "/" in name:
            raise invalid(FIELD, shown(name), "the name of a file in the folder itself")
        try:
            place = (self.path / name).resolve(strict=True)
        except RuntimeError as err:  # A loop of links, before Python 3.13.
            raise invalid(file_field(name), "a loop of links", "a regular file") from err
        if not place.is_relative_to(self.root):
            raise invalid(
                file_field(name), "a link to another place", "a file below the models root"
            )
        return place

    def _descriptor(self, name: str) -> int:
        """Open the file from the root down, so that no link made meanwhile is followed."""
        parts = self._place(name).relative_to(self.root).parts
        if not parts:
            raise _not_regular(name)
        folder = os.open(self.root, _FLAGS | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                below = os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = below
            if not stat.S_ISREG(os.lstat(parts[-1], dir_fd=folder).st_mode):
                raise _not_regular(name)
            descriptor = os.open(parts[-1], _FLAGS, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _not_regular(name)
        return descriptor


def _is_shallow(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    if not isinstance(value, list):
        return True
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in cast("list[object]", value))


def file_field(name: str) -> str:
    """Name of a folder's file in errors."""
    return f"{FIELD}/{shown(name)[1:-1]}"  # Without quotes.


def _not_regular(name: str) -> RatoonError:
    return invalid(file_field(name), "no regular file", "a regular file")


def _unreadable(name: str, err: OSError) -> RatoonError:
    return invalid(file_field(name), f"nothing that can be read ({err.strerror})", "a regular file")
