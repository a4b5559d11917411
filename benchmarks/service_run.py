"""Updates through the whole service: what callers wait beyond the trainer, and through a kill.

Enters a plan and a device, leaves one row a policy. Invariant: all policies begin at the same
weights and are sent the same updates, one at a time, over gRPC; two of them repeat their bits, and
nothing differs between these but that the worker of one is killed in the middle of an update.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.faults_service import Service
from benchmarks.forests import PAPER_LENGTHS
from benchmarks.step_rollouts import Group
from benchmarks.step_sizes import QWEN3_1_7B, TINY, ModelSize
from benchmarks.step_subjects import build_module
from benchmarks.step_timing import release
from ratoon.engine.crash_points import CrashPoint
from ratoon_client import Group as Rollouts
from ratoon_client import Loss, Optim, RatoonClient, group, rollout
from ratoon_client.policy_options import ModelDtype
from ratoon_client.results import StepResult

Row = dict[str, Any]

MODEL = "model"
# Policies in their order; the first two are compared bit for bit.
STEADY, KILLED, FAST = "steady", "killed", "fast"
LEARNING_RATE = 1e-6
PATIENCE_S = 300.0
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained.

    Attributes:
        model: Of random weights, in a folder as Hugging Face writes it.
        dtype: Of its weights.
        group: Rollouts of one update; tokens are drawn anew for each.
        num_updates: Of each policy.
        killed_in: The update, from 1 on, in the middle of which the worker is killed.
        num_threads: Of torch, and processors of Ray.
    """

    model: ModelSize
    dtype: ModelDtype
    group: Group
    num_updates: int
    killed_in: int
    num_threads: int


FULL = Plan(
    model=QWEN3_1_7B,
    dtype="bfloat16",
    group=Group(prompt=5059, responses=PAPER_LENGTHS),
    num_updates=6,
    killed_in=4,
    num_threads=8,
)
SMALL = Plan(
    model=TINY,
    dtype="float32",
    group=Group(prompt=24, responses=(5, 3, 7, 2)),
    num_updates=3,
    killed_in=2,
    num_threads=1,
)


def measure(plan: Plan, device: str, root: Path, seed: int) -> dict[str, Any]:
    """Seconds until the service was well, and the rows of its policies.

    Raises `RuntimeError` where it does not start or a kill did not happen, and what the client
    raises.
    """
    _write_model(plan, device, root / "models" / MODEL, seed)
    worker = {
        "device": device,
        "num_threads": plan.num_threads,
        # Of bfloat16 weights alone.
        "optimizer_states": "bf16_8bit",
    }
    ray = {
        "num_cpus": max(2, plan.num_threads),
        "object_store_bytes": 200 * 2**20,
        "temp_folder": str(root / "ray"),
    }
    start = time.monotonic()
    with Service(root, worker=worker, ray=ray) as service:
        start_s = time.monotonic() - start
        with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
            rows = [_play(plan, service, client, name, seed) for name in (STEADY, KILLED, FAST)]
    return {"plan": asdict(plan), "start_s": start_s, "rows": rows}


def _play(plan: Plan, service: Service, client: RatoonClient, name: str, seed: int) -> Row:
    """One policy from its creation to its end, which frees its worker's device."""
    begin = time.monotonic()
    client.create_policy(
        name,
        model_folder=MODEL,
        dtype=plan.dtype,
        seed=seed,
        deterministic=name != FAST,
        recovery="replay" if name != FAST else "fail",
    ).result(PATIENCE_S)
    created_s = time.monotonic() - begin
    session = client.policy(name)
    updates: list[Row] = []
    for number in range(1, plan.num_updates + 1):
        rollouts = _rollouts(plan, seed + number)
        is_killed = name == KILLED and number == plan.killed_in
        if is_killed:
            service.arm(CrashPoint.WORKER_IN_APPLY, 1)
        begin = time.monotonic()
        update = session.update(
            [rollouts], loss=Loss("grpo"), optim=Optim(learning_rate=LEARNING_RATE)
        )
        result = update.result(PATIENCE_S)
        updates.append(_update_row(result, time.monotonic() - begin, is_killed=is_killed))
        if is_killed and not service.wait_for_crash(CrashPoint.WORKER_IN_APPLY, 0.0):
            raise RuntimeError("the worker was not killed")
    begin = time.monotonic()
    pulled = client.pull_weights(name, service.root / "pulled" / name)
    pull_s = time.monotonic() - begin
    client.delete_policy(name).result(PATIENCE_S)
    return {
        "policy": name,
        "created_s": created_s,
        "updates": updates,
        "pull_s": pull_s,
        "pulled_gib": pulled.fetched_bytes / GIB,
        "digests": {file.name: file.digest for file in pulled.manifest.files},
        "samples": [row["seconds"] for row in updates],
    }


def _update_row(result: StepResult, seconds: float, *, is_killed: bool) -> Row:
    """`seconds` are the caller's, the others the service's; `beyond_s` is what these leave."""
    report = result.report
    phases = asdict(report.seconds)
    trained_s = report.seconds.forward + report.seconds.backward + report.seconds.optimizer
    return {
        "seconds": seconds,
        "trained_s": trained_s,
        **{f"{name}_s": value for name, value in phases.items()},
        "beyond_s": seconds - trained_s - report.seconds.publish,
        "is_killed": is_killed,
        "version": result.version,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "peak_gib": report.peak_memory_bytes / GIB,
        "hardware_mfu": report.hardware_mfu,
    }


def _rollouts(plan: Plan, seed: int) -> Rollouts:
    rng, vocab_size = np.random.default_rng(seed), plan.model.vocab_size
    return group(
        f"group-{seed}",
        rng.integers(0, vocab_size, plan.group.prompt),
        [
            rollout(
                response=rng.integers(0, vocab_size, length),
                sampler_logprobs=rng.normal(-math.log(vocab_size), 0.1, length),
                reward=float(rng.normal()),
            )
            for length in plan.group.responses
        ],
    )


def _write_model(plan: Plan, device: str, folder: Path, seed: int) -> None:
    """Made where it is fast; the device is free again afterwards."""
    target = torch.device(device)
    module = build_module(plan.model, target, getattr(torch, plan.dtype), seed)
    module.save_pretrained(folder)
    del module
    release(target)
