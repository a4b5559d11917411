"""Fixtures of the trainer's tests: one small model folder, and torch left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from ratoon.model.spec import FolderBase
from tests.tiny_models import write_folder


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    """`Trainer.create` configures the process; the next test file gets it back as it was."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = cast("Any", torch.utils.deterministic)
    fills = fill.fill_uninitialized_memory
    yield
    fill.fill_uninitialized_memory = fills
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> FolderBase:
    return FolderBase(folder=str(write_folder(tmp_path_factory.mktemp("base"), "qwen3")))
