"""Weight pulls: whole and verified, or as if they had never begun."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from ratoon_client import (
    AsyncRatoonClient,
    ClientConfig,
    IntegrityError,
    RatoonApiError,
    RatoonClient,
    TransportError,
)
from ratoon_client.weights.chunks import PartialFile
from ratoon_client.weights.folder import MANIFEST_NAME
from tests.client.conftest import Rig, serving, versions
from tests.client.fake_service import CHUNK_BYTES, FakePolicy, FakeService, LostAnswerError

CONFIG_JSON = b'{"model_type": "llama"}'
NUM_CHUNKS = 10
# For what happens behind the wire.
one_wire = pytest.mark.parametrize("wire", ["http"])


def model_bytes(seed: int) -> bytes:
    """Some whole chunks and a bit."""
    return random.Random(seed).randbytes((NUM_CHUNKS - 1) * CHUNK_BYTES + 7)


@pytest.fixture(autouse=True)
def _published(service: FakeService) -> None:
    service.publish(1, {"model.safetensors": model_bytes(1), "config.json": CONFIG_JSON})


def tree(root: Path) -> dict[str, bytes]:
    """All files below `root` but the lock, by path."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name != ".lock"
    }


def test_named_chat_templates_are_pulled_into_their_folder(rig: Rig):
    files = {"model.safetensors": model_bytes(1), "additional_chat_templates/rag.jinja": b"{{ x }}"}
    rig.service.publish(3, files)
    for pulled in (rig.pull(), rig.pull()):
        found = tree(pulled.folder)
        del found[MANIFEST_NAME]
        assert found == files


def test_a_pulled_version_has_the_files_and_latest_names_it(rig: Rig):
    pulled = rig.pull()
    assert (pulled.version, pulled.folder) == (1, rig.root / "version-1")
    assert pulled.fetched_bytes == len(model_bytes(1)) + len(CONFIG_JSON)
    assert (rig.root / "latest").resolve() == (rig.root / "version-1").resolve()
    assert {path.name for path in pulled.folder.iterdir()} == {
        "model.safetensors",
        "config.json",
        MANIFEST_NAME,
    }
    assert (pulled.folder / "model.safetensors").read_bytes() == model_bytes(1)
    assert (pulled.folder / "config.json").read_bytes() == CONFIG_JSON
    assert rig.service.calls["FetchWeights"] == NUM_CHUNKS + 1
    assert {path.name for path in rig.root.iterdir()} == {"version-1", "latest", ".lock"}
    assert 2 <= rig.service.max_in_flight <= ClientConfig().fetches_in_flight


@one_wire
@pytest.mark.parametrize("is_good", [True, False])
def test_a_file_is_put_on_disk_while_the_next_one_comes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_good: bool
):
    rig.service.publish(2, {"a.bin": model_bytes(1), "b.bin": model_bytes(2)})
    second_began, finish = threading.Event(), PartialFile.finish
    first = xxhash.xxh3_128_hexdigest(model_bytes(1))
    seen: set[str] = set()

    def note(data: bytes, _: int) -> bytes:
        if data in model_bytes(2):
            second_began.set()
        return data

    def slow(self: PartialFile, digest: str) -> None:
        if digest == first:
            assert second_began.wait(10)
        seen.add(digest)
        finish(self, digest if is_good else "0" * 32)

    rig.service.tamper = note
    monkeypatch.setattr(PartialFile, "finish", slow)
    if is_good:
        assert rig.pull().fetched_bytes == 2 * len(model_bytes(1))
        assert len(seen) == 2
        return
    with pytest.raises(IntegrityError, match=r"a\.bin of version 2"):
        rig.pull()
    assert versions(rig.root) == set()


@one_wire
def test_what_is_here_already_is_not_fetched(rig: Rig):
    rig.pull()
    rig.service.calls.clear()
    assert rig.pull().fetched_bytes == 0
    assert rig.service.calls["FetchWeights"] == 0

    rig.service.publish(2, {"model.safetensors": model_bytes(2), "config.json": CONFIG_JSON})
    pulled = rig.pull()
    assert pulled.fetched_bytes == len(model_bytes(2))
    assert rig.service.calls["FetchWeights"] == NUM_CHUNKS
    first, second = rig.root / "version-1" / "config.json", rig.root / "version-2" / "config.json"
    assert first.samefile(second)
    assert (rig.root / "latest" / "model.safetensors").read_bytes() == model_bytes(2)


@one_wire
def test_a_local_file_that_was_changed_is_fetched_again(rig: Rig):
    rig.pull()
    (rig.root / "version-1" / "config.json").write_bytes(b"#" * len(CONFIG_JSON))
    rig.service.publish(2, {"model.safetensors": model_bytes(2), "config.json": CONFIG_JSON})
    pulled = rig.pull()
    assert (pulled.folder / "config.json").read_bytes() == CONFIG_JSON


