"""verl, which `make env-verl` installs beside .venv, for the tests that compare with it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SITE = Path(__file__).parents[1] / ".venv-verl"
NEEDS_VERL = pytest.mark.skipif(
    not (SITE / "verl").is_dir(), reason="verl is not installed: make env-verl"
)


@contextmanager
def verl_on_path() -> Iterator[None]:
    """verl behind everything else, for a while: torch and transformers are those of .venv, and what
    Ray starts for other tests does not see its packages. Its device is this machine's CPU."""
    sys.path.insert(0, str(SITE))
    try:
        # hydra needs another one than .venv has.
        import antlr4  # noqa: F401

        sys.path.append(sys.path.pop(0))
        _use_cpu()
        yield
    finally:
        sys.path.remove(str(SITE))


def _use_cpu() -> None:
    """verl has a platform for each accelerator, and none for the CPU."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        device_module = SimpleNamespace(  # pyright: ignore[reportAssignmentType]
            max_memory_allocated=lambda: 0,
            max_memory_reserved=lambda: 0,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
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
def worker_environment(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables that verl gives the only process of a worker group."""
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
    for name, value in values.items():
        patch.setenv(name, value)
    # verl's own group would be of an accelerator and the CPU, and refuses the CPU twice.
    torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def run_config(folder: Path, *overrides: str) -> Any:
    """verl's configuration of a run of this model, as its command line makes it."""
    from hydra import compose, initialize_config_dir

    settings = (
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.n_gpus_per_node=1",
    )
    with initialize_config_dir(str(SITE / "verl" / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", [*settings, *overrides])
