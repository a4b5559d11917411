"""Torch left as it was found: benchmarks make trainers, which configure the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch_settings import kept_torch_settings


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    with kept_torch_settings():
        yield
