"""What the garbage collector looks at no more, and what it finds all the same."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ratoon.garbage import UNUSED_LIBRARIES, collect_all, frozen_graphs, frozen_imports


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def test_what_is_compiled_is_looked_at_no_more() -> None:
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        return x + x

    before = gc.get_freeze_count()
    with frozen_graphs():
        double(torch.ones(2))
    frozen = gc.get_freeze_count()
    assert frozen > before
    with frozen_graphs():
        double(torch.ones(2))
        kept = _Cycle()
    assert gc.get_freeze_count() <= frozen
    assert any(one is kept for one in gc.get_objects())


def test_what_a_failed_pass_compiled_is_looked_at_no_more() -> None:
    """It was looked at until a later pass compiled something."""
    torch.compiler.reset()
    before = gc.get_freeze_count()

    def fail() -> None:
        with frozen_graphs():
            torch.compile(torch.sin, backend="eager")(torch.ones(2))
            raise RuntimeError("after the graph was made")

    with pytest.raises(RuntimeError, match="after"):
        fail()
    assert gc.get_freeze_count() > before


def test_what_was_frozen_is_collected_once_it_is_let_go_of() -> None:
    torch.compiler.reset()
    cycle = _Cycle()
    is_there = weakref.ref(cycle)
    with frozen_graphs():
        torch.compile(torch.abs, backend="eager")(torch.ones(2))
    del cycle
    gc.collect()
    assert is_there() is not None
    collect_all()
    assert is_there() is None


def test_libraries_that_nobody_needs_are_not_there_while_others_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = UNUSED_LIBRARIES[0]
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with frozen_imports():
        assert find_spec(name) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    assert importlib.import_module(name).__file__ == str(tmp_path / f"{name}.py")
    with frozen_imports():
        assert importlib.import_module(name)
