"""A real Prometheus scrapes the real service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ratoon_client import Loss, Optim, RatoonClient, group, rollout
from tests.e2e.own_prometheus import query, running_prometheus, wait_for
from tests.running_service import Service


@pytest.fixture
def prometheus(service: Service, tmp_path: Path) -> Iterator[str]:
    """Its URL."""
    target = urlsplit(service.addresses.http).netloc
    with running_prometheus("prometheus.yml", target, tmp_path) as url:
        yield url


@pytest.mark.e2e
@pytest.mark.more
def test_prometheus_sees_an_update(
    service: Service, prometheus: str, tiny_policy: Callable[[str], str]
) -> None:
    policy_id = tiny_policy("scraped")
    label = f'{{policy_id="{policy_id}"}}'
    wait_for(prometheus, "up", 1)
    with RatoonClient(service.addresses.grpc) as client:
        rollouts = [
            rollout(response=[1, 2, 3, token], sampler_logprobs=[-5.0] * 4, reward=float(token))
            for token in (4, 5)
        ]
        step = client.policy(policy_id).update(
            [group("g", [7, 8, 9], rollouts)], loss=Loss("grpo"), optim=Optim(learning_rate=1e-3)
        )
        report = step.result().report
    wait_for(prometheus, f"ratoon_policy_version{label}", 1)
    ((_, reduction),) = query(prometheus, f"ratoon_token_reduction_ratio{label}")
    assert reduction == pytest.approx(14 / 8) == report.token_reduction
    ((_, loss),) = query(prometheus, f"ratoon_loss{label}")
    assert loss == pytest.approx(report.loss)
    ((_, grad_norm),) = query(prometheus, f"ratoon_grad_norm{label}")
    assert grad_norm == pytest.approx(report.grad_norm)
    ((backend, one),) = query(prometheus, f'ratoon_backend_info{label[:-1]},op="tree_attention"}}')
    assert (backend["backend"], one) == ("reference", 1.0)
    done = query(prometheus, 'ratoon_operations_total{kind="update",state="done"}')
    assert sum(value for _, value in done) >= 1
    ((_, seq),) = query(prometheus, f"ratoon_report_seq{label}")
    assert seq == 1
    rules = httpx.get(f"{prometheus}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    alerts = [rule for each in rules for rule in each["rules"]]
    assert len(alerts) > 10
    assert {rule["health"] for rule in alerts} <= {"ok", "unknown"}
