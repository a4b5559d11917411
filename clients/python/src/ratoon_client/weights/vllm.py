"""Versions into a vLLM server, by the routes that it has with VLLM_SERVER_DEV_MODE=1.

A full version is loaded in place while generation is paused; the engine samples again once the
new weights or the old ones are in whole, and stays paused where neither could be loaded. LoRA
versions (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True) get a name each, without a pause.

A server with the weight transfer backend `ratoon`, which `register` gives to vLLM, has a version in
its workers' memory before it is paused.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tenacity

from ratoon_client.errors import EngineError
from ratoon_client.weights.disk import in_thread
from ratoon_client.weights.engine_http import EngineHttp
from ratoon_proto.types import WeightManifest

_LOG = logging.getLogger("ratoon_client")
_STARTED = re.compile(r"^process_start_time_seconds(?:\{.*\})? (\S+)$", re.MULTILINE)
_ATTEMPTS = 4
_POLL_S = 0.05


class VllmAdapter(EngineHttp):
    """Holds the engine at `url` from construction to `close`, or as a context manager.

    `drain_s` bounds the wait for requests that are being answered, `load_s` a load, `call_s` all
    other calls. Raises EngineError where another receiver of this user on this machine has the
    engine.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        drain_s: float = 300.0,
        load_s: float = 300.0,
        call_s: float = 30.0,
    ) -> None:
        super().__init__(url, api_key=api_key, call_s=call_s)
        self._drain_s = drain_s
        self._load_s = load_s
        self._may_have_leftovers = False

    async def tag(self) -> str | None:
        """When the server was started, which forgets all versions; None: its metrics lack it."""
        return await in_thread(self._started_at)

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        if manifest.kind == "adapter":
            await in_thread(self._commit_lora, folder, manifest)
            return 0.0
        return await in_thread(self._commit_full, folder, manifest, previous)

    def _started_at(self) -> str | None:
        metrics = self._find("/metrics")
        started = None if metrics is None else _STARTED.search(metrics.text)
        return None if started is None else started[1]

    def _commit_full(self, folder: Path, manifest: WeightManifest, previous: Path | None) -> float:
        # Without a version before it, what the server was started with.
        old = str(previous) if previous is not None else self._model_root()
        self._stage(folder, manifest)
        return self._swap(lambda: self._load_staged(folder), old)

    def _swap(self, load: Callable[[], None], old: str | None) -> float:
        """Load in a pause; gives its seconds. Raises EngineError, with `old` loaded again as far as
        possible."""
        self._pause()
        begun = time.monotonic()
        try:
            load()
        except EngineError as error:
            self._load_again(old, error)
        self._resume()
        return time.monotonic() - begun

    def _stage(self, folder: Path, manifest: WeightManifest) -> None:
        """Before the pause: what a subclass brings closer to the engine. Raises EngineError."""

    def _load_staged(self, folder: Path) -> None:
        """In the pause."""
        self._load(str(folder))

    def _model_root(self) -> str | None:
        """The folder, or name on the hub, of the model that the server was started with."""
        for model in self._models():
            if model.get("parent") is None and isinstance(model.get("root"), str):
                return model["root"]
        return None

    def _models(self) -> list[dict[str, Any]]:
        return self._get("/v1/models").fields.get("data") or []

    def _pause(self) -> None:
        was_paused = self._is_paused()
        self._may_have_leftovers |= was_paused
        try:
            self._post("/pause?mode=wait", timeout_s=self._drain_s)
        except EngineError:
            # It may be paused all the same; one that was before may have half of a version.
            if not was_paused:
                with suppress(EngineError):
                    self._post("/resume")
            raise

    def _is_paused(self) -> bool:
        answer = self._find("/is_paused")
        return answer is not None and answer.fields.get("is_paused") is True

    def _load(self, path: str) -> None:
        """Old keys and values would answer for tokens that the new weights have not seen.

        vLLM keeps what a load that failed has counted: the next one is over early, and is repeated.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        times = 2 if self._may_have_leftovers else 1
        self._may_have_leftovers = True
        for _ in range(times):
            self._post("/collective_rpc", body, timeout_s=self._load_s)
        self._may_have_leftovers = False
        # Refused while blocks are still on their way to another memory.
        self._insist("/reset_prefix_cache")

    def _load_again(self, old: str | None, error: EngineError) -> None:
        """Resume with the weights from before; raises EngineError, whatever became of it."""
        if old is None:
            raise EngineError(f"{error}; nothing to load again: the engine is left paused")
        try:
            self._load(old)
        except EngineError as again:
            raise EngineError(
                f"{error}; {old} could not be loaded again ({again}): the engine is left paused"
            ) from error
        self._resume()
        raise EngineError(f"{error}; {old} is loaded again") from error

    def _resume(self) -> None:
        try:
            self._insist("/resume")
        except EngineError as err:
            raise EngineError(f"{err}; the engine is left paused") from err

    def _insist(self, path: str) -> None:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EngineError),
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_exponential(multiplier=0.1),
            reraise=True,
        )
        attempts(self._post, path)

    def _commit_lora(self, folder: Path, manifest: WeightManifest) -> None:
        """Under a name of its own: blocks that are cached under a name outlive its adapter."""
        name = lora_name(manifest)
        pattern = re.compile(re.escape(name.removesuffix(str(manifest.version))) + r"\d+")
        ours = [str(model["id"]) for model in self._models() if pattern.fullmatch(str(model["id"]))]
        if name in ours:
            # It is of a commit that was not recorded, or of a policy of this name made anew.
            self._unload(name)
            self._post("/reset_prefix_cache")
        self._post(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(folder)},
            timeout_s=self._load_s,
        )
        for old in ours:
            if old != name:
                # The next version's commit finds it again.
                with suppress(EngineError):
                    self._unload(old)

    def _unload(self, name: str) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": name})


def lora_name(manifest: WeightManifest) -> str:
    """What requests name as their `model`."""
    return f"{manifest.policy_id}-v{manifest.version}"


def register() -> None:
    """Entry point `vllm.general_plugins`: called in each process of vLLM, at times twice."""
    # A vLLM without weight transfer goes on without.
    with suppress(ImportError, ValueError):
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        factory.WeightTransferEngineFactory.register_engine(
            "ratoon", "ratoon_client.weights.vllm_engine", "RatoonTransferEngine"
        )


class StagedVllmAdapter(VllmAdapter):
    """A VllmAdapter of a server with `--weight-transfer-config '{"backend": "ratoon"}'`.

    Each worker copies the version's tensors to its host memory and verifies them while it samples;
    `load_s` bounds that too. A version that cannot be staged causes no pause.
    """

    _staging_id = ""
    # A load has failed since the last one that did not: workers that answer no poll may lack what
    # the next delta begins with.
    _has_failed = False

    async def commit_delta(
        self, delta: Path, manifest: WeightManifest, *, previous: Path
    ) -> float | None:
        """As `DeltaAdapter.commit_delta`: each worker has the parent in its host memory."""
        return await in_thread(self._commit_delta, delta, manifest, previous)

    def _commit_delta(self, delta: Path, manifest: WeightManifest, previous: Path) -> float | None:
        if self._has_failed:
            return None
        try:
            self._stage(delta.parent, manifest, delta)
        except EngineError as error:
            # A worker that started since, or staged another version, has not the parent.
            _LOG.info("%s: not by a delta: %s", manifest.policy_id, error)
            return None
        return self._swap(lambda: self._load_staged(delta.parent), str(previous))

    def _stage(self, folder: Path, manifest: WeightManifest, delta: Path | None = None) -> None:
        self._staging_id = uuid.uuid4().hex
        files = [
            asdict(file)
            for file in manifest.files
            # An engine has no value head, which is in a folder of its own.
            if file.name.endswith(".safetensors") and "/" not in file.name
        ]
        info = {"staging_id": self._staging_id, "folder": str(folder), "files": files}
        if delta is not None:
            info["delta"] = str(delta)
        self._post("/init_weight_transfer_engine", {"init_info": info})
        deadline = time.monotonic() + self._load_s
        while self._is_staging():
            if time.monotonic() > deadline:
                raise EngineError(f"{self._url}: {folder} is not staged after {self._load_s} s")
            time.sleep(_POLL_S)

    def _is_staging(self) -> bool:
        """Whether any worker is. Raises EngineError where one failed or forgot the version."""
        # The init route tells nothing of its end: a worker's attribute is called by name.
        answer = self._post("/collective_rpc", {"method": "weight_transfer_engine"})
        workers: list[dict[str, Any]] = answer.fields.get("results") or [{}]
        for worker in workers:
            if worker.get("staging_id") != self._staging_id:
                raise EngineError(f"{self._url}: the version is staged no more: {worker}")
            if worker.get("error") is not None:
                raise EngineError(f"{self._url}: not staged: {worker['error']}")
        return any(worker["is_running"] for worker in workers)

    def _load_staged(self, folder: Path) -> None:
        self._has_failed = True
        try:
            self._post("/start_weight_update")
        except EngineError:
            # One that never ended, as its receiver was killed, or as it failed in some workers.
            with suppress(EngineError):
                self._post("/finish_weight_update")
            self._post("/start_weight_update")
        update = {"update_info": {"staging_id": self._staging_id}}
        self._post("/update_weights", update, timeout_s=self._load_s)
        self._post("/finish_weight_update")
        # Old keys and values would answer for tokens that the new weights have not seen.
        self._insist("/reset_prefix_cache")
        self._has_failed = False
