"""Compiled kernels are kept between processes, within bounds."""

from __future__ import annotations

import os
import subprocess  # nosec B404 - of this Python
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ratoon.engine.worker.kernels import CompileCache
from ratoon.train.numerics import compiler_kind
from ratoon_proto.types import Shard

TORCH_2 = {"torch": "2.0", "device": "cpu"}
TORCH_3 = {"torch": "3.0", "device": "cpu"}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _filled(cache: CompileCache, size_bytes: int, used_at: float) -> Path:
    (cache.folder / "kernel").write_bytes(bytes(size_bytes))
    os.utime(cache.folder / ".lock", (used_at, used_at))
    return cache.folder


def test_each_kind_has_a_folder_that_compilers_are_told_of(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, TORCH_2)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache.folder / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.folder / "triton")
    assert CompileCache(tmp_path, TORCH_2).folder == cache.folder
    assert CompileCache(tmp_path, TORCH_3).folder != cache.folder


def test_policies_of_any_layout_share_a_folder(tmp_path: Path) -> None:
    """Versions and the device's model name it, and nothing of a policy."""
    kind = compiler_kind(torch.device("cpu"))
    assert kind.keys() == {"device_model", "torch", "transformers", "ratoon", "kernels"}
    assert all(kind.values())
    assert CompileCache.of_device(tmp_path, "cpu").folder == CompileCache(tmp_path, kind).folder


def test_who_has_named_a_place_keeps_his(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "theirs")
    CompileCache(tmp_path, TORCH_2)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "theirs"


def test_what_was_used_longest_ago_goes_where_there_is_too_much(tmp_path: Path) -> None:
    caches = [CompileCache(tmp_path, {"torch": str(index)}) for index in range(3)]
    folders = [_filled(cache, 1000, index + 1.0) for index, cache in enumerate(caches)]
    for cache in caches:
        cache.close()
    CompileCache(tmp_path, TORCH_2, max_bytes=2500)
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_what_a_process_uses_is_never_removed(tmp_path: Path) -> None:
    used = CompileCache(tmp_path, TORCH_3)
    folder = _filled(used, 1000, 1.0)
    CompileCache(tmp_path, TORCH_2, max_bytes=100)
    assert folder.exists()
    used.close()
    CompileCache(tmp_path, TORCH_2, max_bytes=100)
    assert not folder.exists()


def test_torchs_compiler_goes_there(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, TORCH_2)
    assert cache_dir() == str(cache.folder / "inductor")


class _Trainer:
    """What a cache asks of a trainer; it compiles nothing."""

    def __init__(self, run_tokens: dict[int, int], *, num_workers: int = 1, name: str = "") -> None:
        self.run_tokens, self.ahead = run_tokens, list[list[int]]()
        self.is_compiling = False
        self.spec = SimpleNamespace(
            num_workers=num_workers, host_key="", micro_batch_tokens=None, shard=Shard.STATES
        )
        self.model = SimpleNamespace(max_tokens=lambda: 20_000)
        self.graphs = lambda: {"config": name}
        self.compile_ahead = self.ahead.append


def test_later_processes_compile_ahead_what_earlier_ones_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last first; of other graphs, the usual number. What compiles nothing is not noted."""

    def ahead(name: str = "", num_workers: int = 1) -> list[list[int]]:
        trainer: Any = _Trainer({}, name=name, num_workers=num_workers)
        CompileCache(tmp_path, TORCH_2).compile_ahead(trainer)
        return trainer.ahead

    def note(
        cache: CompileCache, run: dict[int, int], num_graphs: int, *, is_compiling: bool = False
    ) -> None:
        monkeypatch.setitem(counters["stats"], "unique_graphs", num_graphs)
        trainer = _Trainer(run)
        trainer.is_compiling = is_compiling
        cache.note(cast("Any", trainer))

    assert ahead() == [[20_000]]
    cache = CompileCache(tmp_path, TORCH_2)
    note(cache, {4093: 900, 65_521: 30_000}, 2)
    assert ahead() == [[30_000, 900]]
    note(cache, {4093: 1000}, 2)
    assert ahead() == [[30_000, 900]]
    note(cache, {4093: 1000}, 3, is_compiling=True)
    assert ahead() == [[30_000, 900]]
    note(cache, {4093: 1000}, 3)
    assert ahead() == [[1000, 30_000]]
    assert ahead("another") == [[20_000]]
    assert ahead("another", num_workers=2) == []
    (file,) = (cache.folder / "tokens").iterdir()
    file.write_bytes(b"damaged")
    assert ahead() == [[20_000]]


def test_a_compiler_that_was_started_is_imported_by_no_compilation() -> None:
    """In a process of its own, as this one may have compiled."""
    code = """if True:
        import sys
        import torch
        from ratoon.engine.worker.kernels import start_compiler

        start_compiler().join()
        before = {*sys.modules}
        torch._dynamo.lookup_backend("inductor")
        import torch._inductor.async_compile
        import torch._inductor.compile_fx

        assert not [name for name in {*sys.modules} - before if "_inductor." in name]
    """
    subprocess.run([sys.executable, "-c", code], check=True)
