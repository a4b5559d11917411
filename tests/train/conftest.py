"""Fixtures of the trainer's tests: one small model folder, and torch left as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratoon.model.spec import FolderBase
from tests.tiny_models import write_folder
from tests.torch_settings import kept_torch_settings


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    with kept_torch_settings():
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> FolderBase:
    return FolderBase(folder=str(write_folder(tmp_path_factory.mktemp("base"), "qwen3")))
