"""The manifests of deploy/kubernetes, as far as they can be read without a cluster."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ratoon.config import RatoonConfig

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
NODES = {"matchLabels": {"ray.io/is-ray-node": "yes"}}


def _read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_others_reach_ratoons_ports_alone() -> None:
    """A rule without senders lets everybody in, one without ports lets them in everywhere."""
    policy = _read("networkpolicy.yaml")["spec"]
    assert policy["podSelector"] == NODES
    assert policy["policyTypes"] == ["Ingress"]
    nodes, operator, callers = policy["ingress"]
    assert nodes == {"from": [{"podSelector": NODES}]}
    for rule in (operator, callers):
        assert all(sender.get("podSelector", {}).get("matchLabels") for sender in rule["from"])
    config = RatoonConfig()
    ours = [config.http.port, config.grpc.port]
    assert [port["port"] for port in callers["ports"]] == ours
    assert [port["port"] for port in operator["ports"]] == [8265]


def test_the_token_is_for_the_ray_that_is_installed() -> None:
    spec = _read("ray-token.yaml")["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == version("ray")
