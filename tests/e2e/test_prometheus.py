"""A real Prometheus scrapes the real service."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from ratoon_client import Loss, Optim, RatoonClient, group, rollout
from tests.running_service import Service

ROOT = Path(__file__).parents[2]
FIRST_SCRAPE_S = 240.0


@pytest.fixture
def prometheus(service: Service, tmp_path: Path) -> Iterator[str]:
    """Its URL; the job is the one of deploy/prometheus.yml, at this service's address."""
    binary = shutil.which("prometheus")
    if binary is None:
        # `.ci/run` installs it, so there its absence is a failure.
        assert not os.environ.get("CI"), "prometheus is not installed"
        pytest.skip("prometheus is not installed: scripts/install-test-services.sh")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [
        {"targets": [urlsplit(service.addresses.http).netloc]}
    ]
    config_file = tmp_path / "prometheus.yml"
    config_file.write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={config_file}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://{address}"
    process.terminate()
    process.wait(timeout=240)


def _query(url: str, expression: str) -> list[tuple[dict[str, str], float]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False)
    answer.raise_for_status()
    return [(row["metric"], float(row["value"][1])) for row in answer.json()["data"]["result"]]


def _wait_for(url: str, expression: str, value: float) -> None:
    deadline = time.monotonic() + FIRST_SCRAPE_S
    seen: object = None
    while time.monotonic() < deadline:
        try:
            seen = _query(url, expression)
        except httpx.TransportError as err:
            seen = err
        else:
            if any(found == value for _, found in seen):
                return
        time.sleep(0.5)
    pytest.fail(f"{expression} was never {value}: {seen}")


@pytest.mark.e2e
@pytest.mark.more
def test_prometheus_sees_an_update(
    service: Service, prometheus: str, tiny_policy: Callable[[str], str]
) -> None:
    policy_id = tiny_policy("scraped")
    label = f'{{policy_id="{policy_id}"}}'
    _wait_for(prometheus, "up", 1)
    with RatoonClient(service.addresses.grpc) as client:
        rollouts = [
            rollout(response=[1, 2, 3, token], sampler_logprobs=[-5.0] * 4, reward=float(token))
            for token in (4, 5)
        ]
        step = client.policy(policy_id).update(
            [group("g", [7, 8, 9], rollouts)], loss=Loss("grpo"), optim=Optim(learning_rate=1e-3)
        )
        report = step.result().report
    _wait_for(prometheus, f"ratoon_policy_version{label}", 1)
    ((_, reduction),) = _query(prometheus, f"ratoon_token_reduction_ratio{label}")
    assert reduction == pytest.approx(14 / 8) == report.token_reduction
    ((_, loss),) = _query(prometheus, f"ratoon_loss{label}")
    assert loss == pytest.approx(report.loss)
    ((_, grad_norm),) = _query(prometheus, f"ratoon_grad_norm{label}")
    assert grad_norm == pytest.approx(report.grad_norm)
    ((backend, one),) = _query(prometheus, f'ratoon_backend_info{label[:-1]},op="tree_attention"}}')
    assert (backend["backend"], one) == ("reference", 1.0)
    done = _query(prometheus, 'ratoon_operations_total{kind="update",state="done"}')
    assert sum(value for _, value in done) >= 1
