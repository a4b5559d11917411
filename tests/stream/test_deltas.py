"""Weight deltas: the client makes files of what the service writes, byte for byte or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ratoon.model import delta_runs
from ratoon.stream import deltas
from ratoon.stream.deltas import write_delta, write_delta_apart
from ratoon.stream.files import digest_bytes, seal_bytes
from ratoon_client import IntegrityError
from ratoon_client.weights.deltas import apply, read_delta, rebuild
from tests.stream.samples import DTYPES, NAME, Tensor, flipped, put_version, safetensors


class Versions:
    """Two folders of files, and a delta that is kept whatever its size."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deltas, "_MAX_SHARE", 1e9)
        self.root = root
        self.path = root / "delta.bin"
        self.share: float | None = None
        self.before, self.after = root / "before", root / "after"
        self.parent = put_version(self.before, {})
        self.files = put_version(self.after, {}).files

    def write(self, before: dict[str, bytes], after: dict[str, bytes]) -> None:
        self.path.unlink(missing_ok=True)
        self.parent = put_version(self.before, before)
        self.files = put_version(self.after, after).files
        self.share = self.encode(write_delta, self.path)

    def encode(self, write: Callable[..., float | None], path: Path) -> float | None:
        return write(path, self.before, self.parent, self.after, self.files)

    def rebuilt(self) -> dict[str, bytes]:
        """What the delta makes of the files before, on the disk and in place; what it does not name
        is not there."""
        made: dict[str, bytes] = {}
        for file in read_delta(self.path):
            target = self.root / "made"
            data = np.frombuffer(bytearray((self.before / file.name).read_bytes()), np.uint8)
            try:
                rebuild(file, self.before / file.name, target)
            except IntegrityError:
                assert not target.exists()
                with pytest.raises(IntegrityError):
                    apply(file, data)
                raise
            apply(file, data)
            made[file.name] = target.read_bytes()
            assert data.tobytes() == made[file.name]
        return made


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Versions:
    return Versions(tmp_path, monkeypatch)


