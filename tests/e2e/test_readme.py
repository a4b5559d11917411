"""The client example of README.md, run as it stands against the real service."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running_service import Service

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.e2e
def test_readme_example_runs(service: Service, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example.count("grpc://127.0.0.1:8443") == 1
    code = example.replace("grpc://127.0.0.1:8443", f"grpc://{service.addresses.grpc}")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"version 1, loss [+-]\d\.\d{4}\n", done.stdout)
    assert (tmp_path / "weights" / "version-1" / "config.json").is_file()
