"""What an upgrade of Ray must keep: each private name, with the signature and effect relied on."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, worker
from ray._private.authentication import authentication_token_setup
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]

import ratoon
from ratoon.cluster import ray_private
from tests.conftest import RayCluster


def test_one_module_names_what_ray_does_not_promise() -> None:
    package = Path(ratoon.__file__).parent
    naming = [
        path.name
        for path in package.rglob("*.py")
        if re.search(r"\bray\._|\bray import _", path.read_text(encoding="utf-8"))
    ]
    assert naming == ["ray_private.py"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (RayParams.__init__, {
            "node_ip_address", "num_cpus", "object_store_memory", "temp_dir", "include_dashboard",
            "include_log_monitor", "no_monitor", "setup_worker_path", "_system_config",
        }),
        (Node.__init__, {"head", "shutdown_at_exit", "spawn_reaper", "ray_init_cluster"}),
        (Node.kill_all_processes, {"check_alive", "allow_graceful"}),
        (Node.dead_processes, set[str]()),
        (Node.get_session_dir_path, set[str]()),
        (Node.get_gcs_client, set[str]()),
        (authentication_token_setup.ensure_token_if_auth_enabled, {"create_token_if_missing"}),
        (authentication_token_setup.enable_token_auth_by_default, set[str]()),
    ],
)  # fmt: skip
def test_rays_own_functions_take_what_they_are_given(function: object, names: set[str]) -> None:
    assert callable(function)
    assert names <= inspect.signature(function).parameters.keys()


def test_the_overridden_methods_are_rays() -> None:
    """Under another name Ray would not call them, and start a dashboard again."""
    own = {name for name in vars(ray_private._Head) if not name.startswith("_")}
    assert own == {"start_api_server", "start_raylet"}
    source = inspect.getsource(Node)
    for name in own:
        assert f"self.{name}(" in source
    assert "self._webui_url" in source


def test_a_ray_on_loopback_has_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # As before a start: tests beside this one may have connected the process to a Ray.
    monkeypatch.setattr(worker, "_global_node", None)
    with ray_private.on_loopback():
        assert ray.util.get_node_ip_address() == "127.0.0.1"
        assert not ray_constants.ENABLE_RAY_CLUSTER
    assert ray_constants.ENABLE_RAY_CLUSTER


def test_the_essential_processes_have_their_names() -> None:
    assert ray_private._ESSENTIAL == ("raylet", "gcs_server")
    assert ray_private.SESSION_LATEST == "session_latest"


def test_a_forgotten_token_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = AuthenticationTokenLoader.instance()
    file = tmp_path / "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    try:
        for token in ("a" * 64, "b" * 64):
            file.write_text(token)
            ray_private.forget_token()
            assert loader.has_token(ignore_auth_mode=True)
            assert loader.get_raw_token(ignore_auth_mode=True) == token
    finally:
        monkeypatch.undo()
        ray_private.forget_token()


def test_rays_token_notices_come_from_the_logger_that_is_hidden() -> None:
    own = logging.getLogger(authentication_token_setup.__name__)
    before = logging.getLogger("ray._private.authentication")
    level = before.level
    try:
        ray_private.hide_token_notices()
        assert own.getEffectiveLevel() == logging.ERROR
        assert authentication_token_setup.logger is own
    finally:
        before.setLevel(level)


def test_free_resources_are_those_of_each_node(ray_cluster: RayCluster) -> None:
    assert ray_cluster.address
    (node,) = ray.nodes()
    free = ray_private.free_resources_by_node()
    assert free.keys() == {node["NodeID"]}
    assert free[node["NodeID"]]["CPU"] <= node["Resources"]["CPU"]
    assert ray_private.HEAD_RESOURCE in node["Resources"]