@one_wire
def test_a_version_that_was_changed_in_place_is_not_taken_for_whole(rig: Rig):
    """Its sizes were enough."""
    rig.pull()
    rig.service.calls.clear()
    path = rig.root / "version-1" / "model.safetensors"
    data = bytearray(model_bytes(1))
    data[100] ^= 1
    path.write_bytes(data)
    pulled = rig.pull()
    assert pulled.fetched_bytes == len(model_bytes(1))
    assert rig.service.calls["FetchWeights"] == NUM_CHUNKS
    assert path.read_bytes() == model_bytes(1)
    assert {item.name for item in rig.root.iterdir()} == {"version-1", "latest", ".lock"}
    assert rig.pull().fetched_bytes == 0


def test_weight_pull_that_half_applied(rig: Rig):
    """Trap 11, 'Weight pull that half-applied': one bad chunk of the next version."""
    rig.pull()
    before = tree(rig.root)
    rig.service.publish(2, {"model.safetensors": model_bytes(2), "config.json": CONFIG_JSON})

    def flip(data: bytes, offset: int) -> bytes:
        return bytes([data[0] ^ 1]) + data[1:] if offset == 3 * CHUNK_BYTES else data

    rig.service.tamper = flip
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        rig.pull()
    after = {name: data for name, data in tree(rig.root).items() if not name.startswith(".partial")}
    assert after == before
    assert (rig.root / "latest").readlink() == Path("version-1")

    rig.service.tamper = lambda data, _: data
    assert rig.pull().version == 2
    assert (rig.root / "latest" / "model.safetensors").read_bytes() == model_bytes(2)


def test_a_chunk_that_is_too_short_is_refused(rig: Rig):
    rig.service.tamper = lambda data, offset: data[:-1] if offset else data
    with pytest.raises(IntegrityError, match="63 bytes, 64 were asked for"):
        rig.pull()
    assert versions(rig.root) == set()


def test_an_interrupted_pull_goes_on_where_it_stopped(service: FakeService, url: str, root: Path):
    config = ClientConfig(timeout_s=0.8, fetches_in_flight=1)
    fetched = 4

    def break_off(data: bytes, offset: int) -> bytes:
        if offset == fetched * CHUNK_BYTES:
            raise LostAnswerError
        return data

    service.tamper = break_off
    with RatoonClient(url, config=config) as client, pytest.raises(TransportError):
        client.pull_weights("p", root)
    assert versions(root) == set()
    assert not (root / "latest").exists()

    service.tamper = lambda data, _: data
    service.calls.clear()
    with RatoonClient(url, timeout_s=5.0) as client:
        pulled = client.pull_weights("p", root)
    assert service.calls["FetchWeights"] == NUM_CHUNKS - fetched + 1
    assert (pulled.folder / "model.safetensors").read_bytes() == model_bytes(1)


@one_wire
def test_only_chunks_that_went_bad_on_disk_are_fetched_again(rig: Rig):
    """An interrupted pull's file, in which a chunk has rotted and the log's end is cut off."""
    digest = xxhash.xxh3_128_hexdigest(model_bytes(1))
    partial = rig.root / ".partial" / digest
    partial.parent.mkdir(parents=True)
    data = bytearray(model_bytes(1))
    data[2 * CHUNK_BYTES] ^= 1
    partial.write_bytes(data)
    good = model_bytes(1)
    lines = [
        f"{offset} {CHUNK_BYTES} {xxhash.xxh3_128_hexdigest(good[offset : offset + CHUNK_BYTES])}"
        for offset in range(0, (NUM_CHUNKS - 1) * CHUNK_BYTES, CHUNK_BYTES)
    ]
    (rig.root / ".partial" / f"{digest}.chunks").write_text("\n".join(lines)[:-5])
    pulled = rig.pull()
    assert (pulled.folder / "model.safetensors").read_bytes() == good
    # The rotten one, the one whose line is cut, the last short one, and config.json.
    assert rig.service.calls["FetchWeights"] == 4


@one_wire
def test_a_whole_file_of_another_digest_is_forgotten(service: FakeService, url: str, root: Path):
    """Chunks that agree with a log but not with the file, as after a server's mistake."""
    digest = xxhash.xxh3_128_hexdigest(model_bytes(1))
    other = model_bytes(2)
    (root / ".partial").mkdir(parents=True)
    (root / ".partial" / digest).write_bytes(other)
    lines = [
        f"{start} {len(part)} {xxhash.xxh3_128_hexdigest(part)}\n"
        for start in range(0, len(other), CHUNK_BYTES)
        for part in [other[start : start + CHUNK_BYTES]]
    ]
    (root / ".partial" / f"{digest}.chunks").write_text("".join(lines))
    with RatoonClient(url, timeout_s=5.0) as client:
        with pytest.raises(IntegrityError, match=r"model\.safetensors of version 1"):
            client.pull_weights("p", root)
        assert service.calls["FetchWeights"] == 0
        assert versions(root) == set()
        pulled = client.pull_weights("p", root)
    assert (pulled.folder / "model.safetensors").read_bytes() == model_bytes(1)


