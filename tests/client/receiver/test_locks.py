"""Locks of receivers, which no other user of the machine can hold."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash

from ratoon_client import (
    EngineError,
    InvalidArgumentError,
    RatoonClient,
    SglangAdapter,
    VllmAdapter,
)

URL = "http://127.0.0.1:1"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the machine, where every user may make files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def own_folder(temporary: Path) -> Path:
    return temporary / f"ratoon-{os.geteuid()}"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_file_of_another_user_in_the_temporary_folder_holds_no_engine(temporary: Path) -> None:
    """Any user of the machine could keep all receivers from an engine."""
    digest = xxhash.xxh3_128_hexdigest(b"localhost:1")
    path = temporary / f"ratoon-engine-{digest}.lock"
    path.touch()
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        VllmAdapter(URL).close()


def test_locks_of_engines_are_for_this_user_alone(temporary: Path) -> None:
    with ExitStack() as stack:
        for url in (URL, "http://10.0.0.1:8100"):
            stack.enter_context(VllmAdapter(url))
            with pytest.raises(EngineError, match="another receiver of this user"):
                SglangAdapter(url)
        assert [path.name for path in temporary.iterdir()] == [own_folder(temporary).name]
        assert mode_of(own_folder(temporary)) == 0o700
        assert {mode_of(path) for path in own_folder(temporary).iterdir()} == {0o600}
        assert len(list(own_folder(temporary).iterdir())) == 2
    VllmAdapter(URL).close()


@pytest.mark.parametrize(
    "fault", ["open", "link", "file", pytest.param("another user's", marks=needs_root)]
)
def test_a_folder_that_others_could_use_is_refused(temporary: Path, fault: str) -> None:
    folder = own_folder(temporary)
    match fault:
        case "open":
            folder.mkdir()
            folder.chmod(0o770)
        case "link":
            (temporary / "mine").mkdir(mode=0o700)
            folder.symlink_to("mine")
        case "file":
            folder.touch(mode=0o600)
        case _:
            folder.mkdir(mode=0o700)
            os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(
        InvalidArgumentError, match=f"{folder.name} is not a folder of this user alone"
    ):
        VllmAdapter(URL)
    if folder.is_dir():
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_locks_in_a_receivers_folder_cannot_be_opened_by_others(
    url: str, root: Path, before: int | None
) -> None:
    """Whoever may read a file may lock it: pulls waited for as long as another user liked."""
    names = (".receiver.lock", ".lock")
    root.mkdir()
    for name in names if before is not None else ():
        (root / name).touch()
        (root / name).chmod(before or 0)
    with RatoonClient(url) as client:
        assert client.weight_receiver("p", root).sync_once() is not None
    assert [mode_of(root / name) for name in names] == [0o600, 0o600]


@pytest.mark.parametrize("name", [".receiver.lock", ".lock"])
def test_a_lock_is_no_link(url: str, root: Path, tmp_path: Path, name: str) -> None:
    root.mkdir()
    (root / name).symlink_to(tmp_path / "elsewhere")
    with RatoonClient(url) as client, pytest.raises(OSError, match="symbolic links"):
        client.weight_receiver("p", root).sync_once()
    assert not (tmp_path / "elsewhere").exists()
