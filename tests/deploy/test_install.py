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
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ratoon.sole_service import free_port
from scripts import release

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Where the four distributions are, and their programs; `environment`: what finds them."""

    packages: Path
    programs: Path
    python: Path
    environment: dict[str, str]


def _install_whole(folder: Path) -> Installed:
    """With all that they need, as an image has it."""
    venv = folder / "venv"
    done = _run(INSTALL, venv, "cpu", TORCH_INDEX=_torch_index(folder / "index"))
    assert done.returncode == 0, done.stderr[-4000:]
    programs = venv / "bin"
    return Installed(packages=venv, programs=programs, python=programs / "python", environment={})


def _install_wheels(folder: Path) -> Installed:
    """The wheels of a release, over the libraries of this environment."""
    dist, packages = folder / "dist", folder / "packages"
    release.build(dist, "")
    release.check(dist, "")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    done = _run(*pip, "--no-deps", "--target", packages, *dist.glob("*.whl"))
    assert done.returncode == 0, done.stderr[-4000:]
    return Installed(
        packages=packages,
        programs=packages / "bin",
        python=Path(sys.executable),
        environment={"PYTHONPATH": str(packages)},
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(_install_wheels, id="wheels", marks=pytest.mark.more),
        pytest.param(_install_whole, id="whole", marks=pytest.mark.slow),
    ],
)
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    return request.param(tmp_path_factory.mktemp("install"))


def test_install_refuses_an_unknown_device(tmp_path: Path) -> None:
    done = _run(INSTALL, tmp_path / "venv", "tpu")
    assert done.returncode == 2
    assert "expected cpu or cuda" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_install_gives_pinned_versions_outside_the_checkout(installed: Installed) -> None:
    names = ("ratoon", "ratoon_kernels", "ratoon_client", "ratoon_proto")
    code = f"import torch, {', '.join(names)}; print(torch.__version__)\n"
    code += "".join(f"print({name}.__file__)\n" for name in names)
    done = _run(installed.python, "-c", code, **installed.environment)
    assert done.returncode == 0, done.stderr
    torch_version, *places = done.stdout.split()
    for part, place in zip(("service", "kernels", "clients/python", "proto"), places, strict=True):
        package = Path(place).parent
        assert package.is_relative_to(installed.packages)
        source = ROOT / part / "src" / package.name
        assert _files(source) - _files(package) == set(), "left out of the distribution"
    pins = (ROOT / "constraints.txt").read_text()
    assert f"torch=={torch_version.split('+')[0]}\n" in pins


def _files(package: Path) -> set[str]:
    """All but the pages on the code, and what is made at run time."""
    paths = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    left_out = {"__pycache__", "cubins", "README.md"}
    return {str(path) for path in paths if not left_out & {*path.parts}}


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_install_compiles_kernels_ahead_for_cuda_alone(installed: Installed) -> None:
    code = "from ratoon_kernels.jit import cache; print(cache.PREBUILT_FOLDER.exists())"
    assert _run(installed.python, "-c", code, **installed.environment).stdout == "False\n"
    ahead = r'if \[ "\$device" = cuda \]; then\n\s+\S+/python" -m ratoon_kernels.jit.prebuild\nfi'
    assert re.search(ahead, INSTALL.read_text())


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_installed_service_answers_and_stops_on_sigterm(
    installed: Installed, tmp_path: Path
) -> None:
    http, gateway = free_port(), free_port()
    # The image's own settings, moved off the container's addresses and folders.
    environment = {
        "RATOON_DATA_ROOT": str(tmp_path / "data"),
        "RATOON_MODELS_ROOT": str(tmp_path / "models"),
        "RATOON_HTTP__HOST": "127.0.0.1",
        "RATOON_HTTP__PORT": str(http),
        "RATOON_GRPC__HOST": "127.0.0.1",
        "RATOON_GRPC__PORT": str(gateway),
        **installed.environment,
    }
    url = f"http://127.0.0.1:{http}"
    with subprocess.Popen(
        [installed.programs / "ratoon", "serve", "--config", ROOT / "deploy" / "ratoon.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    ) as process:
        try:
            # However long that takes: the service says that it is ready, or it ends.
            asked = (installed.programs / "ratoonctl", "--url", url, "health")
            while _run(*asked, **installed.environment).returncode != 0:
                assert process.poll() is None, process.stdout.read() if process.stdout else ""
                time.sleep(0.5)
            with urllib.request.urlopen(f"{url}/v1/info", timeout=300) as answer:
                assert json.load(answer)["api_version"] == "v1"
            with urllib.request.urlopen(f"{url}/", timeout=300) as answer:
                assert b'<script type="module" src="' in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_wheels_alone_learn_within_three_minutes(tmp_path: Path) -> None:
    """An empty environment and a folder of wheels, no clone; packages of others as pip has them."""
    dist, venv = tmp_path / "dist", tmp_path / "venv"
    release.build(dist, "", ("--wheel",))
    index = _torch_index(tmp_path / "index")
    begun = time.monotonic()
    assert _run(sys.executable, "-m", "venv", venv).returncode == 0
    pip = (venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    extra = ("--extra-index-url", index) if index else ()
    done = _run(*pip, "--find-links", dist, *extra, "ratoon")
    assert done.returncode == 0, done.stderr[-4000:]
    installed_s = time.monotonic() - begun
    done = _run(venv / "bin" / "ratoon", "demo")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    seconds = time.monotonic() - begun
    print(f"installed in {installed_s:.0f} s, learned after {seconds:.0f} s")
    assert seconds < 180
