"""Full versions into an SGLang server, by its `/update_weights_from_disk`."""

from __future__ import annotations

import time
from pathlib import Path

from ratoon_client.errors import EngineError
from ratoon_client.weights.disk import in_thread
from ratoon_client.weights.engine_http import EngineHttp
from ratoon_proto.types import WeightManifest


class SglangAdapter(EngineHttp):
    """Holds the engine at `url` from construction to `close`, or as a context manager.

    `load_s` bounds an update, which waits for requests that are being answered; `call_s` all other
    calls. Raises EngineError where another receiver of this user on this machine has the engine.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, load_s: float = 600.0, call_s: float = 30.0
    ) -> None:
        super().__init__(url, api_key=api_key, call_s=call_s)
        self._load_s = load_s

    async def tag(self) -> str | None:
        """The engine's `weight_version`, which each commit sets and a restart forgets."""
        return await in_thread(self._weight_version)

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        if manifest.kind == "adapter":
            raise EngineError("versions of a LoRA policy are not loaded into SGLang")
        return await in_thread(self._commit, folder, manifest.version, previous)

    def _weight_version(self) -> str | None:
        info = self._find("/get_model_info")
        version = None if info is None else info.fields.get("weight_version")
        return version if isinstance(version, str) else None

    def _commit(self, folder: Path, version: int, previous: Path | None) -> float:
        begun = time.monotonic()
        try:
            self._update(folder, str(version))
        except EngineError as error:
            if previous is None:
                raise
            # The engine takes its old weights back by itself, if it gets that far.
            try:
                self._update(previous, previous.name.removeprefix("version-"))
            except EngineError as again:
                raise EngineError(
                    f"{error}; {previous} could not be loaded again ({again}): what the engine"
                    " serves is unknown"
                ) from error
            raise EngineError(f"{error}; {previous} is loaded again") from error
        return time.monotonic() - begun

    def _update(self, folder: Path, weight_version: str) -> None:
        body = {"model_path": str(folder), "weight_version": weight_version}
        answer = self._post("/update_weights_from_disk", body, timeout_s=self._load_s)
        if answer.fields.get("success") is not True:
            raise EngineError(f"the engine did not say success, but {answer.text[:300]}")
