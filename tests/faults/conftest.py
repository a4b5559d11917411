"""A model of two small layers for fault runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
