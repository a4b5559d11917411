"""Deltas that a copy of the weights finds on its way to the host: those that files give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ratoon.model import compared_copy, delta_runs, safetensors_files
from ratoon.model.delta_runs import DeltaPart
from ratoon.model.export import WeightsCopy, export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.stream import deltas
from ratoon.stream.deltas import join_delta, write_delta
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import FullTuning, LoraTuning, WeightFile, WeightKind
from tests.model.builders import FULL, LORA, load, randomize
from tests.tiny_models import ARCHITECTURES, write_folder

BF16, FP32 = ModelDtype.BFLOAT16, ModelDtype.FLOAT32


def _change(model: PolicyModel, share: float, seed: int) -> None:
    """Change about this share of each parameter's values, by a step of their dtype or a draw."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.named_trainable().values():
        flat = parameter.detach().view(-1)
        is_changed = torch.rand(len(flat), generator=generator) < share
        words = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
        step = torch.randint(-1, 2, words.shape, generator=generator)
        words[is_changed] += step[is_changed].to(words.dtype)
        flat[is_changed & (step == 0)] *= 1.5


class Published:
    """Versions that a policy's ranks write to folders, and the deltas between them."""

    def __init__(self, root: Path, copies: Sequence[WeightsCopy]) -> None:
        self.root, self.copies = root, copies
        self.manifests: list[WeightManifest] = []

    def folder(self, version: int) -> Path:
        return self.root / str(version)

    def take(self) -> WeightManifest:
        """Take and write the next version."""
        for copy in self.copies:
            copy.take()
        folder = self.folder(len(self.manifests))
        folder.mkdir()
        digests = {n: d for copy in self.copies for n, d in copy.write(folder).items()}
        manifest = WeightManifest(
            policy_id="p",
            version=len(self.manifests),
            kind=WeightKind.FULL,
            files=tuple(
                WeightFile(name=n, size_bytes=(folder / n).stat().st_size, digest=digests[n])
                for n in sorted(digests)
            ),
            created_at=0.0,
        )
        self.manifests.append(manifest)
        return manifest

    def parts(self, parent: WeightManifest) -> list[tuple[DeltaPart, dict[str, str]] | None]:
        digests = {file.name: file.digest for file in parent.files}
        return [
            copy.write_delta(self.root / f"part-{rank}", digests)
            for rank, copy in enumerate(self.copies)
        ]

    def check(self) -> tuple[bytes, float | None]:
        """The copies' delta of the last two versions, once it is known to be that of the files, and
        the share that has changed."""
        parent, newest = self.manifests[-2:]
        made = [each for each in self.parts(parent) if each is not None]
        assert len(made) == len(self.copies)
        digests = {name: digest for _, own in made for name, digest in own.items()}
        changed = {file.name: file.digest for file in newest.files if file not in parent.files}
        assert changed.items() <= digests.items()
        assert digests.items() <= {(file.name, file.digest) for file in newest.files}
        found, path = [part for part, _ in made], self.root / "delta"
        before, after = (self.folder(each.version) for each in (parent, newest))
        share = join_delta(path, before, parent, newest.files, found)
        expected = self.root / "of-files"
        assert share == write_delta(expected, before, parent, after, newest.files)
        assert path.exists() == expected.exists()
        assert not list(self.root.glob("part-*"))
        data = path.read_bytes() if path.exists() else b""
        assert data == (expected.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
        expected.unlink(missing_ok=True)
        return data, share


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, chunks and runs; every delta is kept."""
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", 20_000)
    monkeypatch.setattr(delta_runs, "RUN_BYTES", 4096)
    monkeypatch.setattr(compared_copy, "CHUNK_RUNS", 3)
    monkeypatch.setattr(deltas, "_MAX_SHARE", 1e9)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("architecture", "tuning", "dtype"),
    [
        *((architecture, FULL, BF16) for architecture in ARCHITECTURES),
        ("qwen3", FULL, FP32),
        ("qwen3", LORA, BF16),
        ("qwen3_moe", LORA, BF16),
    ],
)
def test_a_delta_of_copies_is_that_of_files(
    tmp_path: Path,
    architecture: str,
    tuning: FullTuning | LoraTuning,
    dtype: ModelDtype,
    num_ranks: int,
) -> None:
    """And the files are those that a copy without comparison writes. Shares are those of most
    steps, of none, of few words, and of nearly all."""
    model = load(write_folder(tmp_path / "base", architecture), tuning=tuning, dtype=dtype)
    randomize(model, 1)
    copies = [WeightsCopy(model, rank, num_ranks, compares=True) for rank in range(num_ranks)]
    published = Published(tmp_path, copies)
    published.take()
    for seed, share in enumerate((0.03, 0.0, 0.0005, 0.9)):
        _change(model, share, seed)
        newest = published.take()
        whole = tmp_path / f"whole-{seed}"
        whole.mkdir()
        expected = export_weights(model, whole)
        assert {file.name: file.digest for file in newest.files} == expected
        data, changed = published.check()
        assert changed is not None
        assert 0.8 * share - 1e-3 <= changed <= share + 0.01
        assert bool(data) == (changed > 0.0)


def _pair(tmp_path: Path, **options: bool) -> tuple[PolicyModel, Published]:
    """A model of which one version is published."""
    model = load(write_folder(tmp_path / "base", "qwen3"), dtype=BF16)
    published = Published(tmp_path, [WeightsCopy(model, **{"compares": True, **options})])
    published.take()
    return model, published


def test_the_first_version_and_one_that_was_not_asked_for_have_no_delta(tmp_path: Path) -> None:
    _, published = _pair(tmp_path)
    assert published.parts(published.manifests[0]) == [None]
    (tmp_path / "other").mkdir()
    _, published = _pair(tmp_path / "other", compares=False)
    assert published.parts(published.take()) == [None]


@pytest.mark.usefixtures("small")
def test_only_what_was_compared_with_is_a_parent(tmp_path: Path) -> None:
    """A version that was held and never written is none, as nobody knows its digests."""
    model, published = _pair(tmp_path)
    (copy,) = published.copies
    first = published.manifests[0]
    _change(model, 0.1, 1)
    second = published.take()
    assert published.parts(second) == [None]
    assert not list(tmp_path.glob("part-*"))
    published.check()
    _change(model, 0.1, 2)
    copy.take()
    assert published.parts(first) == [None]
    _change(model, 0.1, 3)
    copy.take()
    assert published.parts(second) == [None]
    published.take()
    _change(model, 0.1, 4)
    published.take()
    published.check()


def test_a_chunk_that_has_changed_too_much_is_left_to_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are whole all the same, and the next version is compared again."""
    monkeypatch.setattr(compared_copy, "_most_changed", lambda num_words: num_words // 8)
    monkeypatch.setattr(deltas, "_MAX_SHARE", 1e9)
    model, published = _pair(tmp_path)
    for number, share in enumerate((0.5, 0.05)):
        parent = published.manifests[-1]
        _change(model, share, number)
        newest = published.take()
        (tmp_path / f"whole-{number}").mkdir()
        expected = export_weights(model, tmp_path / f"whole-{number}")
        assert {file.name: file.digest for file in newest.files} == expected
        if share > 0.1:
            assert published.parts(parent) == [None]
            assert not list(tmp_path.glob("part-*"))
    published.check()


def test_a_device_without_memory_for_it_copies_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("on purpose")

    model, published = _pair(tmp_path)
    _change(model, 0.01, 1)
    with monkeypatch.context() as patch:
        patch.setattr(compared_copy, "find_changes", fail)
        newest = published.take()
    assert published.parts(published.manifests[0]) == [None]
    (tmp_path / "whole").mkdir()
    expected = export_weights(model, tmp_path / "whole")
    assert {file.name: file.digest for file in newest.files} == expected


def test_a_copy_that_fails_is_an_error_to_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    model, published = _pair(tmp_path)
    _change(model, 0.01, 1)
    (copy,) = published.copies
    monkeypatch.setattr(compared_copy, "find_changes", fail)
    copy.take()
    copy.settle()
    with pytest.raises(RuntimeError, match="on purpose"):
        published.parts(published.manifests[0])
    assert not list(tmp_path.glob("part-*"))
    (tmp_path / "1").mkdir()
    with pytest.raises(RuntimeError, match="on purpose"):
        copy.write(tmp_path / "1")
