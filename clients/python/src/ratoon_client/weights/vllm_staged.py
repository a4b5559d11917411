"""Versions into a vLLM server that has them in its workers' memory before it is paused.

The server's half is the weight transfer backend `ratoon`, which `register` gives to vLLM.
"""

from __future__ import annotations

import importlib
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ratoon_client.errors import EngineError
from ratoon_client.weights.vllm import VllmAdapter
from ratoon_proto.types import WeightManifest

_POLL_S = 0.05


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

    def _stage(self, folder: Path, manifest: WeightManifest) -> None:
        self._staging_id = uuid.uuid4().hex
        files = [asdict(file) for file in manifest.files if file.name.endswith(".safetensors")]
        info = {"staging_id": self._staging_id, "folder": str(folder), "files": files}
        self._post("/init_weight_transfer_engine", {"init_info": info})
        deadline = time.monotonic() + self._load_s
        while self._is_staging():
            if time.monotonic() > deadline:
                raise EngineError(f"{self._url}: {folder} is not staged after {self._load_s} s")
            time.sleep(_POLL_S)

    def _is_staging(self) -> bool:
        """Of any worker. Raises EngineError where one failed, or has forgotten the version."""
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
