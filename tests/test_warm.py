"""`ratoon warm`: what it compiles is what a worker begins with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ratoon import warm
from ratoon.cli import cli
from ratoon.config import load_config
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.kernels import CompileCache
from ratoon.errors import ErrorCode, RatoonError
from ratoon.train.trainer import Trainer
from ratoon_proto.types import FullTuning
from tests.tiny_models import write_folder


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    monkeypatch.setenv("RATOON_DATA_ROOT", str(tmp_path / "data"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return EngineSettings.from_config(load_config(None))


def test_workers_compile_ahead_what_it_was_told(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where the layers run as they are."""
    folder = write_folder(tmp_path / "model", "qwen3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warm, "DEVICE", "cpu")
    trainers, ahead, create = list[Trainer](), list[list[int]](), Trainer.create.__func__

    def created(cls: type[Trainer], *args: object, **options: object) -> Trainer:
        trainers.append(create(cls, *args, **options))
        return trainers[-1]

    monkeypatch.setattr(Trainer, "create", classmethod(created))
    options = {"deterministic": True, "tokens": (300, 9000)}
    found = list(warm.warm(settings, folder, FullTuning(), **options))
    assert [tokens for tokens, _ in found] == [300, 9000]
    assert all(seconds > 0 for _, seconds in found)
    (trainer,) = trainers
    monkeypatch.setattr(trainer, "compile_ahead", ahead.append)
    CompileCache.of_device(settings.compiled, "cpu").compile_ahead(trainer)
    assert ahead == [[9000, 300]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(settings: EngineSettings, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    with pytest.raises(RatoonError, match="no GPU") as raised:
        list(warm.warm(settings, folder, FullTuning(), deterministic=True, tokens=(300,)))
    assert raised.value.code is ErrorCode.UNSUPPORTED
    result = CliRunner().invoke(cli, ["warm", str(folder)])
    assert result.exit_code == 2
    assert re.search("no GPU", result.output)
