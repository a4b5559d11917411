"""Engine and worker as processes that are killed and restarted, and their callers.

Beside them may be an edge and a receiver. All restart whenever they end, as Ray does with its
actors; a worker only when the engine asks for a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from ratoon.engine.commands import Submission
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from tests.faults.venues.processes import (
    Settings,
    run_edge,
    run_engine,
    run_receiver,
    run_worker,
)
from tests.faults.venues.rpc import Peer, PeerLostError, Server

ROLES: dict[str, Callable[[Settings], None]] = {
    "worker": run_worker,
    "engine": run_engine,
}
# On the way to an inference engine, where there is one.
RECEIVING: dict[str, Callable[[Settings], None]] = {
    "edge": run_edge,
    "receiver": run_receiver,
}
PATIENCE_S = 600.0
_POLL_S = 0.005
_RETRY_S = 0.02


def fork_context() -> ForkServerContext:
    """Processes that have torch and the engine from their first moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.venues.processes"])
    return context


class Pair:
    """Use it as a context manager: everything is killed at its end."""

    def __init__(self, settings: Settings, patience_s: float = PATIENCE_S) -> None:
        self.settings = settings
        self.patience_s = patience_s
        # By role.
        self.kills: Counter[str] = Counter()
        self.failures: list[str] = []
        self._counted: set[int | None] = set()
        self.held: list[tuple[str, tuple[Any, ...]]] = []
        self._targets = ROLES | (RECEIVING if settings.inference_url else {})
        self._context = fork_context()
        self._lock = threading.RLock()
        self._processes: dict[str, ForkServerProcess] = {}
        self._is_up = False
        self._supervisor = Server(settings.socket("supervisor"), self._answer)

    def __enter__(self) -> Pair:
        self.settings.crash_points.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._supervisor.run, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._supervisor.close()

    def start(self) -> None:
        """Until both can be asked."""
        with self._lock:
            for role in self._targets:
                self._spawn(role)
            self._is_up = True
        for role in ROLES:
            self._wait_for(role)

    def stop(self) -> None:
        """Kill all, and start none again."""
        with self._lock:
            self._is_up = False
            for process in self._processes.values():
                process.kill()
                process.join()

    @property
    def num_kills(self) -> int:
        return self.kills.total()

    def kill(self, role: str) -> None:
        with self._lock:
            process = self._processes[role]
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def arm(self, point: str, count: int) -> None:
        """The process that reaches the point for the `count`-th time from now is killed."""
        path = self.settings.crash_points / point
        temporary = path.with_suffix(".new")
        temporary.write_text(str(count))
        temporary.replace(path)

    def disarm(self, point: str) -> None:
        (self.settings.crash_points / point).unlink(missing_ok=True)

    def is_armed(self, point: str) -> bool:
        return (self.settings.crash_points / point).exists()

    def submit(self, submission: Submission) -> Operation:
        """With the retries of a client. Raises what is no matter of time."""
        return self._insist("submit", submission)

    def cancel(self, operation_id: str) -> Operation:
        return self._insist("cancel_operation", operation_id)

    def end(self, operation_id: str) -> Operation:
        """The operation once it has ended."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            operation = self._insist("get_operation", operation_id, 1.0)
            if operation.state.is_final:
                return operation
            time.sleep(_POLL_S)
        raise TimeoutError(f"{operation_id} does not end")

    def put_away(self) -> None:
        """Put the policy away, unless its window is open."""
        with suppress(RatoonError):
            self._insist("release")

    def worker(self) -> Peer:
        return Peer(self.settings.socket("worker"))

    def _insist(self, name: str, *args: object) -> Operation:
        peer, deadline = (
            Peer(self.settings.socket("engine")),
            time.monotonic() + self.patience_s,
        )
        while True:
            try:
                return peer.call(name, *args)
            except PeerLostError:
                if time.monotonic() > deadline:
                    raise
            except RatoonError as error:
                may_pass = error.retryable or error.code is ErrorCode.POLICY_NOT_READY
                if not may_pass or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _spawn(self, role: str) -> None:
        process = self._context.Process(
            target=self._targets[role], args=(self.settings,), daemon=True
        )
        process.start()
        self._processes[role] = process

    def _watch(self) -> None:
        while True:
            with self._lock:
                for role, process in self._processes.items():
                    if not self._is_up or process.is_alive():
                        continue
                    self._count(role, process)
                    if role != "worker":
                        self._spawn(role)
            time.sleep(_POLL_S)

    def _count(self, role: str, process: ForkServerProcess) -> None:
        """Killed by `kill`, or by itself at a crash point."""
        if process.exitcode != -signal.SIGKILL:
            self.failures.append(f"the {role} ended with {process.exitcode}")
        elif process.pid not in self._counted:
            self._counted.add(process.pid)
            self.kills[role] += 1

    def _answer(self, name: str, args: tuple[Any, ...]) -> object:
        with self._lock:
            if name == "hold":
                method, call = args
                (self.settings.root / f"held-{method}").unlink()
                self.held.append((method, call))
                return None
            assert name == "replace_worker"
            process = self._processes["worker"]
            if process.is_alive():
                process.kill()
            else:
                self._count("worker", process)
            process.join()
            self._spawn("worker")
        self._wait_for("worker")
        return None

    def _wait_for(self, role: str) -> None:
        """Until it listens; the first processes load torch before.

        A worker that was killed before it did is not waited for: the engine asks for another.
        """
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(PeerLostError):
                Peer(self.settings.socket(role)).connect()
                return
            with self._lock:
                if role == "worker" and not self._processes[role].is_alive():
                    return
            time.sleep(_POLL_S)
        raise TimeoutError(f"the {role} does not start")
