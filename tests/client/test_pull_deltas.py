"""Pulls by deltas: the same files as without, for fewer bytes, or whole files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ratoon.stream.deltas import write_delta
from ratoon.stream.files import seal_bytes
from ratoon_client import ClientConfig, RatoonApiError, RatoonClient, TransportError
from tests.client.conftest import Rig
from tests.client.fake_service import (
    CHUNK_BYTES,
    FakePolicy,
    FakeService,
    LostAnswerError,
    RefusalError,
)
from tests.stream.samples import NAME, put_version, safetensors

CONFIG = b'{"model_type": "llama"}'
NUM_WORDS = 4000


@pytest.fixture
def wire() -> str:
    """Files come by both wires in test_pull."""
    return "http"


def model(version: int) -> dict[str, bytes]:
    """About 8 kB; from one version to the next 1 word in 50 is another."""
    words = np.random.default_rng(0).integers(0, 2**16, NUM_WORDS, np.uint16)
    for number in range(version):
        words[number::50] += 1
    return {NAME: safetensors([("BF16", words.tobytes())]), "config.json": CONFIG}


def delta_between(
    folder: Path, before: Mapping[str, bytes], after: Mapping[str, bytes], parent: int
) -> bytes:
    """The delta as the service writes it."""

    folder.mkdir()
    parents = put_version(folder / "before", before, parent)
    files = put_version(folder / "after", after).files
    write_delta(folder / "delta", folder / "before", parents, folder / "after", files)
    return (folder / "delta").read_bytes()


class Published:
    """Versions of a fake service, each with the delta from the one before it."""

    def __init__(self, service: FakeService, scratch: Path) -> None:
        self._service = service
        self._scratch = scratch
        self.sizes: dict[int, int] = {}

    def add(self, version: int, parent: int | None) -> None:
        if parent is None:
            self._service.publish(version, model(version))
            return
        self._scratch.mkdir(exist_ok=True)
        folder = self._scratch / f"{parent}-{version}"
        delta = delta_between(folder, model(parent), model(version), parent)
        self.sizes[version] = len(delta)
        self._service.publish(version, model(version), deltas=[(parent, delta)])


@pytest.fixture
def published(service: FakeService, tmp_path: Path) -> Published:
    published = Published(service, tmp_path / "scratch")
    published.add(1, None)
    return published


@dataclass(frozen=True, kw_only=True)
class DeltaRig(Rig):
    published: Published


@pytest.fixture
def rig(rig: Rig, published: Published) -> DeltaRig:
    return DeltaRig(service=rig.service, client=rig.client, root=rig.root, published=published)


def assert_whole(root: Path, version: int) -> None:
    folder = root / f"version-{version}"
    assert {name: (folder / name).read_bytes() for name in model(version)} == model(version)
    assert (root / "latest").resolve() == folder.resolve()
    assert not (root / ".partial").exists()


def test_a_reader_of_the_version_before_fetches_the_delta(rig: DeltaRig):
    first = rig.pull()
    assert first.parent_version is None
    rig.published.add(2, 1)
    pulled = rig.pull()
    assert (pulled.parent_version, pulled.fetched_bytes) == (1, rig.published.sizes[2])
    assert rig.published.sizes[2] < len(model(2)[NAME]) / 4
    assert_whole(rig.root, 2)
    assert rig.pull().fetched_bytes == 0


def test_a_reader_says_from_which_version_it_takes_a_delta(rig: DeltaRig):
    """It then waits for no files of a version that is being written."""
    for version in (2, 3):
        rig.pull()
        rig.published.add(version, version - 1)
    rig.pull()
    assert rig.service.deltas_from == [None, 1, 2]


def test_a_reader_of_the_services_folder_waits_for_files(rig: DeltaRig, tmp_path: Path, url: str):
    """Which it links, where a delta would be applied."""
    config = ClientConfig(weights_root=tmp_path / "weights")
    with RatoonClient(url, config=config) as client:
        for _ in range(2):
            client.pull_weights("p", rig.root)
    assert rig.service.deltas_from == [None, None]


def test_a_reader_of_an_older_version_fetches_the_deltas_between(rig: DeltaRig):
    rig.pull()
    for version in (2, 3, 4):
        rig.published.add(version, version - 1)
    pulled = rig.pull()
    sizes = rig.published.sizes
    assert (pulled.parent_version, pulled.fetched_bytes) == (1, sizes[2] + sizes[3] + sizes[4])
    assert_whole(rig.root, 4)


def test_a_chain_that_is_larger_than_the_files_is_not_taken(rig: DeltaRig):
    rig.pull()
    for version in range(2, 40):
        rig.published.add(version, version - 1)
    assert sum(rig.published.sizes.values()) > len(model(39)[NAME])
    rig.service.calls.clear()
    pulled = rig.pull()
    assert (pulled.parent_version, pulled.fetched_bytes) == (None, len(model(39)[NAME]))
    # No more manifests are asked for than a chain below that size has.
    assert rig.service.calls["GetWeightManifest"] < 39
    assert_whole(rig.root, 39)


def test_of_several_deltas_the_one_from_a_local_version_is_taken(rig: DeltaRig, tmp_path: Path):
    rig.pull()
    rig.published.add(2, 1)
    rig.published.add(3, 2)
    long = delta_between(tmp_path / "long", model(1), model(3), 1)
    rig.service.policies["p"].deltas[3].append((1, long))
    assert rig.published.sizes[3] < len(long)
    pulled = rig.pull()
    assert (pulled.parent_version, pulled.fetched_bytes) == (1, len(long))
    assert_whole(rig.root, 3)


def test_a_version_between_that_was_retired_breaks_the_chain(rig: DeltaRig):
    rig.pull()
    rig.published.add(2, 1)
    rig.published.add(3, 2)
    del rig.service.policies["p"].weights[2]
    pulled = rig.pull()
    assert (pulled.parent_version, pulled.fetched_bytes) == (None, len(model(3)[NAME]))
    assert_whole(rig.root, 3)


def test_manifests_that_lead_in_a_circle_end(rig: DeltaRig):
    rig.published.add(2, 1)
    rig.service.policies["p"].deltas[1] = [(2, b"?")]
    assert rig.pull().parent_version is None
    assert_whole(rig.root, 2)


def test_a_reader_without_the_parent_fetches_whole_files(rig: DeltaRig):
    rig.published.add(2, 1)
    pulled = rig.pull()
    assert (pulled.parent_version, pulled.fetched_bytes) == (
        None,
        sum(len(data) for data in model(2).values()),
    )
    assert_whole(rig.root, 2)


@pytest.mark.parametrize("fault", ["cut", "flipped", "other", "retired"])
def test_a_delta_that_is_not_what_it_says_gives_way_to_whole_files(rig: DeltaRig, fault: str):
    rig.pull()
    rig.published.add(2, 1)
    ((_, delta),) = rig.service.policies["p"].deltas[2]
    match fault:
        case "cut":
            rig.service.policies["p"].deltas[2] = [(1, delta[:-20])]
        case "flipped":
            # With a digest that says so: not the fetch but what it makes tells.
            damaged = bytes([delta[5] ^ 1]) + delta[1:]
            rig.service.policies["p"].deltas[2] = [(1, damaged)]
        case "other":
            rig.service.policies["p"].deltas[2] = [(1, published_other(rig.root.parent))]
        case "retired":

            def gone(data: bytes, _: int) -> bytes:
                if data in delta:
                    raise RefusalError("WEIGHTS_NOT_FOUND", field="digest")
                return data

            rig.service.tamper = gone
    pulled = rig.pull()
    assert pulled.parent_version is None
    assert pulled.fetched_bytes >= len(model(2)[NAME])
    assert_whole(rig.root, 2)
    assert (rig.root / "version-1" / NAME).read_bytes() == model(1)[NAME]


def published_other(folder: Path) -> bytes:
    """A whole delta, from version 1 to another one than 2."""
    return delta_between(folder / "other", model(1), model(3), 1)


@pytest.mark.parametrize(("name", "size_bytes"), [("../../mine", 8), ("0" * 32, 2**60)])
def test_a_delta_makes_no_file_that_is_not_of_its_version(
    rig: DeltaRig, name: str, size_bytes: int
):
    rig.service.publish(1, model(1))
    rig.pull()
    mine = rig.root.parent / "mine.rebuilt"
    mine.write_bytes(b"mine")
    parent = xxhash.xxh3_128_hexdigest(model(1)[NAME])
    file = {"name": NAME, "size_bytes": size_bytes, "digest": name, "parent_digest": parent}
    header = seal_bytes(json.dumps({"format": 1, "files": [file | {"runs": []}]}).encode())
    delta = header + len(header).to_bytes(8, "little")
    rig.service.publish(2, model(2), deltas=[(1, delta)])
    assert rig.pull().parent_version is None
    assert_whole(rig.root, 2)
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("fault", ["changed", "shorter", "gone"])
def test_a_parent_that_is_not_whole_any_more_gives_way_to_whole_files(rig: DeltaRig, fault: str):
    rig.pull()
    rig.published.add(2, 1)
    path = rig.root / "version-1" / NAME
    data = path.read_bytes()
    match fault:
        case "changed":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "shorter":
            path.write_bytes(data[:-500])
        case "gone":
            path.unlink()
    pulled = rig.pull()
    assert pulled.parent_version is None
    assert pulled.fetched_bytes == rig.published.sizes[2] + len(model(2)[NAME])
    assert_whole(rig.root, 2)


def test_a_version_of_a_policy_made_anew_is_no_parent(rig: DeltaRig):
    rig.published.add(3, None)
    rig.pull()
    rig.service.policies["p"] = FakePolicy()
    (rig.root / "version-3").rename(rig.root / "version-1")
    rig.published.add(1, None)
    rig.published.add(2, 1)
    assert rig.pull().parent_version is None
    assert_whole(rig.root, 2)


def test_a_lost_connection_in_a_delta_is_gone_on_from(
    service: FakeService, url: str, published: Published, root: Path
):
    with RatoonClient(url, timeout_s=5.0) as client:
        client.pull_weights("p", root)
    published.add(2, 1)

    def break_off(data: bytes, offset: int) -> bytes:
        if offset == CHUNK_BYTES:
            raise LostAnswerError
        return data

    service.tamper = break_off
    with RatoonClient(url, timeout_s=0.8) as client, pytest.raises(TransportError):
        client.pull_weights("p", root)
    assert {path.name for path in root.glob("version-*")} == {"version-1"}
    service.tamper = lambda data, _: data
    with RatoonClient(url, timeout_s=5.0) as client:
        pulled = client.pull_weights("p", root)
    assert pulled.parent_version == 1
    assert pulled.fetched_bytes <= published.sizes[2] - CHUNK_BYTES
    assert_whole(root, 2)


def test_a_version_retired_while_its_delta_comes_is_not_found(rig: DeltaRig):
    rig.pull()
    rig.published.add(2, 1)

    def retire(_data: bytes, _offset: int) -> bytes:
        rig.service.policies["p"].weights.pop(2, None)
        raise RefusalError("WEIGHTS_NOT_FOUND", field="digest")

    rig.service.tamper = retire
    with pytest.raises(RatoonApiError, match="WEIGHTS_NOT_FOUND"):
        rig.pull(2)
    assert (rig.root / "latest").resolve() == (rig.root / "version-1").resolve()
