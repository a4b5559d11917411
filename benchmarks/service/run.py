"""Runs updates through the whole service: what callers wait beyond the trainer, and through a kill.

All policies start from the same weights and get the same updates, one at a time over gRPC, with
varying numbers of tokens. Deterministic ones differ only in whether their worker is killed in the
middle of an update, and in what is rerun then.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.forests import PAPER_LENGTHS
from benchmarks.step.subjects import build_module
from benchmarks.step.workload import QWEN3_1_7B, TINY, AnySize, Group
from harness.service import Service
from ratoon.engine.crash_points import CrashPoint
from ratoon.model.safetensors_files import FileContent, plan_files, write_files, write_index
from ratoon_client import Group as Rollouts
from ratoon_client import Loss, Optim, RatoonClient, RatoonClientError, group, rollout
from ratoon_proto.types import ModelDtypeName, StepResult

Row = dict[str, Any]

MODEL = "model"
# `steady` is undisturbed. The worker of `resumed` is killed after a checkpoint and resumes from it;
# that of `killed` has none and reruns everything. `fast` is not deterministic.
STEADY, RESUMED, KILLED, FAST = "steady", "resumed", "killed", "fast"
POLICIES = (STEADY, RESUMED, KILLED, FAST)
LEARNING_RATE = 1e-6
PATIENCE_S = 300.0
NOT_FINISHED = "was not finished"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Contents of a run.

    Attributes:
        model: With random weights, in a Hugging Face folder.
        dtype: For its weights.
        group: Rollouts of the first update; each update draws new tokens.
        longer_by: Tokens by which the prompt grows per update.
        num_updates: Per policy.
        killed_in: The update, counted from 1, during which the worker is killed; 0: in none.
        num_threads: Threads of torch, and CPUs of Ray.
        host_gib: Host memory lent to activations.
    """

    model: AnySize
    dtype: ModelDtypeName
    group: Group
    longer_by: int = 0
    num_updates: int = 1
    killed_in: int = 0
    num_threads: int
    host_gib: int = 0


FULL = Plan(
    model=QWEN3_1_7B,
    dtype="bfloat16",
    group=Group(prompt=5059, responses=PAPER_LENGTHS),
    longer_by=97,
    num_updates=6,
    killed_in=4,
    num_threads=8,
)
SMALL = Plan(
    model=TINY,
    dtype="float32",
    group=Group(prompt=24, responses=(5, 3, 7, 2)),
    longer_by=1,
    num_updates=3,
    killed_in=2,
    num_threads=1,
)


