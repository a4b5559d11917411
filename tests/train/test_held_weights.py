"""Weights that are held for a publication: what changes them lets them be copied first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from ratoon.model.spec import FolderBase
from ratoon.train.trainer import Trainer
from tests.train.test_imported import export, take, trainer_of, update
from tests.train.trainer_runs import assert_equal, weights_of


def _step(trainer: Trainer, _folder: Path) -> None:
    update(trainer, 1)


def _import(trainer: Trainer, folder: Path) -> None:
    take(trainer, export(trainer, folder), adds=True)


def _load(trainer: Trainer, folder: Path) -> None:
    other = Trainer.create(trainer.spec)
    update(other, 2)
    other.snapshot().write(folder)
    trainer.load_checkpoint(folder)


@pytest.mark.parametrize("change", [_step, _import, _load])
def test_weights_stay_until_a_device_may_have_copied_them(
    base: FolderBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Trainer, Path], None],
) -> None:
    """A GPU copies beside what runs next, which waits for it before it changes weights."""
    trainer = trainer_of(base)
    update(trainer, 0)
    trainer.copy_weights()
    held, seen = weights_of(trainer), list[dict[str, Tensor]]()
    copy = trainer.ranks.own._weights_copy
    monkeypatch.setattr(copy, "settle", lambda: seen.append(weights_of(trainer)))
    change(trainer, tmp_path / "other")
    assert len(seen) == 1
    assert_equal(seen[0], held)
    with pytest.raises(AssertionError):
        assert_equal(weights_of(trainer), held)
