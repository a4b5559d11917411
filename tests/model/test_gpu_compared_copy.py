"""Deltas that a GPU finds: the kernels against their reference, and copies beside other work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ratoon.model import changed_words, compared_copy, delta_runs, safetensors_files
from ratoon.model.export import WeightsCopy, export_weights
from ratoon.stream import deltas
from tests.model.gpu_policies import make_policy
from tests.model.published import Published, change

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
RUN_BYTES = delta_runs.RUN_BYTES


def _pair(dtype: torch.dtype, num_words: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    before, drawn = (
        torch.randint(low, high, (num_words,), generator=generator, device=DEVICE, dtype=dtype)
        for _ in range(2)
    )
    is_changed = torch.rand(num_words, generator=generator, device=DEVICE) < share
    return before, torch.where(is_changed, drawn, before)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_words", "share"),
    [(1, 1.0), (17, 0.5), (2048, 1.0), (10**7 + 3, 0.03), (10**7, 3e-6), (10**7, 3e-3), (999, 0.0)],
)
def test_kernels_find_what_the_reference_finds(
    dtype: torch.dtype, num_words: int, share: float
) -> None:
    """To the bit, gaps of two bytes and of one, escapes of both, and runs of which nothing has
    changed."""
    from ratoon.model.changed_words_kernels import find_changes

    before, after = _pair(dtype, num_words, share, seed=num_words)
    run_words = RUN_BYTES // before.element_size()
    expected = changed_words.find_changes(before, after, run_words, num_words)
    found = find_changes(before, after, run_words, num_words)
    assert expected is not None
    assert found is not None
    assert (found.num_changed, found.num_digits) == (expected.num_changed, expected.num_digits)
    assert torch.equal(found.differences, expected.differences)
    assert torch.equal(found.digits, expected.digits)
    total = sum(found.num_changed)
    if total:
        assert find_changes(before, after, run_words, total - 1) is None


def test_a_delta_beside_what_runs_next_is_that_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change as soon as `settle` returns, which is before anything has arrived."""
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", 2 * 10**7)
    monkeypatch.setattr(compared_copy, "CHUNK_RUNS", 3)
    monkeypatch.setattr(deltas, "_MAX_SHARE", 1e9)
    model = make_policy(is_compiled=False, layers=4, hidden=1024)
    copy = WeightsCopy(model, compares=True)
    published = Published(tmp_path, [copy])
    published.take()
    for seed, share in enumerate((0.03, 0.0, 1e-5, 0.1)):
        change(model, share, seed)
        (tmp_path / f"whole-{seed}").mkdir()
        expected = export_weights(model, tmp_path / f"whole-{seed}")
        copy.take()
        copy.settle()
        held = {n: p.detach().clone() for n, p in model.named_trainable().items()}
        for parameter in model.named_trainable().values():
            parameter.detach().fill_(float("nan"))
        newest = published.write()
        assert {file.name: file.digest for file in newest.files} == expected
        published.check()
        for name, parameter in model.named_trainable().items():
            parameter.detach().copy_(held[name])


def test_copies_take_no_more_memory_of_the_device_than_they_say(tmp_path: Path) -> None:
    """Version after version: streams are made once, as each has memory of its own."""
    model = make_policy(is_compiled=False, layers=4, hidden=1024)
    copy = WeightsCopy(model, compares=True)
    published = Published(tmp_path, [copy])
    published.take()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for seed in range(4):
        change(model, 0.05, seed)
        published.take()
        published.check()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - reserved <= copy.device_bytes + 2**28
