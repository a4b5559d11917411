"""Deltas that a copy of the weights finds on its way to the host: those that files give."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.model import changed_words, compared_copy, delta_runs, safetensors_files
from ratoon.model.export import WeightsCopy, export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.stream import deltas
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.builders import FULL, LORA, load, randomize
from tests.model.published import Published, change
from tests.tiny_models import ARCHITECTURES, write_folder

BF16, FP32 = ModelDtype.BFLOAT16, ModelDtype.FLOAT32


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
        change(model, share, seed)
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
    change(model, 0.1, 1)
    second = published.take()
    assert published.parts(second) == [None]
    assert not list(tmp_path.glob("part-*"))
    published.check()
    change(model, 0.1, 2)
    copy.take()
    assert published.parts(first) == [None]
    change(model, 0.1, 3)
    copy.take()
    assert published.parts(second) == [None]
    published.take()
    change(model, 0.1, 4)
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
        change(model, share, number)
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
    change(model, 0.01, 1)
    with monkeypatch.context() as patch:
        patch.setattr(compared_copy, "find_changes", fail)
        newest = published.take()
    assert published.parts(published.manifests[0]) == [None]
    (tmp_path / "whole").mkdir()
    expected = export_weights(model, tmp_path / "whole")
    assert {file.name: file.digest for file in newest.files} == expected


@pytest.mark.usefixtures("small")
def test_a_copy_that_fails_is_an_error_to_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    model, published = _pair(tmp_path)
    change(model, 0.01, 1)
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


class _Streams:
    """Streams of a device that is done with everything at once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_synced = 0
        self.load = self.compare = self.out = self

    def follow_launched(self) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None:
        self.num_synced += 1


@pytest.mark.usefixtures("small")
def test_weights_stay_until_a_thread_has_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's thread does in which order, without the GPU: `take` returns at once, `settle`
    when all is read, and the delta is that of the weights before they changed."""
    model, published = _pair(tmp_path)
    (copy,) = published.copies
    streams, go = _Streams(), threading.Event()
    monkeypatch.setattr(copy, "_streams", streams)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: streams)
    monkeypatch.setattr(compared_copy, "_on", lambda _: nullcontext())
    monkeypatch.setattr(compared_copy, "_mark", lambda _: None)
    monkeypatch.setattr(
        compared_copy.ComparedCopy, "_find", lambda _, *args: changed_words.find_changes(*args)
    )
    load = compared_copy.ComparedCopy._load

    def wait_and_load(*args: Any) -> Any:
        assert go.wait(20)
        return load(*args)

    monkeypatch.setattr(compared_copy.ComparedCopy, "_load", wait_and_load)
    for seed in range(3):
        go.clear()
        change(model, 0.05, seed)
        (tmp_path / f"whole-{seed}").mkdir()
        expected = export_weights(model, tmp_path / f"whole-{seed}")
        held = {name: p.detach().clone() for name, p in model.named_trainable().items()}
        copy.take()
        with ThreadPoolExecutor(1) as threads:
            settling = threads.submit(copy.settle)
            assert not settling.done()
            go.set()
            settling.result(20)
        randomize(model, seed)
        newest = published.write()
        assert {file.name: file.digest for file in newest.files} == expected
        published.check()
        for name, parameter in model.named_trainable().items():
            parameter.detach().copy_(held[name])
    copy.take()
    copy.take()
    assert published.parts(published.manifests[-1]) == [None]
    assert streams.num_synced >= 8
