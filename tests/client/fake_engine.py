"""Inference engines over real HTTP, as far as a receiver knows them: vLLM's routes and SGLang's.

Enters a folder's path, leaves the bytes that the engine would sample with. A load that fails has
applied half of the file, as a real one may.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.client.http_server import Answer, Request, serving

FILE = "model.safetensors"
ROOT = "/models/start"
START = b"what the engine was started with"
# When engines of this process are started, in seconds; no two at once.
_STARTS = itertools.count(1_700_000_000)


class HangError(Exception):
    """The call is never answered."""


class FakeEngine:
    """`faults` holds, by path, what the next calls of it end in: a status, or an exception."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, list[int | Exception]] = {}
        # Told of each call before it has an effect.
        self.on_call: Callable[[str], None] = lambda _: None
        # All bytes that tokens were sampled with.
        self.sampled: set[bytes] = set()
        self.released = threading.Event()
        self.has_metrics = True
        self.start()

    def start(self) -> None:
        """Anew: with the model of its command line, and none of what was loaded."""
        with self.lock:
            self.started_at = float(next(_STARTS))
            self.weights = START
            self.weight_version = "default"
            self.is_paused = False
            self.has_leftovers = False
            self.cached_with = START
            self.loras: dict[str, str] = {}

    def sample(self) -> bytes | None:
        """The weights that answer now; None while paused. Old keys and values are no weights."""
        with self.lock:
            if self.is_paused:
                return None
            assert self.cached_with == self.weights, "the prefix cache is of other weights"
            self.sampled.add(self.weights)
            return self.weights

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.on_call(path)
        with self.lock:
            self.calls.append((path, body))
            fault = self.faults[path].pop(0) if self.faults.get(path) else None
            if isinstance(fault, Exception):
                raise fault
            return self._apply(path, body, fault)

    def _apply(self, path: str, body: Any, status: int | None) -> tuple[int, Any]:
        match path:
            case "/metrics":
                text = f"# TYPE x gauge\nprocess_start_time_seconds {self.started_at}\n"
                return (200, text) if self.has_metrics else (404, {"detail": "Not Found"})
            case "/v1/models":
                loras = [{"id": name, "root": at, "parent": "m"} for name, at in self.loras.items()]
                return 200, {"data": [{"id": "m", "root": ROOT, "parent": None}, *loras]}
            case "/collective_rpc":
                assert self.is_paused
                assert body["method"] == "reload_weights"
                # vLLM keeps what a load that failed has counted, and the next one is over early.
                is_whole = status is None and not self.has_leftovers
                self._load(body["kwargs"]["weights_path"], is_whole=is_whole)
                self.has_leftovers = status is not None
            case "/update_weights_from_disk":
                self._load(body["model_path"], is_whole=status is None)
                self.cached_with = self.weights
                if status is None:
                    self.weight_version = body["weight_version"]
                return status or 200, {"success": status is None, "message": "as it went"}
            case "/is_paused":
                return 200, {"is_paused": self.is_paused}
            case "/get_model_info":
                return 200, {"weight_version": self.weight_version}
            case _ if status is not None:
                pass
            case "/pause?mode=wait":
                self.is_paused = True
            case "/resume":
                self.is_paused = False
                self.sample()
            case "/reset_prefix_cache":
                self.cached_with = self.weights
            case "/v1/load_lora_adapter":
                assert body["lora_name"] not in self.loras
                self.loras[body["lora_name"]] = body["lora_path"]
            case "/v1/unload_lora_adapter":
                del self.loras[body["lora_name"]]
            case _:
                return 404, {"detail": "Not Found"}
        return status or 200, {"error": "as told"} if status else {}

    def _load(self, path: str, *, is_whole: bool) -> None:
        new = START if path == ROOT else (Path(path) / FILE).read_bytes()
        middle = len(new) // 2
        self.weights = new if is_whole else new[:middle] + self.weights[middle:]


@contextmanager
def serving_engine(engine: FakeEngine, port: int = 0) -> Iterator[str]:
    """Gives `http://127.0.0.1:port`."""

    def answer(request: Request) -> Answer | None:
        body = json.loads(request.body) if request.body else None
        try:
            status, said = engine.answer(request.path, body)
        except HangError:
            engine.released.wait(30)
            return None
        except ConnectionError:
            return None
        return Answer(
            status=status, body=(said if isinstance(said, str) else json.dumps(said)).encode()
        )

    with serving(answer, port=port, keeps_alive=False) as url:
        try:
            yield url
        finally:
            engine.released.set()
