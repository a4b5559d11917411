"""Benchmarks distillation: updates with a teacher's K likeliest tokens, against GRPO.

The recorded group on the policy's own log-probs, forward, backward and optimizer by the service's
trainer; and a Forward that answers the K likeliest tokens, against one that does not. The last row
asks a teacher of the student's size on the same device in each update. All rows are of one run.

    python -m benchmarks.step.distillation --out benchmarks/results/h200/distillation.json
    python -m benchmarks.step.distillation --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import aligned
from benchmarks.common.timing import measure, timed
from benchmarks.step.run import FULL, SMALL, Row, Run, figures_or_refusal
from benchmarks.step.updates import LEARNING_RATE, open_trainer
from benchmarks.step.ways import Ways
from benchmarks.step.workload import QWEN3_8B, TINY, make_batch
from harness.gpu_results import describe_gpu, write_result
from ratoon.cluster.worker_start import GPU_ENVIRONMENT
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    DistillationConfig,
    Divergence,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
)

K = 64
ON_POLICY = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
LOSSES = {
    "grpo": LossConfig(kind=LossKind.GRPO, old_logprobs=ON_POLICY),
    **{
        str(kind): LossConfig(kind=LossKind.DISTILLATION, distillation=DistillationConfig(kind))
        for kind in Divergence
    },
    "grpo + reverse_kl": LossConfig(
        kind=LossKind.GRPO,
        old_logprobs=ON_POLICY,
        distillation=DistillationConfig(Divergence.REVERSE_KL),
    ),
}
FORWARDS = {"forward": 0, f"forward, {K} likeliest": K}
TAUGHT = "reverse_kl, a teacher asked"
COLUMNS = ("way", "seconds", "over the first", "peak GiB")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=5, help="of each row, at most")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds, set-up included")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.report is None:
        _measure(args)
    else:
        print(format_table(json.loads(args.report.read_text(encoding="utf-8"))))


def _measure(args: argparse.Namespace) -> None:
    is_gpu = is_for_gpu(args)
    if is_gpu:
        # The settings are those of a worker of the service.
        for name, value in GPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    run = Run(
        device=torch.device(args.device),
        scale=FULL if is_gpu else SMALL,
        num_samples=args.samples,
        stop_at=time.monotonic() + args.budget_s,
        seed=args.seed,
        host_bytes=64 * 2**30 if is_gpu else 0,
    )
    size = QWEN3_8B if is_gpu else TINY
    batch = taught(make_batch((run.scale.paper,), size.vocab_size, run.seed), size.vocab_size)
    trainer = open_trainer(Ways(run, size), OptimizerStates.BF16_8BIT, has_reference=False)
    payload: dict[str, Any] = {"model": asdict(size), "num_teacher_tokens": K, "rows": []}

    def add(how: str, step: Callable[[], object]) -> None:
        row = figures_or_refusal(partial(_row, run, step))
        payload["rows"].append({"how": how, **row})
        if args.out is not None:
            write_result(args.out, payload, seed=run.seed)

    for how, step in _steps(trainer, batch).items():
        add(how, step)
    # The teacher is opened now: the rows before it have the device for themselves.
    teacher = open_trainer(Ways(run, size), OptimizerStates.BF16_8BIT, has_reference=False)
    add(TAUGHT, partial(_taught_update, trainer, teacher, batch))
    print(format_table({**describe_gpu(run.seed), **payload}))


def _steps(trainer: Trainer, batch: RolloutBatch) -> dict[str, Callable[[], object]]:
    """What is measured, by its name."""

    def forward(num_best: int) -> None:
        prepared = trainer.prepare_forward(batch, num_best=num_best)
        trainer.forward(prepared, with_entropy=False, use_reference=False)

    return {
        **{how: partial(_update, trainer, batch, request) for how, request in LOSSES.items()},
        **{how: partial(forward, num_best) for how, num_best in FORWARDS.items()},
    }


def _update(trainer: Trainer, batch: RolloutBatch, request: LossConfig) -> None:
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    optim = OptimStepConfig(learning_rate=LEARNING_RATE, max_grad_norm=1.0)
    step = resolve_optim(optim, loss.normalisation, trainer.spec.optimizer)
    report = trainer.update(trainer.prepare(batch, loss), step)
    if report.skipped:
        raise RuntimeError(f"the step was skipped: {report.warnings}")


def _taught_update(student: Trainer, teacher: Trainer, batch: RolloutBatch) -> None:
    """What the service does where a loss names a teacher: a Forward on it, then the update."""
    asked = replace(batch, teacher_tokens=None, teacher_logprobs=None)
    prepared = teacher.prepare_forward(asked, num_best=_width(student.model.sizes.vocab_size))
    answer = teacher.forward(prepared, with_entropy=False, use_reference=False).teacher
    if answer is None:
        raise RuntimeError("the teacher answered no tokens")
    tokens_JK, logprobs_JK = answer
    answered = replace(batch, teacher_tokens=tokens_JK, teacher_logprobs=logprobs_JK)
    _update(student, answered, LOSSES[str(Divergence.REVERSE_KL)])


def _row(run: Run, step: Callable[[], object]) -> Row:
    warm_up_s = timed(step, run.device)
    found = measure(step, run.device, num_samples=run.num_samples, stop_at=run.stop_at)
    return {
        "warm_up_s": warm_up_s,
        "seconds": found.seconds,
        "joules": found.joules,
        "peak_gib": found.peak_gib,
        "samples": found.samples,
    }


def taught(batch: RolloutBatch, vocab_size: int) -> RolloutBatch:
    """The rollouts with a teacher of K distinct random tokens at each response token, whose mass
    falls off as 1 / rank^2; K is smaller where the vocabulary is."""
    rng = np.random.default_rng(0)
    num_tokens, width = len(batch.response_tokens), _width(vocab_size)
    # A stride that shares no factor with the vocabulary visits each token once.
    stride = next(s for s in range(vocab_size // 2 - 1, 0, -1) if np.gcd(s, vocab_size) == 1)
    first_J1 = rng.integers(0, vocab_size, (num_tokens, 1))
    mass_K = 1.0 / np.arange(1, width + 1) ** 2
    logprob_K = np.log(0.98 * mass_K / mass_K.sum()).astype(np.float32)
    return replace(
        batch,
        teacher_tokens=((first_J1 + stride * np.arange(width)) % vocab_size).astype(np.int32),
        teacher_logprobs=np.tile(logprob_K, (num_tokens, 1)),
    )


def _width(vocab_size: int) -> int:
    return min(K, vocab_size // 2)


def format_table(result: Mapping[str, Any]) -> str:
    """Rows, each against the first of its kind."""
    first: dict[bool, float] = {}
    cells: list[list[str]] = []
    for row in result["rows"]:
        if "error" in row:
            cells.append([row["how"], row["error"][:60], "", ""])
            continue
        base = first.setdefault(row["how"] in FORWARDS, row["seconds"])
        over, peak = f"{row['seconds'] / base:.3f}", f"{row['peak_gib']:.1f}"
        cells.append([row["how"], f"{row['seconds']:.3f}", over, peak])
    return "\n".join(aligned([list(COLUMNS), *cells], 1))


if __name__ == "__main__":
    main()
