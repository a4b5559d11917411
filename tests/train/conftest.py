"""Fixtures of the trainer's tests: one small model folder."""

from __future__ import annotations

import pytest

from ratoon.model.spec import FolderBase
from tests.tiny_models import write_folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> FolderBase:
    return FolderBase(folder=str(write_folder(tmp_path_factory.mktemp("base"), "qwen3")))
