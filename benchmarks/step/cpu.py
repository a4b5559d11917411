"""`make bench-cpu`: the policy update on a CPU, packed against replicated, and a service soak.

The replicated baseline has the same weights, dtype and threads, runs unpadded batches through
causal SDPA and computes log-probs on predicting rows only. Loss and gradients must agree before
anything is timed. The file is written only if every part ran; missed targets are recorded as they
are.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common.document import write_json
from benchmarks.service.soak_cpu import measure_soak
from benchmarks.step.workload import Group, make_batch
from harness.environment import describe
from ratoon.model.export import export_weights
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_kernels import token_logprobs
from ratoon_proto.types import AdamWConfig, FullTuning, LossConfig, LossKind

GROUP = Group(prompt=2048, responses=(128,) * 16)
BASELINE_BATCHES = (1, 4, 16)
MAX_RELATIVE_ERROR = 1e-4
CLIP = 0.2
# 1.05M packed tokens, 5.1M replicated ones.
FOREST = (Group(prompt=2048, responses=(448,) * 32),) * 64
FOREST_VOCAB_SIZE = 151_936


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--soak-updates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    environment = describe(args.seed)
    forest = measure_forest_1m(max(args.repeats, 5))
    step = measure_packed(
        preset="small",
        group=GROUP,
        baseline_batches=BASELINE_BATCHES,
        repeats=args.repeats,
        seed=args.seed,
    )
    soak = measure_soak(args.soak_updates, args.seed)
    result = {
        "speedup": step["speedup"],
        "rho": step["rho"],
        "baseline_batch": step["baseline_batch"],
        "forest_seconds_1m_tokens": forest["total_seconds"],
        "soak_pss_growth": soak["pss_growth"],
        "soak_store_growth": soak["store_growth"],
        **environment,
        "step": step,
        "forest_1m": forest,
        "soak": soak,
    }
    write_json(args.out, result)
    headline = {key: value for key, value in result.items() if not isinstance(value, dict)}
    print(json.dumps(headline, indent=1))


def measure_packed(
    *, preset: str, group: Group, baseline_batches: tuple[int, ...], repeats: int, seed: int
) -> dict[str, object]:
    """Median seconds of interleaved runs; `speedup` is the best baseline's median over packed's.

    All responses of `group` have the same length.
    """
    threads = torch.get_num_threads()
    trainer = Trainer.create(trainer_spec(preset, group, seed, threads))
    batch = make_batch((group,), trainer.info().vocab_size, seed)
    loss = resolve_loss(LossConfig(kind=LossKind.GRPO), batch, has_frozen_reference=False)

    def packed() -> float:
        report = trainer.forward_backward(trainer.prepare(batch, loss))
        assert report.loss is not None
        return report.loss * len(group.responses)

    baseline = _load_replicated(trainer)
    advantage_S = _advantages(batch)

    def replicated(batch_size: int) -> Callable[[], float]:
        return lambda: _replicated(baseline, batch, advantage_S, group, batch_size)

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
            "P": group.prompt,
            "N": len(group.responses),
            "R": group.responses[0],
        },
        "threads": threads,
        "dtype": "float32",
        "loss_relative_error": loss_error,
        "gradient_relative_error": gradient_error,
        "repeats": repeats,
        "median_seconds": medians,
        "raw_seconds": seconds,
    }


def trainer_spec(preset: str, group: Group, seed: int, threads: int) -> TrainerSpec:
    """A full policy of a preset on the CPU, in float32."""
    model = ModelSpec(
        base=PresetBase(name=preset), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=seed
    )
    return TrainerSpec(
        model=model,
        optimizer=AdamWConfig(),
        deterministic=True,
        micro_batch_tokens=group.prompt + sum(group.responses),
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
        export_weights(trainer.model, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
    return cast("Any", model).eval()


def _replicated(
    model: Any, batch: RolloutBatch, advantage_S: Tensor, group: Group, batch_size: int
) -> float:
    """Accumulates gradients of the summed GRPO loss, `batch_size` sequences at a time; the sum."""
    prompt, count, length = group.prompt, len(group.responses), group.responses[0]
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
    """Relative errors of the loss and of all gradients together; RuntimeError if too large."""
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


def measure_forest_1m(repeats: int) -> dict[str, object]:
    """Median seconds of sort, forest and pack over `repeats` (>= 1) runs, after a warm-up."""
    batch = make_batch(FOREST, FOREST_VOCAB_SIZE, seed=0)
    seconds: dict[str, list[float]] = {"sort": [], "forest": [], "pack": [], "total": []}
    packed_tokens = replicated_tokens = 0
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        prefixes = sort_sequences(batch)
        sorted_at = time.perf_counter()
        forest = build_forest(batch, prefixes, None)
        grown_at = time.perf_counter()
        packed = pack(batch, forest, batch.loss_mask)
        packed_at = time.perf_counter()
        assert len(packed.term_target) == len(batch.loss_mask)
        packed_tokens = forest.num_tokens
        replicated_tokens = int(forest.sequence_length.sum())
        if repeat:
            seconds["sort"].append(sorted_at - start)
            seconds["forest"].append(grown_at - sorted_at)
            seconds["pack"].append(packed_at - grown_at)
            seconds["total"].append(packed_at - start)
    return {
        "groups": len(FOREST),
        "rollouts_per_group": len(FOREST[0].responses),
        "packed_tokens": packed_tokens,
        "replicated_tokens": replicated_tokens,
        "repeats": repeats,
        **{f"{name}_seconds": statistics.median(values) for name, values in seconds.items()},
        "raw_seconds": seconds,
    }


if __name__ == "__main__":
    main()
