"""One Update on n GPUs, phase by phase, from constants: nothing here runs on a GPU.

Nodes have eight GPUs. Groups are data-parallel over ranks; optimizer states are sharded (Z1), sums
of gradients too (Z2), weights too, among the ranks of a node (Z3). No collective adds: owners add
what all ranks send them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.constants import GPU_BYTES, NODE, Model, Values
from benchmarks.scale.groups import Batch, deal, num_calls, split, turns
from benchmarks.step.workload import RoutedSize, StepWork, step_flops
from ratoon.planner.activation_plan import Kept, largest_plan, most_tokens, streamed_tokens
from ratoon.planner.device_costs import H200_RATES, recompute_s
from ratoon.train.numerics import plannable_bytes

# Bytes per parameter of bf16 weights, float32 sums, and 8-bit moments in blocks of 256.
_WEIGHTS, _SUMS, _MOMENTS = 2, 4, 2 + 8 / 256
# Layers whose weights are gathered at a time under Z3: the one that runs and the next.
_GATHERED_LAYERS = 2
# Splitting tries parts of twice a group's mean length, and halves of that.
_MOST_HALVINGS = 6
# Most parts per group or rank, whichever are more: further parts only repeat more prompts.
_MOST_PARTS = 8
# Exchanges of an Update: the agreed values, statuses, squares of the gradient, partial digests.
_EXCHANGES = 4


class Layout(StrEnum):
    Z1 = "Z1"
    Z2 = "Z2"
    Z3 = "Z3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Remedies; all off is the design as it stands.

    Attributes:
        by_node: Collectives, statuses and tasks go within nodes, then between them.
        bf16_sums: Z2 where Z1 would fit: bf16 gradients after each backward.
        plan_on_ranks: Each rank reads and plans its own groups; the leader only deals them.
        overlap: Z1's reduction begins with the last micro-batch's backward.
        split: Groups are cut into parts that repeat their prompt, where that is sooner done.
    """

    by_node: bool = False
    bf16_sums: bool = False
    plan_on_ranks: bool = False
    overlap: bool = False
    split: bool = False


AS_DESIGNED = Options()


def state_bytes(model: Model, layout: Layout, n: int) -> float:
    """Bytes of one GPU: weights, sums and moments, and the layers that Z3 gathers at a time."""
    count = model.num_parameters
    weights = _WEIGHTS * count / (min(n, NODE) if layout is Layout.Z3 else 1)
    sums = _SUMS * count / (1 if layout is Layout.Z1 else n)
    gathered = _GATHERED_LAYERS * _layer_bytes(model) if layout is Layout.Z3 else 0
    return weights + sums + _MOMENTS * count / n + gathered


def _layer_bytes(model: Model) -> float:
    embeddings = 2 * model.size.vocab_size * model.size.hidden_size
    return _WEIGHTS * (model.num_parameters - embeddings) / model.size.num_layers


def free_bytes(model: Model, layout: Layout, n: int, gpu: str, c: Values) -> int:
    """Bytes that one GPU has for activations, by the service's own reserve."""
    held = state_bytes(model, layout, n) + (1e9 * c["collectives"] if n > 1 else 0)
    return plannable_bytes(GPU_BYTES[gpu], math.ceil(held))


def first_layout(model: Model, n: int, gpu: str, c: Values) -> Layout | None:
    """The first that leaves room to stream a group: its prompt and its longest response."""
    needed = int(c["prompt"] + c["longest"])
    for layout in Layout:
        if streamed_tokens(model.sizes, free_bytes(model, layout, n, gpu, c), 0) >= needed:
            return layout
    return None


def all_to_all_bytes(size_bytes: float, n: int, *, by_node: bool) -> tuple[float, float]:
    """Bytes that one rank sends within its node and between nodes; `size_bytes` is what it has."""
    local = min(n, NODE)
    if by_node:
        nodes = n / local
        return size_bytes * (local - 1) / local, size_bytes / local * (nodes - 1) / nodes
    return size_bytes * (local - 1) / n, size_bytes * (n - local) / n


