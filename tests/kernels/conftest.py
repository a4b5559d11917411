"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest

from ratoon_kernels.tree_attention import blocks, reference


@pytest.fixture(params=["flash", "math"])
def block_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to do a block: the CPU's operator, and the plain products of other devices."""
    if request.param == "math":
        monkeypatch.setattr(reference, "_block_kernel", lambda _device: blocks)
        monkeypatch.setattr(blocks, "SCORE_BYTES", 3000)  # a few queries at a time
    return request.param
