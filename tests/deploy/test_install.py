"""The install script that the image is built with, and the service that it installs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratoon.sole_service import free_port

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "deploy" / "install.sh"


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


def _torch_index(folder: Path) -> str:
    """One of this machine's own CPU build of torch; "" where it has another, or names an index."""
    if torch.version.cuda is not None or "TORCH_INDEX" in os.environ:
        return os.environ.get("TORCH_INDEX", "")
    packages = folder / "torch"
    version = torch.__version__.partition("+")[0]
    got = _run(
        sys.executable, "-m", "pip", "download", "--no-deps", "-d", packages, f"torch=={version}"
    )
    assert got.returncode == 0, got.stderr[-4000:]
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in packages.iterdir())
    (packages / "index.html").write_text(links)
    return folder.as_uri()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("install")
    venv = folder / "venv"
    done = _run(INSTALL, venv, "cpu", TORCH_INDEX=_torch_index(folder / "index"))
    assert done.returncode == 0, done.stderr[-4000:]
    return venv


def test_install_refuses_an_unknown_device(tmp_path: Path) -> None:
    done = _run(INSTALL, tmp_path / "venv", "tpu")
    assert done.returncode == 2
    assert "expected cpu or cuda" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.e2e
@pytest.mark.more
@pytest.mark.timeout(900)
def test_install_gives_pinned_versions_outside_the_checkout(installed: Path) -> None:
    code = "import ratoon, ratoon_kernels, torch; print(ratoon.__file__); print(torch.__version__)"
    done = _run(installed / "bin" / "python", "-c", code)
    assert done.returncode == 0, done.stderr
    where, torch_version = done.stdout.split()
    assert Path(where).is_relative_to(installed)
    pins = (ROOT / "constraints.txt").read_text()
    assert f"torch=={torch_version.split('+')[0]}\n" in pins


@pytest.mark.e2e
@pytest.mark.more
@pytest.mark.timeout(900)
def test_install_compiles_kernels_ahead_for_cuda_alone(installed: Path) -> None:
    code = "from ratoon_kernels.jit import cache; print(cache.PREBUILT_FOLDER.exists())"
    assert _run(installed / "bin" / "python", "-c", code).stdout == "False\n"
    ahead = r'if \[ "\$device" = cuda \]; then\n\s+\S+/python" -m ratoon_kernels.jit.prebuild\nfi'
    assert re.search(ahead, INSTALL.read_text())


@pytest.fixture
def served(installed: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    http, gateway = free_port(), free_port()
    # The image's own settings, moved off the container's addresses and folders.
    environment = {
        "RATOON_DATA_ROOT": str(tmp_path / "data"),
        "RATOON_MODELS_ROOT": str(tmp_path / "models"),
        "RATOON_HTTP__HOST": "127.0.0.1",
        "RATOON_HTTP__PORT": str(http),
        "RATOON_GRPC__HOST": "127.0.0.1",
        "RATOON_GRPC__PORT": str(gateway),
    }
    process = subprocess.Popen(
        [installed / "bin" / "ratoon", "serve", "--config", ROOT / "deploy" / "ratoon.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    yield process, http
    if process.poll() is None:
        process.kill()
        process.wait()


@pytest.mark.e2e
@pytest.mark.more
@pytest.mark.timeout(900)
def test_installed_service_answers_and_stops_on_sigterm(
    installed: Path, served: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = served
    url = f"http://127.0.0.1:{port}"
    # However long that takes: the service says that it is ready, or it ends.
    while _run(installed / "bin" / "ratoonctl", "--url", url, "health").returncode != 0:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.5)
    with urllib.request.urlopen(f"{url}/v1/info", timeout=300) as answer:
        assert json.load(answer)["api_version"] == "v1"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