def all_to_all_s(size_bytes: float, calls: float, n: int, c: Values, *, by_node: bool) -> float:
    """Seconds; flat, both links work at once, by node one after the other."""
    within, between = all_to_all_bytes(size_bytes, n, by_node=by_node)
    within_s = within / (1e9 * c["all_to_all"])
    peers = n / NODE - 1 if by_node else n - NODE
    between_s = between / (1e9 * c["between"]) + max(0.0, peers) * calls * 1e-6 * c["message_us"]
    return within_s + between_s if by_node else max(within_s, between_s)


def all_gather_s(size_bytes: float, calls: float, n: int, c: Values, *, by_node: bool) -> float:
    """Seconds of rings: what enters a node comes once, over all its links, and goes round in it."""
    local = min(n, NODE)
    nodes = n // local
    hops = nodes + local - 2 if by_node else n - 1
    within_s = size_bytes * (n - 1) / n / (1e9 * c["all_gather"])
    between_s = size_bytes / local * (nodes - 1) / nodes / (1e9 * c["between"])
    return max(within_s, between_s) + calls * hops * 1e-6 * c["hop_us"]


def between_nodes_s(size_bytes: float, n: int, c: Values) -> float:
    """Seconds in which each node gets what the others have stepped: each GPU sends its share to one
    of each other node. `size_bytes`: of all shares."""
    nodes = max(1.0, n / NODE)
    calls = 1e-6 * size_bytes / n / c["bucket"]
    sent = size_bytes / n * (nodes - 1) / (1e9 * c["between"])
    return sent + (nodes - 1) * math.ceil(calls) * 1e-6 * c["message_us"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One simulated Update: seconds by phase, which add up to `seconds`.

    Attributes:
        phases: `compute` is what n GPUs need at least; what they wait for each other and what
            memory makes them run again are phases of their own.
        publish_s: Publication during the next Update; `phases` has the excess over one.
    """

    layout: Layout
    phases: dict[str, float]
    publish_s: float

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def simulate(
    model: Model, batch: Batch, n: int, layout: Layout, c: Values, options: Options = AS_DESIGNED
) -> Update:
    """Simulates one Update of `batch` on n H200, compared with a single one that is assumed to have
    the memory."""
    if options.bf16_sums and layout is Layout.Z1:
        layout = Layout.Z2
    run = _run(model, batch, n, layout, c, options)
    count, calls = model.num_parameters, 1e-6 / c["bucket"]
    nodes = max(1.0, n / NODE)
    peers = (nodes + min(n, NODE) - 2) if options.by_node else n - 1
    mine = math.ceil(batch.num_groups / n) if options.plan_on_ranks else batch.num_groups
    read = min(batch.num_groups, mine * NODE)
    weights = _WEIGHTS * count
    if layout is Layout.Z3:
        gather = between_nodes_s(weights, n, c)
    else:
        gather = all_gather_s(weights, weights * calls, n, c, by_node=options.by_node)
    phases = {
        "call": 1e-3 * c["call_ms"] * num_calls(batch, c),
        "plan": 1e-3 * (c["plan_ms"] * mine + c["deal_ms"] * batch.num_groups),
        "send": 1e-3 * (c["ray_ms"] * (peers + 1) + c["decode_ms"] * mine)
        + 1e-3 * read * c["body_mb"] / c["storage"],
        "status": _EXCHANGES * 2 * peers * 1e-6 * c["status_us"],
        "compute": run.compute_s,
        "again": run.again_s,
        "waiting": run.waiting_s,
        "reduce": run.reduce_s,
        "step": 1e-12 * c["step_ms"] * count / n,
        "gather": gather,
        "digest": (_WEIGHTS + _MOMENTS) * count / n / (1e12 * c["hbm"]),
        "copy": weights / n / (1e9 * c["to_host"]),
    }
    publish_s = weights / n / (1e9 * c["write"])
    if n > NODE:
        publish_s = max(publish_s, weights / nodes / (1e9 * c["storage"]))
    phases["publish"] = max(0.0, publish_s - sum(phases.values()))
    return Update(layout=layout, phases=phases, publish_s=publish_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Seconds of forwards and backwards, and of the communication that they do not hide.

    Attributes:
        compute_s: Seconds of the uncut batch, nothing recomputed, over n.
        again_s: What is run again for want of memory, or for groups that are split, over n.
        waiting_s: Excess of the last rank over the mean; in Z2 and Z3 at each micro-batch.
    """

    compute_s: float
    again_s: float
    waiting_s: float
    reduce_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.again_s + self.waiting_s + self.reduce_s


def _run(model: Model, batch: Batch, n: int, layout: Layout, c: Values, options: Options) -> _Run:
    is_routed = isinstance(model.size, RoutedSize)
    rate = c["mfu_experts" if is_routed else "mfu"] * 1e12 * c["peak"]
    compute_s = float(_flops(model, batch).sum()) / rate / n
    again_s = _again_s(model, n, layout, rate, c)
    cuts = [batch]
    if options.split and n > 1:
        mean_rows = c["responses"] * c["response"]
        cuts += [split(batch, mean_rows / 2**i, c) for i in range(-1, _MOST_HALVINGS)]
    runs: list[_Run] = []
    for cut in cuts:
        if cut.num_groups > _MOST_PARTS * max(n, batch.num_groups):
            continue
        ranks = deal(_flops(model, cut) / rate + cut.tokens_G * again_s, n)
        turns_K, mean_s = turns(ranks), sum(map(sum, ranks)) / n
        in_step = layout is not Layout.Z1
        last_s = float(turns_K.sum()) if in_step else max(map(sum, ranks))
        runs.append(
            _Run(
                compute_s=compute_s,
                again_s=mean_s - compute_s,
                waiting_s=last_s - mean_s,
                reduce_s=_reduce_s(model, layout, n, turns_K, c, options),
            )
        )
    return min(runs, key=lambda run: run.seconds)


def _flops(model: Model, batch: Batch) -> NDArray[np.float64]:
    """FLOPs of each group's forward and backward, without recomputation: linear in tokens, rows and
    pairs."""
    token, row, pair = (
        step_flops(model.size, StepWork(tokens=t, rows=r, pairs=p))
        for t, r, p in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    )
    return token * batch.tokens_G + row * batch.rows_G + pair * batch.pairs_G


def _again_s(model: Model, n: int, layout: Layout, rate: float, c: Values) -> float:
    """Seconds per token that memory costs a group of mean length: run at once, or streamed."""
    if n == 1:
        return 0.0
    sizes, rates = model.sizes, replace(H200_RATES, linear_flops=rate)
    free, held = free_bytes(model, layout, n, "H200", c), int(c["prompt"] + c["longest"])
    tokens = int(c["prompt"] + c["responses"] * c["response"])
    streamed = c["streamed"] * step_flops(model.size, StepWork(tokens=1, rows=0, pairs=0)) / rate
    ways = [
        streamed + recompute_s(sizes, rates, (kept,) * sizes.num_layers)
        for kept in (Kept.PRODUCTS, Kept.NARROW, Kept.ATTENTION)
        if most_tokens(sizes, free, kept, is_streamed=True) >= held
    ]
    at_once = largest_plan(sizes, tokens, free, 0)
    return min(ways + ([] if at_once is None else [recompute_s(sizes, rates, at_once)]))


def _reduce_s(
    model: Model,
    layout: Layout,
    n: int,
    turns_K: NDArray[np.float64],
    c: Values,
    options: Options,
) -> float:
    """Seconds of communication of gradients, and under Z3 of weights, that nothing hides."""
    if n == 1:
        return 0.0
    by_node, gradients = options.by_node, _WEIGHTS * model.num_parameters
    if layout is Layout.Z1:
        sums = _SUMS * model.num_parameters
        seconds = all_to_all_s(sums, 1e-6 * sums / c["bucket"], n, c, by_node=by_node)
        hidden = c["backward"] * float(turns_K[-1]) if options.overlap else 0.0
        return max(0.0, seconds - hidden)
    if layout is Layout.Z2:
        seconds = all_to_all_s(gradients, 1e-6 * gradients / c["bucket"], n, c, by_node=by_node)
        return _exposed(seconds, c["backward"] * turns_K)
    layers = model.size.num_layers
    seconds = all_to_all_s(gradients, layers, n, c, by_node=by_node)
    seconds += 2 * all_gather_s(gradients, layers, min(n, NODE), c, by_node=by_node)
    return _exposed(seconds, turns_K)


def _exposed(seconds: float, hidden_K: NDArray[np.float64]) -> float:
    """Seconds by which each micro-batch's communication exceeds the work that it overlaps."""
    return float(np.maximum(0.0, seconds - hidden_K).sum())
