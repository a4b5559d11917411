"""What importing the wires brings along."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ratoon_kernels", "ratoon_client")


@pytest.mark.parametrize("module", ["ratoon.app", "ratoon.api.grpc.wiring"])
def test_the_wires_import_no_torch(module: str) -> None:
    """In a process of its own: this one may have imported anything."""
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
