"""`ratoon doctor`: what it prints."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratoon import cli as command_line
from ratoon import doctor
from ratoon.cluster.placement import Node, Seen, links_of, look_at_nodes
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig
from ratoon.doctor import Check, Status, judge_backends, judge_nodes, next_step, run_checks
from ratoon_kernels.registry import BackendStatus
from tests.conftest import RayCluster

_SEEN = Seen(versions={"torch": "2.13.0", "ratoon": "0.1.0"}, folder=7, interface="eth0", links="")
_NODE = Node(address="10.0.0.1", gpu="H100", num_gpus=8, num_free_gpus=6, seen=_SEEN)
_BACKENDS = ("cuda", "flex", "reference")
_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\tPIX\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t48-95\t1\t\tN/A
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_brackets_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tree_attention [cuda]` was shown as `tree_attention`, as all backends of the op."""
    checks = (
        Check(name="tree_attention [cuda]", status=Status.OK, detail="available"),
        Check(name="tls", status=Status.WARN, detail="of [red]x"),
    )
    monkeypatch.setenv("RATOON_DATA_ROOT", str(tmp_path))
    monkeypatch.setattr(doctor, "run_checks", lambda _: checks)
    done = CliRunner().invoke(command_line.cli, ["doctor"])
    assert done.exit_code == 0
    words = [line.split() for line in done.stdout.splitlines()]
    assert words[:2] == [
        ["ok", "tree_attention", "[cuda]", "available"],
        ["warn", "tls", "of", "[red]x"],
    ]
    assert words[-1][:3] == ["next:", "`ratoon", "demo`;"]


def _backends(*available: str) -> list[BackendStatus]:
    reasons = {each: "" if each in available else f"no {each}" for each in _BACKENDS}
    return [
        BackendStatus(op="op", name=name, is_available=not reason, reason=reason)
        for name, reason in reasons.items()
    ]


@pytest.mark.parametrize(
    ("has_gpu", "available", "status", "detail"),
    [
        (False, ("reference",), Status.OK, "reference"),
        (True, ("reference",), Status.WARN, "reference; not cuda: no cuda; not flex: no flex"),
        (True, ("cuda", "reference"), Status.OK, "cuda, reference; not flex: no flex"),
    ],
)
def test_kernels_that_do_not_apply_are_no_warning(
    has_gpu: bool, available: tuple[str, ...], status: Status, detail: str
) -> None:
    """On a CPU every kernel for GPUs was a warning: six of twenty lines."""
    (check,) = judge_backends(_backends(*available), has_gpu=has_gpu)
    assert (check.name, check.status, check.detail) == ("op", status, detail)


def test_settings_and_models_are_named_and_secrets_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATOON_DATABASE_URL", "postgresql://me:secret@host/name")
    for name in ("one", "org/two", "three"):
        (tmp_path / name).mkdir(parents=True)
        if name != "three":
            (tmp_path / name / "config.json").touch()
    config = RatoonConfig(data_root=tmp_path / "data", models_root=tmp_path)
    checks = {check.name: check for check in run_checks(config)}
    assert checks["settings"].detail == "set: data_root, database_url, models_root"
    assert checks["models root"].detail == f"{tmp_path}: one, org/two"
    assert not any("secret" in check.detail for check in checks.values())


def test_what_to_type_next_follows_from_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running service's ports were failures: that they cannot be bound."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        http = HttpConfig(port=held.getsockname()[1])
        config = RatoonConfig(data_root=tmp_path, http=http, grpc=GrpcConfig(port=0))
        for answer, status, words in (
            (None, Status.OK, "`ratoonctl runs`"),
            ("refused", Status.FAIL, "mend what fails (port http)"),
        ):
            monkeypatch.setattr(doctor, "own_health", lambda _, answer=answer: answer)
            checks = [check for check in run_checks(config) if check.name == "port http"]
            assert [check.status for check in checks] == [status]
            assert next_step(checks).startswith(words)
    assert next_step(()).startswith("`ratoon demo`")


def test_links_are_told_pair_by_pair_unless_all_are_alike() -> None:
    assert links_of(_TOPOLOGY) == "NV18: 0-1 2-3; SYS: 0-2 0-3 1-2 1-3"
    assert links_of(_TOPOLOGY.replace("SYS", "NV18")) == "every pair by NV18"
    assert links_of("") == ""


def test_a_node_with_other_versions_or_another_data_root_is_no_place_for_ranks() -> None:
    other = replace(_SEEN, versions={**_SEEN.versions, "torch": "2.12.1"}, interface="ib0")
    seen = (_SEEN, other, replace(_SEEN, folder=8), replace(_SEEN, folder=None))
    nodes = [replace(_NODE, address=f"10.0.0.{n}", seen=each) for n, each in enumerate(seen, 1)]
    found = "8 H100, 6 free; ranks copy through "
    assert [
        (check.name, check.status, check.detail) for check in judge_nodes(nodes, Path("/d"))
    ] == [
        ("node 10.0.0.1", Status.OK, f"{found}eth0"),
        ("node 10.0.0.2", Status.FAIL, f"torch 2.12.1, the head has 2.13.0; {found}ib0"),
        ("node 10.0.0.3", Status.FAIL, f"/d is another folder than the head's; {found}eth0"),
        ("node 10.0.0.4", Status.FAIL, f"/d is not there; {found}eth0"),
    ]


def test_nodes_that_share_nothing_yet_are_warned_of() -> None:
    *_, last = judge_nodes([replace(_NODE, seen=replace(_SEEN, folder=None))], Path("/d"))
    assert (last.name, last.status) == ("data root", Status.WARN)


def test_a_node_is_looked_at_from_a_process_of_its_own(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    assert ray_cluster.address
    (node,) = look_at_nodes(tmp_path)
    assert (node.num_gpus, node.seen.folder) == (0, tmp_path.stat().st_ino)
    (check,) = judge_nodes([node], tmp_path)
    assert check.status is Status.OK, check.detail
