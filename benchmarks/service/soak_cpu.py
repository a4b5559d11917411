"""Soaks the whole service with updates, and measures the growth of memory and disk.

Memory is the PSS of all processes, disk the size of the store, halfway and at the end. Updates go
over gRPC and their weights are pulled, as by a rollout system.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from ratoon import app
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig, ServeConfig
from ratoon_client import Group, Loss, Optim, RatoonClient, group, rollout

POLICY_ID = "soak"
NUM_GROUPS = 8
NUM_RESPONSES = 8
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 16
SETTLE_S = 2.0


def measure_soak(num_updates: int, seed: int) -> dict[str, object]:
    """`pss_growth` and `store_growth` are the final figure over the halfway one, minus 1."""
    rng = np.random.default_rng(seed)
    samples: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="ratoon-soak-") as folder:
        root = Path(folder)
        config = RatoonConfig(
            data_root=root / "data",
            models_root=root / "models",
            http=HttpConfig(port=0),
            grpc=GrpcConfig(port=0),
            serve=ServeConfig(num_replicas=0),
        )
        start = time.perf_counter()
        with app.running(config) as addresses, RatoonClient(addresses.grpc) as client:
            client.create_policy(POLICY_ID, preset="tiny", seed=seed).result()
            session = client.policy(POLICY_ID)
            for update in range(1, num_updates + 1):
                session.update(
                    _groups(rng, update), loss=Loss("grpo"), optim=Optim(learning_rate=1e-4)
                ).result()
                client.pull_weights(POLICY_ID, root / "weights")
                if update in (num_updates // 2, num_updates):
                    time.sleep(SETTLE_S)
                    samples[update] = {
                        "pss_bytes": _summed_pss_bytes(),
                        "store_bytes": _folder_bytes(config.data_root),
                    }
        seconds = time.perf_counter() - start
    half, full = samples[num_updates // 2], samples[num_updates]
    return {
        "updates": num_updates,
        "seconds": seconds,
        "samples": {str(update): sample for update, sample in samples.items()},
        "pss_growth": full["pss_bytes"] / half["pss_bytes"] - 1,
        "store_growth": full["store_bytes"] / half["store_bytes"] - 1,
    }


def _groups(rng: np.random.Generator, update: int) -> list[Group]:
    return [
        group(
            f"{update}-{index}",
            rng.integers(0, 256, PROMPT_TOKENS),
            [
                rollout(
                    response=rng.integers(0, 256, RESPONSE_TOKENS),
                    sampler_logprobs=rng.normal(-5.5, 0.1, RESPONSE_TOKENS),
                    reward=float(rng.random()),
                )
                for _ in range(NUM_RESPONSES)
            ],
        )
        for index in range(NUM_GROUPS)
    ]


def _summed_pss_bytes() -> int:
    """PSS of this process and its descendants: Ray's daemons, actors, driver and client."""
    total = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
