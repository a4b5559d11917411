"""A service in a process of its own, started by the command `ratoon serve`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ratoon.sole_service import free_port

RATOON = Path(sys.executable).with_name("ratoon")
START_S = 600.0
_HEEDS_SIGINT = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])"""
_NOT_INHERITED = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class OwnService:
    """Its folder, its ports by name (http, grpc and serve) and its environment.

    `settings`: environment variables without the prefix `RATOON_`.
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self.log = folder, folder / "log"
        self.ports = {name: free_port() for name in ("http", "grpc", "serve")}
        own = {
            "DATA_ROOT": folder / "data",
            "MODELS_ROOT": folder / "models",
            "HTTP__PORT": self.ports["http"],
            "GRPC__PORT": self.ports["grpc"],
            "SERVE__HTTP_PORT": self.ports["serve"],
            "WORKER__DEVICE": "cpu",
            "WORKER__NUM_THREADS": 1,
            "RAY__OBJECT_STORE_BYTES": 100 * 2**20,
            **settings,
        }
        inherited = {name: text for name, text in os.environ.items() if name not in _NOT_INHERITED}
        named = {f"RATOON_{name}": str(value) for name, value in own.items()}
        self.environment = {
            **inherited,
            "HOME": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            **named,
        }
        self.started: list[str] = []

    def command(self, *arguments: str) -> str:
        """What `ratoon` with these arguments prints."""
        done = subprocess.run(
            [RATOON, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()

    def interrupted_start(self, line: str) -> tuple[int, str]:
        """Status and output of a start that got a Ctrl-C when it had printed `line`."""
        with self.log.open("w") as log:
            process = subprocess.Popen(
                # A shell's background job would ignore SIGINT.
                [sys.executable, "-c", _HEEDS_SIGINT, RATOON, "serve"],
                env=self.environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        deadline = time.monotonic() + START_S
        while line not in self.log.read_text():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        return process.wait(START_S), self.log.read_text()

    @contextmanager
    def running(self) -> Iterator[None]:
        """All its ports are open; `started` has the lines that the start printed."""
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [RATOON, "serve"], env=self.environment, stdout=log, stderr=log, cwd=self.folder
            )
        self._process = psutil.Process(process.pid)
        try:
            deadline = time.monotonic() + START_S
            # The last line of a start.
            while "ready  " not in self.log.read_text():
                assert process.poll() is None, self.log.read_text()[-4000:]
                assert time.monotonic() < deadline, self.log.read_text()[-4000:]
                time.sleep(0.2)
            self.started = self.log.read_text().splitlines()
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0, self.log.read_text()[-4000:]

    def processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def stop(self) -> None:
        """As a supervisor stops it; `running` checks its status."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(START_S)
