"""verl beside .venv, on this machine's CPU: its worker in this process, and batches for it.

In: a model folder and settings of verl's command line. Out: verl's own actor, whichever engine the
settings choose, called as its trainer calls it. Nothing of verl is imported before `verl_on_path`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

SITE = Path(__file__).parents[1] / ".venv-verl"
ACTOR = "actor_rollout_ref.actor"
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
RATOON = f"{ACTOR}._target_=ratoon_client.verl.RatoonActorConfig"
# verl's own engine where there is no flash attention.
FSDP = (
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=False",
    f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.fsdp_config.use_torch_compile=False",
)


@contextmanager
def verl_on_path() -> Iterator[None]:
    """verl behind everything else, for a while: torch and transformers are those of .venv, and what
    Ray starts for others does not see its packages."""
    sys.path.insert(0, str(SITE))
    # Where there is TRL, verl asks it for a class that TRL 1 no longer has.
    trl = sys.modules.get("trl")
    sys.modules["trl"] = cast("Any", None)
    try:
        # hydra needs another one than .venv has.
        import antlr4  # noqa: F401  # pyright: ignore[reportUnusedImport]

        sys.path.append(sys.path.pop(0))
        use_cpu()
        yield
    finally:
        sys.path.remove(str(SITE))
        del sys.modules["trl"]
        if trl is not None:
            sys.modules["trl"] = trl


def use_cpu() -> None:
    """Give verl, which has a platform for each accelerator, one for the CPU."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        device_module = SimpleNamespace(
            max_memory_allocated=lambda: 0,
            max_memory_reserved=lambda: 0,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 1),
            get_device_name=lambda *_: "CPU",
            is_available=lambda: False,
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
        )

        def current_device(self) -> Any:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(Cpu())


@contextmanager
def worker_group() -> Iterator[None]:
    """This process alone, with the variables and the process group that verl gives a worker."""
    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Its own engine is registered for accelerators alone, and runs here too.
        "VERL_ENGINE_DEVICE": "cuda",
    }
    before = dict(os.environ)
    os.environ.update(values)
    try:
        # verl's own group would be of an accelerator and the CPU, and refuses the CPU twice.
        torch.distributed.init_process_group("gloo")
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def run_config(folder: Path, *settings: str) -> Any:
    """verl's configuration of a run of this model, as its command line makes it."""
    from hydra import compose, initialize_config_dir

    base = (
        f"actor_rollout_ref.model.path={folder}",
        f"+{ACTOR}.fsdp_config.mixed_precision={FLOAT32}",
        f"+actor_rollout_ref.ref.fsdp_config.mixed_precision={FLOAT32}",
        f"{ACTOR}.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.n_gpus_per_node=1",
    )
    with initialize_config_dir(str(SITE / "verl" / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", [*base, *settings])


class Run:
    """verl's worker of a role, in this process, and what its trainer asks of it."""

    def __init__(self, config: Any, role: str = "actor") -> None:
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.workers.engine_workers import ActorRolloutRefWorker

        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
        self.worker.init_model()
        self.config = config
        self._trainer = RayPPOTrainer
        self.actor_rollout_wg = self.ref_policy_wg = self.worker
        self.ref_in_actor = False

    def log_probs(self, batch: Any) -> Any:
        """The batch with `old_log_probs`, and the entropy, of the policy as it is."""
        made, _ = self._trainer._compute_old_log_prob(self, batch)
        return made.batch

    def reference(self, batch: Any) -> Any:
        return self._trainer._compute_ref_log_prob(self, batch).batch["ref_log_prob"]

    def update(self, batch: Any) -> dict[str, Any]:
        """Metrics of the updates of the batch's mini-batches, by verl's names."""
        return self._trainer._update_actor(self, batch).meta_info["metrics"]


def make_batch(prompts: Sequence[Sequence[int]], num_each: int, length: int, seed: int) -> Any:
    """A batch as verl's rollouts leave it: random responses of 1 to `length` tokens, padded on both
    sides, with an advantage of each token and the old and reference log-probs of some policy."""
    import torch
    from verl import DataProto

    draw = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts for _ in range(num_each)]
    width = max(map(len, rows))
    lengths = torch.randint(1, length + 1, (len(rows),), generator=draw)
    response_mask = (torch.arange(length) < lengths[:, None]).long()
    responses = torch.randint(12, 60, (len(rows), length), generator=draw) * response_mask
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    begins = torch.tensor([width - len(row) for row in rows])
    prompt_mask = (torch.arange(width) >= begins[:, None]).long()
    attention_mask = torch.cat([prompt_mask, response_mask], 1)

    def normal() -> Any:
        return torch.randn(len(rows), length, generator=draw)

    return DataProto.from_single_dict(
        {
            "prompts": padded,
            "responses": responses,
            "input_ids": torch.cat([padded, responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": normal() * response_mask,
            "old_log_probs": -4.1 + 0.3 * normal(),
            "ref_log_prob": -4.1 + 0.3 * normal(),
        },
        meta_info={"temperature": 1.0, "global_token_num": attention_mask.sum(-1).tolist()},
    )
