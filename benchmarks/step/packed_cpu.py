"""Forward and backward of one GRPO group on the CPU: packed by Ratoon against replicated batches.

Enters a shape and a seed, leaves both sides' seconds. The replicated side is the same weights,
dtype and threads in unpadded batches through causal SDPA, with log-probs on predicting rows only.
Invariant: both sides' loss and gradients agree before anything is timed.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.step.rollouts import Group, make_batch
from ratoon.model.export import export_weights
from ratoon.model.spec import FullTuning, ModelDtype, ModelSpec, PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.config import AdamWConfig, LossKind, LossRequest
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_kernels import token_logprobs

MAX_RELATIVE_ERROR = 1e-4
CLIP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One prompt of P tokens, N responses of R tokens each."""

    prompt_tokens: int
    num_responses: int
    response_tokens: int


def measure_packed(
    *, preset: str, shape: Shape, baseline_batches: tuple[int, ...], repeats: int, seed: int
) -> dict[str, object]:
    """Interleaved medians of both sides; `speedup` is the best baseline's median over packed's."""
    threads = torch.get_num_threads()
    trainer = Trainer.create(_spec(preset, shape, seed, threads))
    group = Group(
        prompt=shape.prompt_tokens, responses=(shape.response_tokens,) * shape.num_responses
    )
    batch = make_batch((group,), trainer.info().vocab_size, seed)
    loss = resolve_loss(LossRequest(kind=LossKind.GRPO), batch, has_frozen_reference=False)

    def packed() -> float:
        prepared = trainer.prepare(batch, loss)
        report = trainer.forward_backward(batch, loss, prepared.plan)
        return report.loss * shape.num_responses

    baseline = _load_replicated(trainer)
    advantage_S = _advantages(batch)

    def replicated(batch_size: int) -> Callable[[], float]:
        return lambda: _replicated(baseline, batch, advantage_S, shape, batch_size)

    def clear() -> None:
        trainer.discard_gradients()
        baseline.zero_grad(set_to_none=True)
        gc.collect()

    loss_error, gradient_error = _agreement(trainer, baseline, packed, replicated(1))
    clear()
    runs = {"packed": packed, **{f"batch_{b}": replicated(b) for b in baseline_batches}}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            clear()
            if repeat:
                seconds[name].append(elapsed)
    plan = trainer.prepare(batch, loss).plan
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(baseline_batches, key=lambda b: medians[f"batch_{b}"])
    return {
        "speedup": medians[f"batch_{best}"] / medians["packed"],
        "rho": plan.unshared_tokens / plan.packed_tokens,
        "attention_pair_reduction": plan.replicated_pairs / plan.packed_pairs,
        "baseline_batch": best,
        "preset": preset,
        "num_parameters": trainer.info().num_parameters,
        "shape": {
            "P": shape.prompt_tokens,
            "N": shape.num_responses,
            "R": shape.response_tokens,
        },
        "threads": threads,
        "dtype": "float32",
        "loss_relative_error": loss_error,
        "gradient_relative_error": gradient_error,
        "repeats": repeats,
        "median_seconds": medians,
        "raw_seconds": seconds,
    }


def _spec(preset: str, shape: Shape, seed: int, threads: int) -> TrainerSpec:
    model = ModelSpec(
        base=PresetBase(name=preset), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=seed
    )
    return TrainerSpec(
        model=model,
        optimizer=AdamWConfig(),
        deterministic=True,
        micro_batch_tokens=shape.prompt_tokens + shape.num_responses * shape.response_tokens,
        keep_reference=False,
        attention_backend="",
        device="cpu",
        num_threads=threads,
    )


def _advantages(batch: RolloutBatch) -> Tensor:
    assert batch.rewards is not None
    rewards = torch.from_numpy(batch.rewards)
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).float()


def _load_replicated(trainer: Trainer) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        export_weights(trainer.model, Path(folder), None)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
    return cast("Any", model).eval()


def _replicated(
    model: Any, batch: RolloutBatch, advantage_S: Tensor, shape: Shape, batch_size: int
) -> float:
    """Add the gradients of the GRPO sum over all sequences, `batch_size` at a time; the sum."""
    prompt, count, length = shape.prompt_tokens, shape.num_responses, shape.response_tokens
    tokens = torch.from_numpy(np.stack([batch.sequence_tokens(s) for s in range(count)])).long()
    assert batch.sampler_logprobs is not None
    old = torch.from_numpy(batch.sampler_logprobs).view(count, length)
    head = model.get_output_embeddings().weight
    total = 0.0
    for start in range(0, count, batch_size):
        rows = slice(start, start + batch_size)
        ids = tokens[rows]
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        predicting = hidden[:, prompt - 1 : -1].reshape(-1, hidden.shape[-1])
        logprob, _ = token_logprobs(
            predicting,
            head,
            ids[:, prompt:].reshape(-1),
            torch.arange(len(predicting)),
            torch.ones(len(predicting)),
        )
        ratio = (logprob.view(-1, length) - old[rows]).exp()
        advantage = advantage_S[rows, None]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean(dim=1).sum()
        loss.backward()
        total += loss.item()
    return total


def _agreement(
    trainer: Trainer, baseline: Any, packed: Callable[[], float], replicated: Callable[[], float]
) -> tuple[float, float]:
    """Relative errors of the loss and of all gradients together; raises where they disagree."""
    packed_loss, replicated_loss = packed(), replicated()
    ours, theirs = trainer.model.named_trainable(), dict(baseline.named_parameters())
    assert set(ours) == set(theirs), "the two sides have other parameters"
    pairs = [(ours[name].grad, theirs[name].grad) for name in ours]
    difference = torch.stack([(a - b).double().norm() for a, b in pairs]).norm()
    norm = torch.stack([b.double().norm() for _, b in pairs]).norm()
    assert norm > 0
    loss_error = abs(packed_loss - replicated_loss) / abs(replicated_loss)
    gradient_error = float(difference / norm)
    if max(loss_error, gradient_error) > MAX_RELATIVE_ERROR:
        raise RuntimeError(f"the sides disagree: loss {loss_error}, gradient {gradient_error}")
    return loss_error, gradient_error
