"""The model folders that callers name: nothing outside of the models root is reached."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ratoon.errors import RatoonError, invalid, shown
from ratoon.model.folder import ModelFolder

_EXPECTED = "a model folder below the server's models root, given relative to it"
_MAX_LENGTH = 1024


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