@st.composite
def _tensor_pairs(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor], int]:
    """Tensors before and after, largest words first, and how many words differ."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    num_changed = 0
    dtypes = draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=4))
    for dtype in sorted(dtypes, key=lambda dtype: -DTYPES[dtype]):
        num_words, word_bytes = draw(st.integers(0, 700)), DTYPES[dtype]
        data = np.random.default_rng(draw(st.integers(0, 9))).bytes(num_words * word_bytes)
        every = draw(st.sampled_from([1, 2, 7, 254, 255, 256, 257, 511]))
        places = range(draw(st.integers(0, num_words)), num_words, every)
        before.append((dtype, data))
        after.append((dtype, flipped(data, word_bytes, places, seed=num_words)))
        num_changed += len(places)
    return before, after, num_changed


@settings(max_examples=80, deadline=None)
@given(pair=_tensor_pairs(), run_words=st.sampled_from([1, 3, 64, 10**6]))
def test_a_delta_makes_the_file_of_its_parent(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[list[Tensor], list[Tensor], int],
    run_words: int,
) -> None:
    before, after, num_changed = pair
    num_words = sum(len(data) // DTYPES[dtype] for dtype, data in before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_runs, "RUN_BYTES", 8 * run_words)
        versions = Versions(tmp_path_factory.mktemp("versions"), patch)
        versions.write({NAME: safetensors(before)}, {NAME: safetensors(after)})
    assert versions.share == (num_changed / num_words if num_words else None)
    assert versions.path.exists() == (num_changed > 0)
    if num_changed:
        assert versions.rebuilt() == {NAME: safetensors(after)}


@pytest.mark.parametrize("word_bytes", [1, 2])
@pytest.mark.parametrize(
    "places",
    [
        *([place] for place in (0, 253, 254, 255, 256, 509, 510, 65_534, 65_535, 65_536, 131_070)),
        [199_999],
        [5, 131_075],
        [0, 1, 2, 199_998, 199_999],
        range(199_000),
    ],
)
def test_gaps_of_any_length_come_back(
    versions: Versions, places: Sequence[int], word_bytes: int
) -> None:
    dtype = {1: "U8", 2: "BF16"}[word_bytes]
    old = np.random.default_rng(3).bytes(200_000 * word_bytes)
    new = flipped(old, word_bytes, places, seed=1)
    versions.write({NAME: safetensors([(dtype, old)])}, {NAME: safetensors([(dtype, new)])})
    assert versions.rebuilt() == {NAME: safetensors([(dtype, new)])}
    assert versions.share == len(places) / 200_000


def test_a_file_of_many_runs_with_long_stretches_that_stay(versions: Versions) -> None:
    old = np.random.default_rng(0).bytes(9 * 2**20)
    new = flipped(old, 4, [0, 2**21], seed=0)
    before, after = (safetensors([("F32", data)]) for data in (old, new))
    versions.write({NAME: before}, {NAME: after})
    (file,) = read_delta(versions.path)
    assert [run.num_changed for run in file.runs] == [1, 1]
    assert versions.rebuilt() == {NAME: after}
    assert versions.path.stat().st_size < 1000


@pytest.mark.parametrize("num_parts", [1, 3])
def test_processes_apart_write_the_same_delta(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parts: int
) -> None:
    """Two runs are one part, or two parts and one without any."""
    random = np.random.default_rng(0)
    old = [("F32", random.bytes(4 * 5000)), ("BF16", random.bytes(2 * 3000))]
    new = [(dtype, flipped(data, 2, range(7, 2000, 9), seed=1)) for dtype, data in old]
    before, after = safetensors(old), safetensors(new)
    versions.write({NAME: before}, {NAME: after})
    monkeypatch.setattr(deltas, "_NUM_PROCESSES", num_parts)
    monkeypatch.setattr(deltas, "_LEAST_BYTES", 1)
    (tmp_path / "apart").mkdir()
    apart = tmp_path / "apart" / "delta.bin"
    assert versions.encode(write_delta_apart, apart) == versions.share
    assert apart.read_bytes() == versions.path.read_bytes()
    assert [*apart.parent.iterdir()] == [apart]
    apart.unlink()
    (versions.before / NAME).write_bytes(before[:-1])
    with pytest.raises(ChildProcessError, match=r"ended with 1: OSError: .* was cut"):
        versions.encode(write_delta_apart, apart)
    versions.files = ()
    assert versions.encode(write_delta_apart, apart) is None
    assert not [*apart.parent.iterdir()]


def test_an_encoder_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(deltas, "_START_S", 0.1)
    parent = put_version(tmp_path, {NAME: bytes(10)})
    with pytest.raises(ChildProcessError, match="not ended within"):
        write_delta_apart(tmp_path / "delta", tmp_path, parent, tmp_path, parent.files)


def test_a_version_that_was_cut_gives_no_delta(versions: Versions) -> None:
    before, after = (safetensors([("F32", bytes([value]) * 400)]) for value in (1, 2))
    versions.write({NAME: before}, {NAME: after})
    (versions.before / NAME).write_bytes(before[:-1])
    with pytest.raises(OSError, match="was cut"):
        versions.encode(write_delta, versions.root / "other.bin")


def normal_bf16(num_words: int, seed: int) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).normal(0, 0.02, num_words).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("is_small_step", "most"), [(True, 0.008), (False, 0.016)])
def test_one_percent_of_changed_values_is_a_small_delta(
    versions: Versions, is_small_step: bool, most: float
) -> None:
    """With positions at random, gaps alone have an entropy of 0.5% of the file."""
    old = normal_bf16(3 * 2**20, seed=0)
    new = old.copy()
    places = np.random.default_rng(1).permutation(len(old))[: len(old) // 100]
    new[places] = old[places] + 1 if is_small_step else normal_bf16(len(places), seed=2)
    before, after = (safetensors([("BF16", words.tobytes())]) for words in (old, new))
    versions.write({NAME: before}, {NAME: after})
    assert versions.path.stat().st_size <= most * len(after)
    assert versions.rebuilt() == {NAME: after}


def test_values_that_have_nothing_of_the_parents_are_sent_as_they_are(versions: Versions) -> None:
    random = np.random.default_rng(0)
    before, after = (safetensors([("F32", random.bytes(4 * 5000))]) for _ in range(2))
    versions.write({NAME: before}, {NAME: after})
    assert versions.path.stat().st_size < len(after) + 500
    assert versions.rebuilt() == {NAME: after}
    (file,) = read_delta(versions.path)
    assert [run.encoding for run in file.runs] == ["dense"]
    constant = safetensors([("F32", b"\1\2\3\4" * 5000)])
    versions.write({NAME: before}, {NAME: constant})
    assert versions.path.stat().st_size < 1000
    assert versions.rebuilt() == {NAME: constant}


def test_only_files_with_the_parents_tensors_are_in_a_delta(versions: Versions) -> None:
    one, other = b"\0\1" * 40, b"\0\2" * 40
    before = {
        NAME: safetensors([("BF16", one)]),
        "same.safetensors": safetensors([("BF16", one)]),
        "dtype.safetensors": safetensors([("BF16", one)]),
        "size.safetensors": safetensors([("BF16", one)]),
        "config.json": b"{}",
    }
    after = {
        NAME: safetensors([("BF16", other)]),
        "same.safetensors": safetensors([("BF16", one)]),
        "dtype.safetensors": safetensors([("F16", one)]).replace(b'"F16", ', b'"F16",  '),
        "size.safetensors": safetensors([("BF16", one + one)]),
        "config.json": b"[]",
        "new.safetensors": safetensors([("BF16", one)]),
    }
    assert len(before["dtype.safetensors"]) == len(after["dtype.safetensors"])
    versions.write(before, after)
    assert versions.rebuilt() == {NAME: after[NAME]}
    # The share is that of the 80 words that could be compared.
    assert versions.share == 0.5


def small_delta(versions: Versions) -> bytes:
    """A delta with sparse runs of both gap widths and a dense one; the parent is beside it."""
    old = np.random.default_rng(5).bytes(2 * 800)
    new = flipped(flipped(old, 2, range(0, 400, 3), 0), 2, [799], 1)
    tensors: list[list[Tensor]] = [[("BF16", old), ("U8", bytes(50))]]
    tensors += [[("BF16", new), ("U8", np.random.default_rng(6).bytes(50))]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_runs, "RUN_BYTES", 800)
        versions.write({NAME: safetensors(tensors[0])}, {NAME: safetensors(tensors[1])})
    (file,) = read_delta(versions.path)
    used = {(run.encoding, run.gap_bytes) for run in file.runs}
    assert used == {("sparse", 1), ("sparse", 2), ("dense", 1)}
    return versions.path.read_bytes()


def test_a_delta_cut_at_any_byte_is_refused(versions: Versions) -> None:
    whole = small_delta(versions)
    for size in range(len(whole)):
        versions.path.write_bytes(whole[:size])
        with pytest.raises(IntegrityError):
            versions.rebuilt()
    versions.path.write_bytes(whole + b"\0")
    with pytest.raises(IntegrityError):
        versions.rebuilt()


def test_a_delta_with_any_bit_flipped_makes_no_other_file(versions: Versions) -> None:
    """Bytes that a stream's reader ignores may be flipped; then the file is right all the same."""
    whole = small_delta(versions)
    right = {NAME: (versions.root / "after" / NAME).read_bytes()}
    num_refused = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        versions.path.write_bytes(damaged)
        try:
            assert versions.rebuilt() == right, place
        except IntegrityError:
            num_refused += 1
    assert num_refused > 0.98 * len(whole)


