"""Everything that the service uses of Ray beyond what Ray promises to keep.

No other module names `ray._private`, `ray._common` or `ray._raylet`. An upgrade of Ray must keep
what `tests/engine/test_ray_private.py` checks; if it does not, this is the module to change.
"""

# Ray does not type what it keeps to itself.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.state import available_resources_per_node
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]

from ratoon.cluster import worker_start

# The resource that only the head has.
HEAD_RESOURCE = HEAD_NODE_RESOURCE_NAME
# The name of a link, beside the session folders, to the latest of them.
SESSION_LATEST = ray_constants.SESSION_LATEST
# Nothing recovers without these two, and Ray restarts neither on a single machine.
_ESSENTIAL = (
    ray_constants.PROCESS_TYPE_RAYLET,
    ray_constants.PROCESS_TYPE_GCS_SERVER,
)
# Without this every call is reported to a dashboard that does not run, and kept in the head's
# memory.
_NO_REPORTS = {"task_events_report_interval_ms": 0, "enable_metrics_collection": False}
# Ray's default is 15: beside other busy processes a worker would get a thirtieth of a core.
_AS_NICE_AS_THIS = {"worker_niceness": 0}
# A busy machine takes longer than the 30 s that Ray would wait.
_RAYLET_S = 180.0
_POLL_S = 0.02


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """The free resources of each live node, by node id."""
    return cast("dict[str, dict[str, float]]", available_resources_per_node())


def forget_token() -> None:
    """Make Ray read its token anew, as the environment names it."""
    AuthenticationTokenLoader.instance().reset_cache()


def hide_token_notices() -> None:
    """Keep Ray from logging at every start that it requires a token."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


@contextmanager
def on_loopback() -> Generator[None, None, None]:
    """A Ray started within the block has a loopback address, and its processes listen there."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class LocalRay:
    """A Ray of this machine alone, with no more processes than the service needs.

    `ray.init` would also start a dashboard and wait for it, an autoscaler monitor and a log
    monitor. The processes live from construction to `end`; they end with this process in any case.
    """

    def __init__(self, *, num_cpus: int, object_store_bytes: int, temp_folder: str) -> None:
        """Ray requires the token that the environment names, unless token auth is off there."""
        # Workers are forks of this process, whose imports take longer than Ray's start. On macOS
        # they are none.
        self._forks = worker_start.ForkServer() if sys.platform == "linux" else None
        try:
            self._node = self._start(num_cpus, object_store_bytes, temp_folder)
        except BaseException:
            self._end_forks()
            raise

    def _start(self, num_cpus: int, object_store_bytes: int, temp_folder: str) -> _Head:
        enable_token_auth_by_default()
        ensure_token_if_auth_enabled(_NO_REPORTS, create_token_if_missing=False)
        parameters = RayParams(
            node_ip_address=ray.util.get_node_ip_address(),
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            temp_dir=temp_folder,
            setup_worker_path=worker_start.__file__,
            include_dashboard=False,
            include_log_monitor=cast("Any", False),  # Ray declares it as text.
            no_monitor=True,
            _system_config=cast("Any", _NO_REPORTS | _AS_NICE_AS_THIS),  # Declared as texts.
        )
        return _Head(
            parameters,
            head=True,
            # True would install a SIGTERM handler.
            shutdown_at_exit=False,
            spawn_reaper=True,
            ray_init_cluster=True,
        )

    def open_forks(self) -> None:
        """Let workers be forks, once this process has connected to Ray."""
        if self._forks is not None:
            self._forks.listen(self.session_folder)

    @property
    def address(self) -> str:
        return str(self._node.gcs_address)

    @property
    def session_folder(self) -> Path:
        """Holds Ray's sockets and logs."""
        return Path(str(self._node.get_session_dir_path()))

    def ended_processes(self) -> list[str]:
        """Names of the essential processes that have ended."""
        ended = [str(name) for name, _ in self._node.dead_processes()]
        return [name for name in ended if name in _ESSENTIAL]

    def end(self, *, is_orderly: bool) -> None:
        """End Ray's processes, and with them all workers. `is_orderly`: ask them to stop first."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=is_orderly)
        self._end_forks()

    def _end_forks(self) -> None:
        if self._forks is not None:
            self._forks.end()


class _Head(Node):
    def start_api_server(self, **_: Any) -> None:
        """Start none: even without a dashboard Ray would start this process, and wait for it."""
        self._webui_url = ""

    def start_raylet(self, *args: Any, **options: Any) -> None:
        """Return once the head knows it: Ray asks next, and again only a second after a no."""
        super().start_raylet(*args, **options)
        head, deadline = cast("Any", self.get_gcs_client()), time.monotonic() + _RAYLET_S
        while not head.get_all_node_info() and time.monotonic() < deadline:
            if self.dead_processes():
                return
            time.sleep(_POLL_S)
