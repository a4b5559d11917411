"""Pulls on the service's own host: linked or copied from its folder, verified, never written over.

The folder is made and pruned by the service's own code.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.engine.files.paths import policy_paths
from ratoon.stream.versions import list_versions, prune_versions, publish_version, version_folder
from ratoon_client import AsyncRatoonClient, ClientConfig, RatoonClient
from ratoon_client.cli import main
from ratoon_client.weights.sources import published_folder
from ratoon_proto.types import WeightKind
from tests.client.conftest import versions
from tests.client.fake_service import FakeService

MODEL = "model.safetensors"
FIRST = {MODEL: b"1" * 5000, "config.json": b"{}"}
SECOND = {MODEL: b"2" * 5000, "config.json": b"{}"}
WAIT_S = 30.0


@pytest.fixture
def wire() -> str:
    """Files come by both wires in test_pull."""
    return "http"


class Publisher:
    """Publishes to the fake service and, as a worker does, to the folder `weights_root`."""

    def __init__(self, service: FakeService, weights_root: Path) -> None:
        self.service = service
        self.weights_root = weights_root
        self.root = policy_paths(weights_root / "unused", "p", weights_root).weights

    def publish(
        self,
        version: int,
        files: dict[str, bytes],
        before_writing: Callable[[Path], object] = lambda _: None,
    ) -> None:
        def write(folder: Path) -> dict[str, str]:
            before_writing(folder)
            for name, data in files.items():
                path = folder / name
                with path.open("r+b" if path.exists() else "xb") as file:
                    file.write(data)
            return {}

        publish_version(self.root, "p", version, WeightKind.FULL, write, 1.0)
        self.service.publish(version, files)

    def retire(self, version: int, files: dict[str, bytes], **options: Any) -> None:
        """Publish a version in place of all before it."""
        self.publish(version, files)
        prune_versions(self.root, list_versions(self.root)[-1:])
        self.publish(version + 1, files, **options)

    def path(self, version: int, name: str = MODEL) -> Path:
        return version_folder(self.root, version) / name


@pytest.fixture
def publisher(service: FakeService, tmp_path: Path) -> Publisher:
    publisher = Publisher(service, tmp_path / "published")
    publisher.publish(1, FIRST)
    return publisher


@pytest.fixture
def near(url: str, publisher: Publisher) -> Iterator[RatoonClient]:
    """A client that is told of the folder."""
    config = ClientConfig(timeout_s=WAIT_S, weights_root=publisher.weights_root)
    with RatoonClient(url, config=config) as client:
        yield client


def num_fetches(service: FakeService) -> int:
    return service.calls["FetchWeights"]


def test_files_of_this_host_are_linked_and_not_fetched(
    publisher: Publisher, near: RatoonClient, root: Path
) -> None:
    pulled = near.pull_weights("p", root)
    assert (pulled.version, pulled.fetched_bytes) == (1, 0)
    assert num_fetches(publisher.service) == 0
    for name, data in FIRST.items():
        assert (pulled.folder / name).read_bytes() == data
        assert (pulled.folder / name).samefile(publisher.path(1, name))
    assert {path.name for path in root.iterdir()} == {"version-1", "latest", ".lock"}
    assert not (pulled.folder / "manifest.json").exists()


def test_the_environment_and_the_command_line_name_the_folder(
    publisher: Publisher, url: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--url", url, "weights", "pull", "p"]
    with pytest.raises(SystemExit) as caught:
        main([*command, str(root / "a"), "--weights-root", str(publisher.weights_root)])
    assert not caught.value.code
    monkeypatch.setenv("RATOON_WEIGHTS_ROOT", str(publisher.weights_root))
    with pytest.raises(SystemExit) as caught:
        main([*command, str(root / "b")])
    assert not caught.value.code
    assert num_fetches(publisher.service) == 0
    monkeypatch.setenv("RATOON_WEIGHTS_ROOT", "")
    with RatoonClient(url, timeout_s=WAIT_S) as client:
        client.pull_weights("p", root / "c")
    assert num_fetches(publisher.service) > 0


async def test_a_receiver_takes_them_from_there(publisher: Publisher, url: str, root: Path) -> None:
    config = ClientConfig(timeout_s=WAIT_S, weights_root=publisher.weights_root)
    async with AsyncRatoonClient(url, config=config) as client:
        receiver = client.weight_receiver("p", root)
        for version, files in ((1, FIRST), (2, SECOND)):
            if version > 1:
                publisher.retire(version, files)
            received = await receiver.sync_once()
            assert received is not None
            assert received.fetched_bytes == 0
            assert (root / "latest" / MODEL).read_bytes() == files[MODEL]
    assert num_fetches(publisher.service) == 0


def _flip(publisher: Publisher, _: pytest.MonkeyPatch) -> None:
    publisher.path(1).write_bytes(b"0" + FIRST[MODEL][1:])


def _shorten(publisher: Publisher, _: pytest.MonkeyPatch) -> None:
    publisher.path(1).write_bytes(FIRST[MODEL][:-1])


def _remove_version(publisher: Publisher, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(publisher.path(1).parent)


def _remove_all(publisher: Publisher, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(publisher.weights_root)


def _put_file(publisher: Publisher, _: pytest.MonkeyPatch) -> None:
    _remove_all(publisher, _)
    publisher.weights_root.write_bytes(b"")


def _forbid(_: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfile", refuse)


@pytest.mark.parametrize(
    "spoil",
    [_flip, _shorten, _remove_version, _remove_all, _put_file, _forbid],
    ids=lambda spoil: spoil.__name__,
)
def test_what_is_not_there_or_not_whole_is_fetched(
    publisher: Publisher,
    near: RatoonClient,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Publisher, pytest.MonkeyPatch], None],
) -> None:
    with monkeypatch.context() as patch:
        spoil(publisher, patch)
        pulled = near.pull_weights("p", root)
    assert pulled.fetched_bytes >= len(FIRST[MODEL])
    assert {name: (pulled.folder / name).read_bytes() for name in FIRST} == FIRST
    assert (pulled.folder / MODEL).stat().st_nlink == 1
    assert {path.name for path in root.iterdir()} == {"version-1", "latest", ".lock"}


def _other_file_system(_: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)


def _other_user(_: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who owns a file may write to it after it was verified."""
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)


