"""The model folders that callers name: nothing outside of the models root is reached."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ratoon.errors import RatoonError, invalid, shown

_EXPECTED = "a model folder below the server's models root, given relative to it"
_MAX_LENGTH = 1024


def plain_path(field: str, given: str) -> str:
    """`given` in its one normal form, where its text alone leads below the root it is relative to.

    Raises INVALID_ARGUMENT. It reads no folder, so that a retry has the same form whatever became
    of the folder.
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
    """A caller's model folder, absolute; with links followed its files are below `models_root`.

    Raises INVALID_ARGUMENT; the message says nothing of folders outside the root.
    """
    if not given or "\0" in given or Path(given).is_absolute():
        raise _refused(field, given)
    root = models_root.resolve()
    try:
        folder = (root / given).resolve()
        is_folder = folder.is_relative_to(root) and folder != root and folder.is_dir()
        # Its files may be links too, as in a Hugging Face cache.
        is_inside = is_folder and all(
            file.resolve().is_relative_to(root) for file in folder.iterdir()
        )
    except (OSError, RuntimeError) as err:
        raise _refused(field, given) from err
    if not is_inside:
        raise _refused(field, given)
    return folder


def _refused(field: str, given: str) -> RatoonError:
    return invalid(field, shown(given), _EXPECTED)
