"""The SDK of the Tinker API against the real service, with URL and key alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.running_service import Service
from tests.tiny_models import write_folder

pytestmark = [pytest.mark.e2e, pytest.mark.more]
SCRIPT = Path(__file__).with_name("tinker_script.py")
SAMPLING = Path(__file__).with_name("tinker_sampling_script.py")
# The SDK and what it needs beside the service's own libraries.
SDK = (
    "tinker==0.38.0",
    *("distro", "h2", "hpack", "hyperframe", "orjson", "pyqwest", "sniffio"),
)


@pytest.fixture(scope="session")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SDK, which is no dependency of any part of the project."""
    folder = tmp_path_factory.mktemp("tinker-sdk")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, *SDK], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no index has {SDK[0]}: {done.stderr[-200:]}")
    return folder


def run_script(script: Path, url: object, sdk: Path, base_model: str = "tiny") -> dict[str, Any]:
    """What a script prints last."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(sdk),
        "TINKER_BASE_URL": str(url),
        "TINKER_API_KEY": "tml-none-is-asked-for",
        "TINKER_TELEMETRY": "0",
    }
    done = subprocess.run(
        [sys.executable, str(script), base_model],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_script_of_the_sdk_runs(service: Service, sdk: Path) -> None:
    """Both wires into one service: the gateway's port and, for the same script, Serve's."""
    addresses = service.addresses
    for url in (addresses.http, addresses.serve_http):
        told = run_script(SCRIPT, url, sdk)["told"]
        assert "write loss_fn=ppo" in told[0]
        assert "data[0].loss_fn_inputs.target_tokens[7]" in told[4]


def test_a_script_learns_from_what_it_samples(service: Service, sdk: Path) -> None:
    models_root = service.config.models_root
    assert models_root is not None
    write_folder(models_root / "tinker" / "qwen3", "qwen3")
    told = run_script(SAMPLING, service.addresses.http, sdk, "tinker/qwen3")
    rewards = told["rewards"]
    assert len(rewards) >= 20
    # A step's mean over 192 tokens has a deviation of 0.035; a model that learns gets to 0.65.
    assert rewards[0] < 0.4, rewards
    assert sum(rewards[-4:]) / 4 > 0.5, rewards
    assert told["last"] > 0.4, told
    assert told["cancelled"] > 100, told