def _symbolic_link(publisher: Publisher, _: pytest.MonkeyPatch) -> None:
    """A hard link of it would be one more symbolic link, which may lead elsewhere tomorrow."""
    elsewhere = publisher.weights_root / "elsewhere"
    publisher.path(1).rename(elsewhere)
    publisher.path(1).symlink_to(elsewhere)


@pytest.mark.parametrize(
    "arrange", [_other_file_system, _other_user, _symbolic_link], ids=lambda way: way.__name__
)
def test_what_should_not_be_linked_is_copied(
    publisher: Publisher,
    near: RatoonClient,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    arrange: Callable[[Publisher, pytest.MonkeyPatch], None],
) -> None:
    with monkeypatch.context() as patch:
        arrange(publisher, patch)
        pulled = near.pull_weights("p", root)
    assert (pulled.fetched_bytes, num_fetches(publisher.service)) == (0, 0)
    path = pulled.folder / MODEL
    assert path.read_bytes() == FIRST[MODEL]
    assert not path.is_symlink()
    assert not path.samefile(publisher.path(1))


@pytest.mark.parametrize("policy_id", ["..", ".", "", "a/b", "../p", "/p", "p\0"])
def test_no_policy_leads_out_of_the_folder(publisher: Publisher, policy_id: str) -> None:
    assert published_folder(publisher.weights_root, "p", 1) == publisher.path(1).parent
    assert published_folder(publisher.weights_root, policy_id, 1) is None


def test_a_file_that_two_names_share_is_linked_once(
    publisher: Publisher, near: RatoonClient, root: Path
) -> None:
    publisher.publish(2, {f"{letter}.safetensors": FIRST[MODEL] for letter in "abcdefgh"})
    pulled = near.pull_weights("p", root)
    assert pulled.fetched_bytes == 0
    assert len({path.stat().st_ino for path in pulled.folder.glob("*.safetensors")}) == 1


def test_what_is_linked_is_not_written_over_when_it_is_retired(
    publisher: Publisher, near: RatoonClient, root: Path
) -> None:
    pulled = near.pull_weights("p", root)
    inode = publisher.path(1).stat().st_ino
    publisher.retire(2, SECOND)
    assert inode not in {publisher.path(version).stat().st_ino for version in (2, 3)}
    assert (pulled.folder / MODEL).read_bytes() == FIRST[MODEL]


def test_a_version_that_goes_while_it_is_linked_is_fetched(
    publisher: Publisher, near: RatoonClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was found under its old name, and is linked once the service has looked for links.

    It has the right digest then, and other bytes a moment later.
    """
    linked, verified = threading.Event(), threading.Event()
    link = os.link

    def late(folder: Path) -> None:
        link(folder / MODEL, root / ".partial" / late_name[0])
        linked.set()
        assert verified.wait(WAIT_S)

    late_name: list[str] = []
    threads: list[threading.Thread] = []

    def hold(source: Path, target: Path, **_: object) -> None:
        if Path(source).name != MODEL or threads:
            link(source, target)
            return
        late_name.append(Path(target).name)
        retire = threading.Thread(
            target=lambda: publisher.retire(2, SECOND, before_writing=late), daemon=True
        )
        threads.append(retire)
        retire.start()
        assert linked.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", hold)
        pulled = near.pull_weights("p", root, 1)
    verified.set()
    threads[0].join(WAIT_S)
    assert publisher.path(3).read_bytes() == SECOND[MODEL]
    assert (pulled.folder / MODEL).read_bytes() == FIRST[MODEL]
    # The other file is linked before the version goes, or fetched too.
    fetched = len(FIRST[MODEL])
    assert pulled.fetched_bytes in {fetched, fetched + len(FIRST["config.json"])}
    assert versions(root) == {"version-1"}


def test_another_version_of_that_number_is_not_taken(
    publisher: Publisher, near: RatoonClient, root: Path
) -> None:
    """The version belongs to a policy that was created again, or to another service's folder."""
    publisher.service.publish(1, SECOND)
    pulled = near.pull_weights("p", root)
    assert (pulled.folder / MODEL).read_bytes() == SECOND[MODEL]
    assert publisher.path(1).read_bytes() == FIRST[MODEL]
