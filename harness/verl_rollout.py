"""verl's rollout `ratoon` for CPUs: the service's sampler behind verl's replica interface.

`VERL_USE_EXTERNAL_MODULES=harness.verl_rollout` and `actor_rollout_ref.rollout.name=ratoon`: every
process of a run that imports verl registers it, and takes the CPU for its device. In: weights as
verl's checkpoint engines yield them, and prompts as its agent loops send them. Out: tokens with
log-probs. The tensors of each sync are kept in `rollout.custom.folder`/step-N.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from verl.utils import distributed
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from harness.verl_site import use_cpu
from ratoon.model.folder import ModelFolder
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.model.support import read_config
from ratoon.sampler.local import LocalSampler
from ratoon.sampler.port import Weights
from ratoon_proto.types import FullTuning, SamplingParams, StopReason

NAME = "ratoon"


def _server_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


class Rollout(BaseRollout):
    """A worker of a replica: writes the weights of a sync, and has the server sample from them."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = 0
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank, self.is_leader_rank = replica_rank, True

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int = 0, **_: Any
    ) -> None:
        assert wire_format == "named_tensors"
        folder = Path(self.config.custom["folder"]) / f"step-{global_steps}"
        folder.mkdir(parents=True)
        shutil.copy(Path(self.model_config.local_path) / "config.json", folder)
        values = {name: value.clone() async for name, value in ensure_async_iterator(weights)}
        save_file(values, folder / "model.safetensors")
        server: Any = ray.get_actor(_server_name(self.replica_rank))
        await server.load.remote(str(folder), global_steps)

    async def resume(self, tags: list[str]) -> None:
        """Nothing: weights stay where they are."""

    async def release(self) -> None:
        """Nothing."""


class Server:
    """A replica's sampler. States: open; closed, once what it samples has ended, to requests."""

    def __init__(self, response_length: int) -> None:
        self._response_length = response_length
        self._sampler: LocalSampler | None = None
        self._weights: Weights | None = None
        self._step = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._num_running = 0

    async def load(self, folder: str, global_steps: int) -> None:
        """Sample from the weights in `folder` from now on."""
        path = Path(folder)
        if self._sampler is None:
            self._sampler = LocalSampler(
                models_root=path.parent,
                device="cpu",
                max_waiting=4096,
                max_rows=64,
                max_cache_bytes=2**28,
                max_models=1,
            )
        model = _spec_of(path) if self._weights is None else self._weights.model
        self._step = global_steps
        self._weights = Weights(
            policy_id="",
            base=path.name,
            model=model,
            version=global_steps,
            folder=path,
            digest=folder,
        )

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        # It may be closed again before this goes on.
        while not self._open.is_set():
            await self._open.wait()
        assert self._sampler is not None, "weights come first"
        assert self._weights is not None
        self._num_running += 1
        self._idle.clear()
        step = self._step
        sampling = SamplingParams(
            max_tokens=sampling_params.get("max_tokens", self._response_length),
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=max(sampling_params["top_k"], 0),
        )
        try:
            made = await self._sampler.sample(self._weights, tuple(prompt_ids), sampling)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
        (sequence,) = made.sequences
        is_stopped = sequence.stop_reason is StopReason.STOP
        return TokenOutput(
            token_ids=list(sequence.tokens),
            log_probs=list(sequence.logprobs),
            stop_reason="completed" if is_stopped else "length",
            extra_fields={"global_steps": step},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Let what runs end; what comes waits."""
        self._open.clear()
        await self._idle.wait()

    async def resume_generation(self) -> None:
        self._open.set()

    async def clear_kv_cache(self) -> None:
        """Nothing: a cache ends with its wave."""

    async def _nothing(self, **_: Any) -> None:
        """What frees an accelerator's memory."""

    sleep = wake_up = release_kv_cache = resume_kv_cache = _nothing


class Replica(RolloutReplica):
    """One server beside one worker."""

    async def launch_servers(self) -> None:
        assert self.world_size == 1
        config = omega_conf_to_dataclass(self.config)
        server: Any = (
            ray.remote(Server)
            .options(
                num_cpus=0,
                name=_server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
            )
            .remote(config.response_length)
        )
        await server.resume_generation.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, _server_name(self.replica_rank)


def _spec_of(folder: Path) -> ModelSpec:
    config, _ = read_config(ModelFolder.of(folder))
    return ModelSpec(
        base=FolderBase(folder=str(folder)),
        tuning=FullTuning(),
        dtype=ModelDtype(str(config.dtype).removeprefix("torch.")),
        seed=0,
    )


use_cpu()
# A process group of the CPU twice is none; that of an accelerator is made of gloo here.
distributed.get_device_name = lambda: "cuda"
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{Rollout.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