def measure(
    plan: Plan,
    device: str,
    root: Path,
    seed: int,
    policies: Sequence[str],
    weights_root: Path | None,
    on_payload: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Seconds until the service was healthy, and its policies' rows.

    `on_payload` gets what there is whenever a row has changed. Raises `RuntimeError` if the service
    does not start, or a kill did not happen.
    """
    write_model(plan, device, root / "models" / MODEL, seed)
    ray = {
        "num_cpus": max(2, plan.num_threads),
        "object_store_bytes": 200 * 2**20,
        "temp_folder": str(root / "ray"),
    }
    start = time.monotonic()
    elsewhere: dict[str, Any] = {} if weights_root is None else {"weights_root": str(weights_root)}
    with Service(root, worker=worker_settings(plan, device), ray=ray, **elsewhere) as service:
        rows: list[Row] = []
        payload = {
            "plan": asdict(plan),
            "weights_root": str(weights_root or ""),
            "start_s": time.monotonic() - start,
            "rows": rows,
        }
        with RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client:
            run = _Run(
                plan=plan,
                service=service,
                client=client,
                seed=seed,
                on_row=lambda: on_payload(payload),
            )
            for name in policies:
                rows.append({"policy": name, "updates": []})
                run.play(rows[-1])
    return payload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Plays one policy after another; `on_row` is called whenever a row has changed."""

    plan: Plan
    service: Service
    client: RatoonClient
    seed: int
    on_row: Callable[[], None]

    def play(self, row: Row) -> None:
        """One policy, from its creation to its deletion, which frees the device."""
        row["failure"] = NOT_FINISHED
        try:
            self._train(row)
            row["failure"] = ""
        except RatoonClientError as error:
            row["failure"] = f"{type(error).__name__}: {error}"
        self.on_row()
        if "created_s" in row:
            self.client.delete_policy(row["policy"]).result(PATIENCE_S)

    def _train(self, row: Row) -> None:
        """Adds measurements to `row`, calling `on_row` for each."""
        name = row["policy"]
        begin = time.monotonic()
        self.client.create_policy(
            name,
            model_folder=MODEL,
            dtype=self.plan.dtype,
            seed=self.seed,
            deterministic=name != FAST,
            recovery="replay" if name != FAST else "fail",
        ).result(PATIENCE_S)
        row["created_s"] = time.monotonic() - begin
        self.on_row()
        session = self.client.policy(name)
        for number in range(1, self.plan.num_updates + 1):
            batch = rollouts(self.plan, number, self.seed + number)
            is_killed = name in (RESUMED, KILLED) and number == self.plan.killed_in
            if is_killed and name == RESUMED:
                session.save_checkpoint().result(PATIENCE_S)
            if is_killed:
                self.service.arm(CrashPoint.WORKER_IN_APPLY, 1)
            begin = time.monotonic()
            update = session.update(
                [batch], loss=Loss("grpo"), optim=Optim(learning_rate=LEARNING_RATE)
            )
            result = update.result(PATIENCE_S)
            seconds = time.monotonic() - begin
            row["updates"].append(_update_row(result, seconds, is_killed=is_killed))
            self.on_row()
            if is_killed and not self.service.wait_for_crash(CrashPoint.WORKER_IN_APPLY, 0.0):
                raise RuntimeError("the worker was not killed")
        folder = self.service.root / "pulled" / name
        begin = time.monotonic()
        pulled = self.client.pull_weights(name, folder)
        row["pull_s"] = time.monotonic() - begin
        row["pulled_gib"] = pulled.fetched_bytes / GIB
        row["digests"] = {file.name: file.digest for file in pulled.manifest.files}
        row["samples"] = [update["seconds"] for update in row["updates"]]
        shutil.rmtree(folder)


def _update_row(result: StepResult, seconds: float, *, is_killed: bool) -> Row:
    """`seconds` are the caller's, others the service's; `beyond_s` is the difference."""
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


def rollouts(plan: Plan, number: int, seed: int) -> Rollouts:
    """The rollouts of update `number`, counted from 1."""
    rng, vocab_size = np.random.default_rng(seed), plan.model.vocab_size
    return group(
        f"group-{seed}",
        rng.integers(0, vocab_size, plan.group.prompt + (number - 1) * plan.longer_by),
        [
            rollout(
                response=rng.integers(0, vocab_size, length),
                sampler_logprobs=rng.normal(-math.log(vocab_size), 0.1, length),
                reward=float(rng.normal()),
            )
            for length in plan.group.responses
        ],
    )


def worker_settings(plan: Plan, device: str) -> dict[str, Any]:
    """`optimizer_states` applies to bfloat16 weights only."""
    return {
        "device": device,
        "num_threads": plan.num_threads,
        "optimizer_states": "bf16_8bit",
        "host_activation_bytes": plan.host_gib * GIB,
    }


def write_model(plan: Plan, device: str, folder: Path, seed: int) -> None:
    """Makes the model on the device, as that is faster; for a GPU by a process that ends then, as
    one that has used a GPU keeps half a GiB of it."""
    arguments = plan, device, folder, seed
    if device == "cpu":
        _write_model(*arguments)
        return
    process = get_context("spawn").Process(target=_write_model, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"no model was written: exit code {process.exitcode}")


def _write_model(plan: Plan, device: str, folder: Path, seed: int) -> None:
    module = build_module(plan.model, torch.device(device), getattr(torch, plan.dtype), seed)
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    # One that is tied is there once, by its first name.
    tensors = dict(module.named_parameters())
    files = plan_files(tensors)

    def write(file: str) -> None:
        on_host = {name: tensors[name].detach().cpu() for name in files[file]}
        write_files(folder, {file: FileContent.of(on_host)})

    with ThreadPoolExecutor(plan.num_threads) as threads:
        list(threads.map(write, files))
    if len(files) > 1:
        write_index(folder, files, tensors)
