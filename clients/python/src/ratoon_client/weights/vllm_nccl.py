"""Versions into a vLLM server by its `nccl` weight transfer: from a GPU beside the engine's.

A version is on that GPU before the pause, and broadcast in it. NCCL has no deadlines: the process
that broadcasts is a child, killed where one passes. A worker that waits in a broadcast of a killed
child waits on, and samples nothing until its server is restarted.
"""

from __future__ import annotations

import json
import socket
import subprocess  # nosec B404 - of this package's own module
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx

from ratoon_client.errors import EngineError
from ratoon_client.weights.vllm import VllmAdapter
from ratoon_proto.types import WeightManifest

CHUNK_BYTES = 256 * 2**20


class VllmNcclAdapter(VllmAdapter):
    """As `VllmAdapter`; needs torch and safetensors, and the engine's NCCL.

    `device` has room for a version and is none of the engine's. Its workers reach this host at
    `address` (None: what this host has on the way to `url`), and have room for `chunk_bytes` and
    the largest tensor. `load_s` bounds each of staging, joining and the load.
    """

    def __init__(
        self,
        url: str,
        *,
        device: str = "cuda:0",
        address: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        api_key: str | None = None,
        drain_s: float = 300.0,
        load_s: float = 300.0,
        call_s: float = 30.0,
    ) -> None:
        super().__init__(url, api_key=api_key, drain_s=drain_s, load_s=load_s, call_s=call_s)
        self._device = device
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._child: _Child | None = None
        # The tag of the engine that is in the child's group.
        self._joined: str | None = None
        self._num_workers = 0
        self._was_paused = False
        self._update_info: dict[str, Any] = {}

    def close(self) -> None:
        self._end_child()
        super().close()

    def _stage(self, folder: Path, manifest: WeightManifest) -> None:
        self._num_workers = int(self._get("/get_world_size").fields["world_size"])
        self._was_paused = self._is_paused()
        if self._was_paused and self._num_workers > 1:
            raise EngineError(f"{self._url} was paused before: {_RESTART}")
        started_at = self._started_at()
        if started_at is None or started_at != self._joined:
            self._end_child()
        with self._in_child() as child:
            self._update_info = child.ask("stage", str(folder), self._chunk_bytes)
            if self._joined is None:
                self._join(child)
                self._joined = started_at

    def _join(self, child: _Child) -> None:
        """The engine samples nothing until it has; its weights are as they were, if it fails."""
        address = self._address or _own_address(self._url)
        num_ranks = 1 + self._num_workers
        port = child.ask("listen", address, num_ranks)
        child.tell("join")
        info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": num_ranks,
        }
        body = {"init_info": info}
        self._post("/init_weight_transfer_engine", body, timeout_s=self._load_s)
        child.answer()

    def _load_staged(self, folder: Path) -> None:
        with self._in_child() as child:
            if self._was_paused:
                self._end_update()
            self._post("/start_weight_update")
            child.tell("push")
            body = {"update_info": self._update_info}
            self._post("/update_weights", body, timeout_s=self._load_s)
            child.answer()
            self._post("/finish_weight_update", timeout_s=self._load_s)
        self._insist("/reset_prefix_cache")

    def _load_again(self, old: str | None, error: EngineError) -> None:
        if self._num_workers > 1:
            # After an error of one, vLLM takes the others' answers for those of its next calls.
            raise EngineError(f"{error}; the engine is left paused: {_RESTART}")
        try:
            self._end_update()
        except EngineError as again:
            raise EngineError(f"{error}; {again}; the engine is left paused: {_RESTART}") from error
        super()._load_again(old, error)

    def _end_update(self) -> None:
        """End an update that was broken off.

        vLLM keeps its tensors, which the next load would count as its own, and be over early.
        """
        with suppress(EngineError):
            self._post("/start_weight_update")  # Refused where it is open still.
        self._post("/finish_weight_update")

    @contextmanager
    def _in_child(self) -> Generator[_Child]:
        """After a failure another child makes another group."""
        if self._child is None:
            self._child = _Child(self._device, self._load_s)
        try:
            yield self._child
        except BaseException:
            self._end_child()
            raise

    def _end_child(self) -> None:
        self._joined = None
        if self._child is not None:
            self._child.kill()
            self._child = None


_RESTART = "restart it"


class _Child:
    """`nccl_push` in a process of its own, asked one thing at a time."""

    def __init__(self, device: str, call_s: float) -> None:
        self._call_s = call_s
        self._link, theirs = Pipe()
        module = "ratoon_client.weights.nccl_push"
        with theirs:
            # A Ctrl-C is the receiver's; standard output, where NCCL writes its log, too.
            self._process = subprocess.Popen(  # nosec B603
                [sys.executable, "-m", module, str(theirs.fileno()), device],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.answer()

    def tell(self, name: str, *arguments: Any) -> None:
        try:
            self._link.send_bytes(json.dumps((name, arguments)).encode())
        except OSError as err:
            raise EngineError(f"the process that pushes has ended: {err!r}") from err

    def answer(self) -> Any:
        """The answer to the call told last. Raises EngineError where none comes in time."""
        if not self._link.poll(self._call_s):
            raise EngineError(f"the process that pushes gave no answer in {self._call_s} s")
        try:
            answer, error = json.loads(self._link.recv_bytes())
        except (EOFError, OSError) as err:
            raise EngineError(f"the process that pushes has ended: {err!r}") from err
        if error is not None:
            raise EngineError(f"the process that pushes: {error}")
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._link.close()


def _own_address(url: str) -> str:
    """What this host has on the way to the engine."""
    parts = httpx.URL(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.host, port), timeout=5.0) as connection:
            return str(connection.getsockname()[0])
    except OSError as err:
        raise EngineError(f"{url}: {err!r}") from err
