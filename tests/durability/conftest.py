"""One recorded life of a service, for all who take its files apart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durability.cuts import Recording, ram_folder, record_life
from tests.durability.recorder import build_shim
from tests.engine.conftest import small_collections  # noqa: F401 - a fixture
from tests.tiny_models import write_folder


@pytest.fixture(scope="session")
def ram() -> Iterator[Path]:
    """A folder that is gone after the session."""
    made = ram_folder()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def shim(ram: Path) -> Path:
    """The library that records."""
    return build_shim(ram)


@pytest.fixture(scope="session")
def base(ram: Path) -> Path:
    """A very small model."""
    return write_folder(ram / "base", "qwen3")


@pytest.fixture(scope="session")
def recording(ram: Path, shim: Path, base: Path) -> Recording:
    """Recording of a policy that recovers by replaying its journal."""
    return record_life(ram, shim, base)
