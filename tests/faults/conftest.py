"""A model of two small layers for fault runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import write_folder
from tests.torch_settings import kept_torch_settings


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    with kept_torch_settings():
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