@one_wire
def test_old_versions_go_and_latest_stays(rig: Rig):
    for version in (1, 2, 3, 4):
        rig.service.publish(version, {"model.safetensors": model_bytes(version)})
        rig.pull()
    assert versions(rig.root) == {"version-3", "version-4"}

    assert rig.pull(1).folder == rig.root / "version-1"
    assert versions(rig.root) == {"version-1", "version-4"}
    assert (rig.root / "latest").readlink() == Path("version-4")

    rig.service.publish(5, {"model.safetensors": model_bytes(5)})
    rig.pull(keep=None)
    assert versions(rig.root) == {"version-1", "version-4", "version-5"}
    rig.pull(keep=1)
    assert versions(rig.root) == {"version-5"}


@one_wire
def test_a_policy_made_anew_replaces_a_version_of_the_same_number(rig: Rig):
    rig.pull()
    rig.service.policies["p"] = FakePolicy()
    rig.service.publish(1, {"model.safetensors": model_bytes(9)})
    pulled = rig.pull()
    assert (pulled.folder / "model.safetensors").read_bytes() == model_bytes(9)
    assert not (pulled.folder / "config.json").exists()
    assert versions(rig.root) == {"version-1"}


def test_a_version_retired_during_the_pull_gives_way_to_the_newest(rig: Rig):
    def retire(data: bytes, offset: int) -> bytes:
        if 1 in rig.service.policies["p"].weights and offset == 2 * CHUNK_BYTES:
            del rig.service.policies["p"].weights[1]
            rig.service.publish(2, {"model.safetensors": model_bytes(2)})
        return data

    rig.service.tamper = retire
    pulled = rig.pull()
    assert pulled.version == 2
    assert (pulled.folder / "model.safetensors").read_bytes() == model_bytes(2)
    with pytest.raises(RatoonApiError, match="WEIGHTS_NOT_FOUND"):
        rig.pull(1)


@one_wire
def test_pulls_into_one_folder_take_turns(service: FakeService, url: str, root: Path):
    def pull(_: int) -> int:
        with RatoonClient(url, timeout_s=10.0) as client:
            return client.pull_weights("p", root).fetched_bytes

    with ThreadPoolExecutor(3) as pool:
        fetched = sorted(pool.map(pull, range(3)))
    assert fetched == [0, 0, len(model_bytes(1)) + len(CONFIG_JSON)]
    assert service.calls["FetchWeights"] == NUM_CHUNKS + 1


async def test_a_cancelled_pull_leaves_no_version_and_no_lock(
    service: FakeService, url: str, root: Path
):
    async with AsyncRatoonClient(url, timeout_s=5.0) as client:
        await client.server_info()
        with service.lock:
            pull = asyncio.create_task(client.pull_weights("p", root))
            await asyncio.sleep(0.1)
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
        assert versions(root) == set()
        assert (await client.pull_weights("p", root)).version == 1


@one_wire
def test_a_file_that_two_names_share_is_fetched_once(rig: Rig):
    rig.service.publish(3, {"a.bin": model_bytes(3), "b.bin": model_bytes(3), "empty.txt": b""})
    pulled = rig.pull()
    assert pulled.fetched_bytes == len(model_bytes(3))
    assert (pulled.folder / "b.bin").read_bytes() == model_bytes(3)
    assert (pulled.folder / "empty.txt").read_bytes() == b""


@one_wire
@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "a/b", "..", ".", "", MANIFEST_NAME, "a\0b", "x" * 256),
        *(f"additional_chat_templates/{name}" for name in ("", "..", "../evil", "a/b")),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(rig: Rig, name: str):
    rig.service.publish(3, {"good.bin": b"1", name: b"2"})
    with pytest.raises(IntegrityError, match="is no name of a weight file"):
        rig.pull()
    assert {path.name for path in rig.root.iterdir()} == {".lock"}
    assert not (rig.root.parent / "evil").exists()


@one_wire
def test_a_full_disk_leaves_the_versions_as_they_were(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.pull()
    rig.service.publish(2, {"model.safetensors": model_bytes(2)})

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            rig.pull()
    assert versions(rig.root) == {"version-1"}
    assert rig.pull().version == 2


def test_a_range_of_another_file_is_refused(service: FakeService, root: Path):
    service.tag = lambda digest: f'"{digest[::-1]}"'
    with (
        serving(service, "http") as url,
        RatoonClient(url) as client,
        pytest.raises(IntegrityError, match="another file of this name"),
    ):
        client.pull_weights("p", root)
    assert versions(root) == set()


@one_wire
def test_what_a_killed_pull_left_is_removed(client: RatoonClient, root: Path):
    (root / ".staged-1").mkdir(parents=True)
    (root / ".staged-1" / "model.safetensors").write_bytes(b"half")
    (root / ".staged-2").symlink_to("version-9")
    client.pull_weights("p", root)
    assert {path.name for path in root.iterdir()} == {"version-1", "latest", ".lock"}
