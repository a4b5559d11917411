"""Benchmarks steps with routed experts: ours, replicated rollouts, and transformers' experts.

As many layers as keep all products beside what full tuning keeps; steps leave that memory alone.
Ways that are compared have recorded routes: rounding would send a token elsewhere in another way.

    python -m benchmarks.step.experts --out benchmarks/results/h200/experts.json
    python -m benchmarks.step.experts --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import (
    FIGURE_COLUMNS,
    aligned,
    link,
    markdown_table,
    write_section,
)
from benchmarks.common.timing import peak_gib, release
from benchmarks.kernels.attention_timing import CudaClock, HostClock, measure_gemm
from benchmarks.step.profiles import Kind, in_order, kinds_of, profiled_step
from benchmarks.step.run import FULL, SMALL, Row, Run, figures_or_refusal
from benchmarks.step.subjects import REPLICATED, run_step
from benchmarks.step.updates import open_update, run_phases
from benchmarks.step.ways import Plan, Ways, compare_ways, load_packed, measure_way
from benchmarks.step.workload import (
    PEAK_FLOPS,
    QWEN3_30B_A3B,
    TINY_ROUTED,
    RoutedSize,
    make_batch,
)
from harness.gpu_results import describe_gpu, write_result
from ratoon.model.policy_model import trained_parameters
from ratoon.planner.layer_kinds import Mlp
from ratoon.rollout.batch import RolloutBatch, offsets_of, sequence_lengths
from ratoon.train.ranks.layout import needed_bytes
from ratoon.train.spec import OptimizerStates

BEGIN = "<!-- experts: written by benchmarks/step/experts.py -->"
END = "<!-- end of experts -->"
STATES = OptimizerStates.BF16_SPLIT_8BIT
# Number of layers of the model's 48: all products of the recorded group are kept in these.
NUM_LAYERS = 16
OF_TRANSFORMERS = "grouped_mm"
# Rows that are not variants of a step.
PROFILE, UPDATE, TRANSFORMERS = "profile", "update", "experts of transformers"
PROFILED_STEPS = 2
LONGEST_KERNELS = 24
MAX_NAME = 80
WANTED = {"hardware_mfu": ">= 0.50", "over_replicated": ">= 4.5", "over_transformers": ""}

# Relative frequency with which tokens visit each expert.
Popularity = Callable[[int], NDArray[np.float64]]
POPULARITY: dict[str, Popularity] = {
    "even": np.ones,
    "zipf": lambda num_experts: 1 / np.arange(1, num_experts + 1),
}
PARTS = (
    ("attention, forward", Kind.ATTENTION_FORWARD, ""),
    ("attention, backward", Kind.ATTENTION_BACKWARD, ""),
    ("LM head", Kind.HEAD, ""),
    ("grouped products", Kind.PRODUCTS, r"[Gg]roup"),
    ("other products", Kind.PRODUCTS, ""),
    ("rows gathered and added up", Kind.COMPILED, r"index|_ToRows|_ToTokens"),
    ("other compiled kernels", Kind.COMPILED, ""),
    ("copies and fills", Kind.COPIES, ""),
    # Operations that torch runs one after the other: the router, and the sort of its choices.
    ("routing", Kind.EAGER, ""),
)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=5, help="of each figure, at most")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds, set-up included")
    parser.add_argument("--layers", type=int, help="another depth than the one that fits")
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(format_tables(result)))
    if args.report is not None and args.markdown is not None:
        write_section(args.markdown, BEGIN, END, markdown(result, link(args.report, args.markdown)))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    is_gpu = is_for_gpu(args)
    size = replace(QWEN3_30B_A3B, num_layers=NUM_LAYERS) if is_gpu else TINY_ROUTED
    if args.layers is not None:
        size = replace(size, num_layers=args.layers)
    run = Run(
        device=torch.device(args.device),
        scale=FULL if is_gpu else SMALL,
        num_samples=args.samples,
        stop_at=time.monotonic() + args.budget_s,
        seed=args.seed,
    )
    clock = CudaClock() if is_gpu else HostClock()
    payload: dict[str, Any] = {
        "model": asdict(size),
        "optimizer_states": str(STATES),
        "peak_flops": PEAK_FLOPS,
        "gemm": measure_gemm(run.device, clock),
        "rows": [],
    }
    for row in _rows(run, size):
        payload["rows"].append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "kernels"}), file=sys.stderr)
        if args.out is not None:
            # The result is written now, so that an interrupted run keeps its measurements.
            write_result(args.out, {**headline(payload), **payload}, seed=run.seed)
    return {**describe_gpu(run.seed), **headline(payload), **payload}


def _rows(run: Run, size: RoutedSize) -> Iterator[Row]:
    """Yields each row once it is measured."""
    scale, ours = run.scale, run.scale.ours
    batch = make_batch((scale.paper,), size.vocab_size, run.seed)
    ways = Ways(run, size)
    even = with_routes(batch, size.num_layers, size, POPULARITY["even"], run.seed)
    with reserved(ways):
        # The fastest cut of a dense model is the largest.
        plan = Plan(cuts=scale.cuts[-2:])
        for row in compare_ways(ways, even, [ours, scale.baseline], plan):
            yield {"routing": "even", **row}
        zipf = with_routes(batch, size.num_layers, size, POPULARITY["zipf"], run.seed)
        for routing, routed in (("zipf", zipf), ("own", batch)):
            yield {"routing": routing, "how": ours.how, **_attempt(_one, ways, routed)}
        yield {"routing": "even", "how": PROFILE, **_attempt(_profile, ways, even)}
    yield {"routing": "even", "how": UPDATE, **_attempt(_update, ways, even)}
    del ways
    release(run.device)
    ways = Ways(run, replace(size, implementation=OF_TRANSFORMERS))
    with reserved(ways):
        yield {"routing": "own", **_attempt(_one, ways, batch), "how": TRANSFORMERS}


def _one(ways: Ways, batch: RolloutBatch) -> Row:
    """Figures of our way with the experts and routes of these."""
    ours = ways.run.scale.ours
    row, _ = measure_way(ways, ours, batch, Plan(cuts=()))
    return {**row, "load": load_of(ways.policy(ours).routes.take().sums)}


def _attempt(
    measure_one: Callable[[Ways, RolloutBatch], Row], ways: Ways, batch: RolloutBatch
) -> Row:
    row = figures_or_refusal(partial(measure_one, ways, batch))
    ways.clear()
    return row


def _profile(ways: Ways, batch: RolloutBatch) -> Row:
    """Milliseconds of a step by part, and the longest kernels."""
    ours, device = ways.run.scale.ours, ways.run.device
    policy, batches = ways.policy(ours), load_packed(ways, ours, batch)
    memory = Plan(cuts=()).limit(policy, batches)
    work = partial(run_step, policy, batches)
    work()
    # Makes the profiler load its libraries.
    profiled_step(lambda: torch.zeros(1, device=device), device)
    steps = [profiled_step(work, device) for _ in range(PROFILED_STEPS)]
    parts = dict.fromkeys((name for name, _, _ in PARTS), 0.0)
    kernels: defaultdict[tuple[str, str], float] = defaultdict(float)
    for step in steps:
        order = in_order(step.kernels)
        kinds = kinds_of([kernel.name for kernel in order], has_optimizer=False)
        for kernel, kind in zip(order, kinds, strict=True):
            part, each = part_of(kernel.name, kind), kernel.milliseconds / len(steps)
            parts[part] += each
            kernels[kernel.name[:MAX_NAME], part] += each
    longest = sorted(kernels, key=lambda key: -kernels[key])[:LONGEST_KERNELS]
    return {
        "profiled_s": statistics.mean(step.seconds for step in steps),
        "layers_kept": None if memory is None else memory.layers,
        "parts_ms": parts,
        "kernels": [{"name": n, "part": part, "ms": kernels[n, part]} for n, part in longest],
    }


def part_of(name: str, kind: Kind) -> str:
    """The part of a kernel: the first of its kind whose pattern its name has."""
    found = (part for part, of, pattern in PARTS if of is kind and re.search(pattern, name))
    return next(found)


def _update(ways: Ways, batch: RolloutBatch) -> Row:
    """A whole update by the service's trainer: old log-probs, forward, backward, optimizer."""
    run = ways.run
    update = open_update(ways, "grpo", batch, STATES)
    run_phases(update)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    phases = [run_phases(update) for _ in range(min(3, run.num_samples))]
    plan = update.trainer.prepare(batch, update.on_policy).plan
    middle = sorted(phases, key=lambda each: each["update_s"])[len(phases) // 2]
    return {
        **middle,
        "num_micro_batches": len(plan.micro_batches),
        "num_stages": sum(len(part.stages) for part in plan.micro_batches),
        "peak_gib": peak_gib(run.device),
        "phases": phases,
        "samples": [each["update_s"] for each in phases],
    }


@contextmanager
def reserved(ways: Ways) -> Iterator[None]:
    """Holds the memory of what full tuning keeps beside weights and gradients."""
    trained = trained_parameters(ways.module)
    gradients = sum(p.numel() * p.element_size() for p in trained.values())
    is_gpu = ways.run.device.type == "cuda"
    num_bytes = needed_bytes(trained, STATES) - gradients if is_gpu else 0
    held = torch.empty(num_bytes, dtype=torch.uint8, device=ways.run.device)
    try:
        yield
    finally:
        del held
        ways.clear()


def with_routes(
    batch: RolloutBatch,
    num_layers: int,
    experts: RoutedSize | Mlp,
    popularity: Popularity,
    seed: int,
) -> RolloutBatch:
    """The rollouts of one group with random experts, which differ by token, layer and popularity;
    those of the prompt are the same in all."""
    rng = np.random.default_rng(seed)
    num_experts, per_token = experts.num_experts, experts.experts_per_token
    num_tokens = len(batch.prompt_tokens) + len(batch.response_tokens)
    expert_NLC = np.empty((num_tokens, num_layers, per_token), np.uint8)
    for layer in range(num_layers):
        weight_E = rng.permutation(popularity(num_experts))
        # The largest of such keys are a draw without replacement by the weights.
        key_NE = rng.gumbel(size=(num_tokens, num_experts)) + np.log(weight_E)
        chosen_NC = np.argpartition(key_NE, -per_token)[:, -per_token:]
        expert_NLC[:, layer] = np.sort(chosen_NC)
    prompt, responses = np.split(expert_NLC, [len(batch.prompt_tokens)])
    parts = np.split(responses, batch.response_offsets[1:-1])
    return replace(
        batch,
        routed_experts=np.concatenate([each for part in parts for each in (prompt, part)]),
        route_first=np.zeros(batch.num_sequences, np.int64),
        route_offsets=offsets_of(sequence_lengths(batch)),
    )


def load_of(sums: Sequence[Sequence[float]]) -> float | None:
    """Tokens of a layer's busiest expert over the mean of all, in the mean of layers; None: not
    counted."""
    if not sums:
        return None
    # The last four of `RouteCount.sums_F` are no experts.
    load_LE = np.array(sums)[:, :-4]
    return float((load_LE.max(1) / load_LE.mean(1)).mean())


def headline(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with a target; absent if one of their rows is."""
    rows = {(row["routing"], row["how"]): row for row in payload["rows"] if "error" not in row}
    found: dict[str, Any] = {"layers": payload["model"]["num_layers"]}
    how = next((how for routing, how in rows if routing == "even"), "")
    ours, own = rows.get(("even", how)), rows.get(("own", how))
    replicated = [row for (_, how), row in rows.items() if REPLICATED in how]
    transformers = rows.get(("own", TRANSFORMERS))
    if ours is not None:
        found["hardware_mfu"] = ours["hardware_mfu"]
        if replicated:
            found["over_replicated"] = replicated[0]["seconds"] / ours["seconds"]
    if own is not None and transformers is not None:
        found["over_transformers"] = transformers["seconds"] / own["seconds"]
    return found


def format_tables(result: Mapping[str, Any]) -> list[str]:
    """Lines of text."""
    return [
        line
        for columns, cells, num_text in _tables(result)
        for line in ("", *aligned([list(columns), *cells], num_text))
    ]


def markdown(result: Mapping[str, Any], result_link: str) -> Iterator[str]:
    """Lines of the document's section."""
    size, group = result["model"], FULL.paper
    stale = f" STALE: {result['stale']}." if "stale" in result else ""
    yield (
        f"\n{result['gpu']}, torch {result['versions']['torch']}, commit {result['commit'][:12]}: "
        f"{size['num_layers']} layers of {size['name']} in bfloat16, {group.prompt} prompt tokens "
        f"and {len(group.responses)} responses, forward and backward, with the memory of "
        f"`{result['optimizer_states']}` held.{stale} [Raw samples]({result_link}).\n"
    )
    for number, (columns, cells, num_text) in enumerate(_tables(result)):
        yield from [""] * (number > 0)
        yield from markdown_table(columns, cells, num_text)


def _tables(result: Mapping[str, Any]) -> Iterator[tuple[Sequence[str], list[list[str]], int]]:
    """Goals, rows and parts: columns, cells, and how many columns are text."""
    goals = [[name, f"{result[name]:.3f}", WANTED[name]] for name in WANTED if name in result]
    yield FIGURE_COLUMNS, goals, 1
    yield COLUMNS, _cells(result), 2
    for row in result["rows"]:
        if row["how"] == PROFILE and "parts_ms" in row:
            parts = [[name, f"{ms:.1f}"] for name, ms in row["parts_ms"].items()]
            yield ("part of a step", "ms"), parts, 1


COLUMNS = ("way", "routing", "busiest expert", "seconds", "hardware MFU", "peak GiB")


def _cells(result: Mapping[str, Any]) -> list[list[str]]:
    cells: list[list[str]] = []
    for row in result["rows"]:
        if row["how"] == PROFILE:
            continue
        if "error" in row:
            cells.append([row["how"], row["routing"], "", row["error"][:60], "", ""])
            continue
        load = "" if row.get("load") is None else f"{row['load']:.2f}x"
        seconds = row.get("seconds", row.get("update_s"))
        mfu = "" if "hardware_mfu" not in row else f"{row['hardware_mfu']:.3f}"
        peak = f"{row['peak_gib']:.1f}"
        cells.append([row["how"], row["routing"], load, f"{seconds:.3f}", mfu, peak])
    return cells


if __name__ == "__main__":
    main()