def test_a_parent_with_other_bytes_makes_nothing(versions: Versions) -> None:
    small_delta(versions)
    parent = versions.root / "before" / NAME
    data = parent.read_bytes()
    for changed in (data[:-100], data[:100], b"", bytes([data[0] ^ 1]) + data[1:]):
        parent.write_bytes(changed)
        with pytest.raises(IntegrityError):
            versions.rebuilt()
    parent.unlink()
    with pytest.raises(FileNotFoundError):
        versions.rebuilt()
    assert not (versions.root / "made").exists()


def frame(data: bytes) -> bytes:
    return zstandard.compress(data, 1)


GOOD: dict[str, Any] = {
    "start": 0,
    "stop": 8,
    "encoding": "sparse",
    "word_bytes": 2,
    "gap_bytes": 1,
    "num_changed": 1,
}
STREAMS = (frame(b"\2"), frame(b"\1"), frame(b"\0"))
# A frame of one byte that says it is of 2^60, which nobody has room for.
HUGE = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + b"\x09\0\0\0"


def sealed(header: dict[str, Any], payload: bytes) -> bytes:
    text = seal_bytes(json.dumps(header).encode())
    return payload + text + len(text).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("run", "streams"),
    [
        ({"start": -2}, STREAMS),
        ({"start": 8, "stop": 8}, STREAMS),
        ({"stop": 10}, STREAMS),
        ({"stop": 7}, STREAMS),
        ({"encoding": "other"}, STREAMS),
        ({"encoding": ""}, ()),
        ({"word_bytes": 3}, (*STREAMS, frame(b"\0"))),
        ({"word_bytes": 0}, STREAMS[:1]),
        ({"gap_bytes": 3}, (*STREAMS, *STREAMS[:2])),
        ({"gap_bytes": 0}, STREAMS[1:]),
        ({"num_changed": 0}, STREAMS),
        ({"num_changed": 5}, STREAMS),
        ({"num_changed": 2}, STREAMS),
        ({"num_changed": "many"}, STREAMS),
        ({}, STREAMS[:2]),
        ({}, (frame(b"\4"), *STREAMS[1:])),
        ({}, (frame(b"\xff"), *STREAMS[1:])),
        ({}, (frame(b"\1\2"), *STREAMS[1:])),
        ({}, (frame(b""), *STREAMS[1:])),
        ({}, (frame(bytes(2**20)), *STREAMS[1:])),
        ({}, (STREAMS[0], frame(bytes(2**20)), STREAMS[2])),
        ({}, (STREAMS[0], STREAMS[1] + STREAMS[1], STREAMS[2])),
        ({}, (HUGE, *STREAMS[1:])),
        ({}, (STREAMS[0], HUGE, STREAMS[2])),
        ({}, (STREAMS[0], b"", STREAMS[2])),
        ({}, (STREAMS[0], b"no frame", STREAMS[2])),
        ({"encoding": "dense"}, (b"seven b",)),
        ({"encoding": "dense"}, (b"ABCDEFGH", b"")),
        ({"encoding": "dense"}, (frame(bytes(9)),)),
        ({"encoding": "dense"}, (HUGE,)),
    ],
)
def test_a_sealed_header_that_lies_is_refused(
    versions: Versions, run: dict[str, Any], streams: tuple[bytes, ...]
) -> None:
    """Each is `GOOD`, which makes its file, but for one thing."""
    old, new = bytes(8), b"\0\0\0\0\xff\xff\0\0"
    (versions.root / "before" / NAME).write_bytes(old)

    def write(run: dict[str, Any], streams: tuple[bytes, ...], **changes: Any) -> None:
        sizes = [len(stream) for stream in streams]
        file = {"name": NAME, "size_bytes": 8, "digest": digest_bytes(new)}
        file |= {"parent_digest": digest_bytes(old), "runs": [{**run, "streams": sizes}]}
        header = {"format": 1, "parent_version": 7, "files": [file], **changes}
        versions.path.write_bytes(sealed(header, b"".join(streams)))

    write(GOOD, STREAMS)
    assert versions.rebuilt() == {NAME: new}
    write({**GOOD, **run}, streams)
    with pytest.raises(IntegrityError):
        versions.rebuilt()
    for changes in ({"format": 2}, {"files": None}, {"files": [[]]}, {"files": [{}]}):
        write(GOOD, STREAMS, **changes)
        with pytest.raises(IntegrityError):
            versions.rebuilt()
