"""The real service as killable processes: `ratoon serve` with a Ray of its own.

Only processes of the object's own service are killed. Ports and data persist between starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
import yaml

from ratoon.sole_service import free_port

START_S = 900.0
# Time for `ratoon serve` to notice that its Ray is gone; it waits a minute for the head.
END_S = 600.0
_POLL_S = 0.1
# Prefix or part of the titles of a role's processes.
TITLES = {
    "worker": "ray::WorkerActor",
    "rank": "ray::RankActor",
    "engine": "ray::EngineActor",
    "sampler": "ray::SamplerActor",
    "replica": "ray::ServeReplica:ratoon",
    "proxy": "ray::ProxyActor",
    "gateway": "ray::Gateway",
    "raylet": "/raylet/raylet",
    "head": "/gcs/gcs_server",
}


class Service:
    """A context manager, after which none of its processes run.

    `environment`: variables of its processes, besides this one's.
    """

    def __init__(
        self, root: Path, *, environment: Mapping[str, str] | None = None, **settings: object
    ) -> None:
        self.root = root
        self._environment = environment or {}
        self.num_kills = 0
        self.http_port, self.grpc_port, self.serve_port = free_port(), free_port(), free_port()
        self._config = root / "config.yaml"
        self._log = root / "service.log"
        self._process: subprocess.Popen[bytes] | None = None
        config: dict[str, object] = {
            "data_root": str(self.data_root),
            "models_root": str(root / "models"),
            "crash_points": True,
            "log_level": "WARNING",
            "http": {"port": self.http_port},
            "grpc": {"port": self.grpc_port},
            "serve": {"http_port": self.serve_port},
            "worker": {"device": "cpu", "num_threads": 1},
            "ray": {"object_store_bytes": 80 * 2**20, "temp_folder": str(root / "ray")},
        }
        self._config.write_text(yaml.safe_dump(config | settings))

    @property
    def data_root(self) -> Path:
        return self.root / "data"

    @property
    def grpc(self) -> str:
        return f"grpc://127.0.0.1:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def serve(self) -> str:
        """URL of HTTP through Serve, which comes up seconds after the gateway's."""
        return f"http://127.0.0.1:{self.serve_port}"

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> None:
        """Wait until it is healthy. Raises `RuntimeError` with the end of its log."""
        command = [sys.executable, "-c", "from ratoon.cli import main; main()"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "serve", "--config", str(self._config)],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RAY_USAGE_STATS_ENABLED": "0",
                    **self._environment,
                },
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.http}/v1/health", trust_env=False, timeout=60)
                if answer.status_code == httpx.codes.OK:
                    return
            time.sleep(_POLL_S)
        raise RuntimeError(self._log.read_text()[-4000:])

    def processes(self) -> list[psutil.Process]:
        """All processes of the service: those of its session, which Ray's do not leave."""
        assert self._process is not None
        found: list[psutil.Process] = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self._process.pid:
                    found.append(psutil.Process(pid))
        return found

    def pids(self, role: str) -> list[int]:
        found: list[int] = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if TITLES[role] in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def kill(self, role: str) -> None:
        """SIGKILL to the role's process, the first if there are several."""
        deadline = time.monotonic() + START_S
        while not (pids := self.pids(role)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {role} runs")
            time.sleep(_POLL_S)
        os.kill(pids[0], signal.SIGKILL)
        self.num_kills += 1

    def kill_all(self) -> None:
        """SIGKILL to every process of the service at once."""
        self._end()
        self.num_kills += 1

    def restart_once_it_ends(self) -> None:
        """Restart like a supervisor. Raises `RuntimeError` if it keeps running or exits with 0."""
        assert self._process is not None
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the service goes on: {self._log.read_text()[-4000:]}") from None
        if status == 0:
            raise RuntimeError("the service ended with status 0")
        self._end()
        self.start()

    def terminate(self, timeout_s: float) -> int:
        """SIGTERM to `ratoon serve`; its exit status. Raises `subprocess.TimeoutExpired`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout_s)

    def pause(self, seconds: float) -> None:
        """Suspend every process for that long."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(seconds)
        for process in reversed(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def arm(self, point: str, count: int) -> None:
        """Make the process that reaches the point for the `count`-th time from now kill itself."""
        folder = self.data_root / "crash-points"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / point).write_text(str(count))

    def wait_for_crash(self, point: str, timeout_s: float) -> bool:
        """Whether a process has killed itself at the point."""
        path, deadline = self.data_root / "crash-points" / point, time.monotonic() + timeout_s
        while path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not path.exists()

    def _end(self) -> None:
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()  # None may start another one meanwhile.
        for process in {*processes, *self.processes()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait()
        psutil.wait_procs(processes, timeout=10)
