"""A Prometheus that a test runs by a configuration of deploy/, and what it answers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FIRST_SCRAPE_S = 240.0


@contextmanager
def running_prometheus(name: str, target: str, folder: Path) -> Iterator[str]:
    """Its URL. It has the job and the alerts of deploy/`name`, at the service's own address.

    `folder`: where it finds the files that the job names, and keeps its data.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        # `.ci/run` installs it, so there its absence is a failure.
        assert not os.environ.get("CI"), "prometheus is not installed"
        pytest.skip("prometheus is not installed: scripts/install-test-services.sh")
    config = yaml.safe_load((DEPLOY / name).read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / rules) for rules in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    config_file = folder / "prometheus.yml"
    config_file.write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={config_file}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=240)


def query(url: str, expression: str) -> list[tuple[dict[str, str], float]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False)
    answer.raise_for_status()
    return [(row["metric"], float(row["value"][1])) for row in answer.json()["data"]["result"]]


def wait_for(url: str, expression: str, value: float) -> None:
    deadline = time.monotonic() + FIRST_SCRAPE_S
    seen: object = None
    while time.monotonic() < deadline:
        try:
            seen = query(url, expression)
        except httpx.HTTPError as err:
            seen = err
        else:
            if any(found == value for _, found in seen):
                return
        time.sleep(0.5)
    pytest.fail(f"{expression} was never {value}: {seen}")
