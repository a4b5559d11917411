"""`ratoonctl` against the real service: a run is made, seen, and sent to TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.ctl import Ctl
from tests.client.test_exports import events_of
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.more]


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_run_is_seen_from_a_shell(
    service: Service, wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    addresses = service.addresses
    ctl = Ctl(addresses.http if wire == "http" else f"grpc://{addresses.grpc}", capsys, 60)
    name = f"seen-{wire}"
    ctl.json("policies", "create", name, "--preset", "tiny", "--keep-rollouts", "all")
    file = tmp_path / "groups.jsonl"
    rollouts = [
        {"response": [52, 53, 54], "sampler_logprobs": [-5.0, -0.1, -6.0], "reward": reward}
        for reward in (0.0, 1.0)
    ]
    file.write_text(json.dumps({"group_id": "sums", "prompt": [50, 43], "rollouts": rollouts}))
    reports = [
        ctl.json("update", name, str(file), "--lr", "1e-4")["step"]["report"] for _ in range(2)
    ]
    ctl.json("checkpoints", "save", name)

    (run,) = [each for each in ctl.json("runs") if each["policy_id"] == name]
    assert (run["version"], run["step"], run["figures"]["reward_mean"]) == (2, 2, 0.5)
    status, out, _ = ctl("log", name, "--jsonl")
    steps = [json.loads(line) for line in out.splitlines()]
    assert (status, [step["seq"] for step in steps]) == (0, [1, 2])
    for step, report in zip(steps, reports, strict=True):
        assert step["loss"] == report["loss"]
        assert step["grad_norm"] == report["grad_norm"]
        assert step["seconds.forward"] == report["seconds"]["forward"]
        assert step["warnings"] == [warning["kind"] for warning in report["warnings"]]
    assert ctl("log", name, "--tensorboard", str(tmp_path))[0] == 0
    (folder,) = tmp_path.glob(f"{name}-*")
    assert [step for step, _ in events_of(folder)] == [1, 2]

    listed = ctl.json("operations", "list", name, "--kind", "update")
    assert [each["seq"] for each in listed] == [2, 1]
    assert "grad_norm" in ctl("operations", "show", listed[0]["operation_id"])[1]
    assert [each["version"] for each in ctl.json("weights", "list", name)["versions"]] == [1, 2]
    kept = ctl.json("rollouts", name, "1")
    assert {each["rollout"] for each in kept} == {0, 1}
    whole = ctl.json("rollouts", name, "1", "0", "1")
    assert whole["tokens"] == [50, 43, 52, 53, 54]
    assert abs(whole["gaps"][1]) == pytest.approx(whole["gap_max"])

    assert ctl.json("policies", "release", name)["state"] == "released"
    (run,) = [each for each in ctl.json("runs") if each["policy_id"] == name]
    assert (run["state"], run["step"]) == ("released", 2)
    assert [each["version"] for each in ctl.json("weights", "list", name)["versions"]] == [1, 2]
    assert ctl.json("update", name, str(file), "--lr", "1e-4")["step"]["version"] == 3
    assert ctl.json("policies", "get", name)["state"] == "ready"
    ctl.json("policies", "delete", name)
