"""Sections `layers` and `precision`: whole models of each family, over the recorded group.

`layers` runs forward and backward of packed rollouts, of the same layers with the libraries'
recurrence level by level, and of replicated rollouts by the libraries' kernels. `precision` holds
log-probs in bfloat16 against float32, packed and replicated.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.common.timing import release
from benchmarks.families.cudnn import CUDNN, CudnnAttention
from benchmarks.families.recurrences import FLA, reference_alone, switches
from benchmarks.step import varlen
from benchmarks.step.experts import POPULARITY, with_routes
from benchmarks.step.run import Row, Run, Scale, refusal
from benchmarks.step.subjects import Way
from benchmarks.step.varlen import FA2
from benchmarks.step.ways import (
    MAX_ERROR,
    Plan,
    Ways,
    compare_ways,
    load_packed,
    replicas,
    sample_in_turns,
)
from benchmarks.step.workload import FamilySize, Group, SeededBatch, make_batch, packed_batch
from harness.released_models import released
from ratoon.model.loader import backend_of_layers
from ratoon.model.policy_model import PolicyModel
from ratoon.planner.layer_kinds import Attention, GatedDelta
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.micro_batches import run_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A family's model.

    Attributes:
        model: Of `harness.released_models`.
        layers: As many as fit one GPU beside gradients and what libraries keep.
        precise_layers: Of `precision`, which holds the weights in float32, too.
        has_sinks: Whether its attention has sinks.
        max_error: Relative L2 error allowed between two 16-bit runs of `layers`.
    """

    model: str
    layers: int
    precise_layers: int
    has_sinks: bool = False
    max_error: float = MAX_ERROR


CASES = {
    "qwen3.5": Case(model="Qwen3.5-9B", layers=32, precise_layers=4),
    "qwen3.5-moe": Case(model="Qwen3.5-35B-A3B", layers=20, precise_layers=4),
    # Rounding adds up over its layers: gradients by FlashAttention-2 are as far from those in
    # float32 as ours, and from ours.
    "gpt-oss": Case(
        model="gpt-oss-20b", layers=24, precise_layers=4, has_sinks=True, max_error=0.2
    ),
    "gemma3": Case(model="Gemma-3-12B", layers=48, precise_layers=6),
    "glm4-moe": Case(model="GLM-4.5-Air", layers=7, precise_layers=2),
}
# What a CPU has in place of a model's sizes; fields that a configuration lacks are left out.
_TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 67, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "sliding_window": 6, "pad_token_id": 0,
}  # fmt: skip
PRECISE = "packed over replicated"
CUT = "micro_batch_sequences"
# Responses of the recorded group in `precision`, whose float32 attention is slow.
PRECISE_RESPONSES = 4


def cases(_scale: Scale) -> list[str]:
    return list(CASES)


def size_of(run: Run, case: Case, num_layers: int) -> FamilySize:
    """The model with this number of layers; a tiny one on a CPU."""
    config = released(case.model, num_layers)
    if run.device.type != "cuda":
        for name, value in _TINY.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
    return FamilySize(name=f"{case.model}, {num_layers} layers", config=config)


def measure_layers(
    run: Run,
    wanted: list[str],
    num_layers: int | None = None,
    library: str = FLA,
    *,
    has_levels: bool = True,
) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with its rows: ours, with `has_levels` level by level where there is a
    recurrence, and replicated. Ways take turns."""
    for name in wanted:
        if run.is_out_of_time:
            return
        case = CASES[name]
        size = size_of(run, case, num_layers or case.layers)
        try:
            order = ways_of(run, case, size, library, has_levels=has_levels)
            yield name, _compare(run, order, size, case.max_error)
        except Exception as error:  # noqa: BLE001  the next family may be served
            yield name, [{"how": "ours", "model": size.name, **refusal(error)}]
        release(run.device)


def _compare(run: Run, order: list[Way], size: FamilySize, max_error: float) -> list[Row]:
    batch = batch_of(run.scale.paper, size, run.seed)
    if run.device.type == "cuda":
        varlen.install()
        varlen.add_backend(CUDNN, CudnnAttention())
    num_tokens = packed_batch(batch).forest.num_tokens
    with switches() as choose:

        def activate(way: Way) -> int:
            choose(way.recurrence)
            return _kept_by_libraries(way, size, num_tokens)

        # One sample each, for the check and the memory; the timing is done in turns.
        ways = Ways(replace(run, num_samples=1), size, activate)
        rows = compare_ways(ways, batch, order, Plan(cuts=run.scale.cuts[-2:], max_error=max_error))
        cut = next((row[CUT] for row in rows if CUT in row), 1)
        rows = sample_in_turns(ways, batch, order, Plan(cuts=(cut,)), rows, run.num_samples)
    return [{"layers": size.config.num_hidden_layers, **row} for row in rows]


def batch_of(group: Group, size: FamilySize, seed: int) -> RolloutBatch:
    """The group's rollouts; those of a model with routers have recorded routes, as rounding would
    send a token to other experts in another way."""
    batch = make_batch((group,), size.config.vocab_size, seed)
    routed = [layer.mlp for layer in size.geometry.layers if layer.mlp.is_routed]
    if not routed:
        return batch
    return with_routes(batch, len(routed), routed[0], POPULARITY["even"], seed)


def _kept_by_libraries(way: Way, size: FamilySize, num_tokens: int) -> int:
    """Bytes, a little more: their own copies of inputs and results, and of the recurrence the
    products within chunks."""
    elements = 0
    for mixer in (layer.mixer for layer in size.geometry.layers):
        if isinstance(mixer, GatedDelta) and way.recurrence:
            elements += 2 * mixer.convolved_size + mixer.output_size + 64 * mixer.num_heads
        elif isinstance(mixer, Attention) and mixer.window is None and way.backend == CUDNN:
            elements += 2 * mixer.head_dim * (mixer.num_heads + mixer.num_kv_heads)
    return 2 * num_tokens * elements


def ways_of(run: Run, case: Case, size: FamilySize, library: str, *, has_levels: bool) -> list[Way]:
    """Ours first, replicated last."""
    is_gpu = run.device.type == "cuda"
    backend = backend_of_layers(size.config, "", run.device, run.scale.dtype, deterministic=False)
    has_delta = any(isinstance(x.mixer, GatedDelta) for x in size.geometry.layers)
    recurrence = library if is_gpu and has_delta else ""
    attention = (FA2 if case.has_sinks else CUDNN) if is_gpu else backend
    ours = Way(backend=backend, is_packed=True)
    by_level = [replace(ours, recurrence=recurrence)] if recurrence and has_levels else []
    return [ours, *by_level, Way(backend=attention, is_packed=False, recurrence=recurrence)]


def measure_precision(
    run: Run, wanted: list[str], num_layers: int | None = None
) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with one row: distances of log-probs from float32, and their ratio."""
    for name in wanted:
        if run.is_out_of_time:
            return
        case = CASES[name]
        size = size_of(run, case, num_layers or case.precise_layers)
        row: Row = {"how": PRECISE, "model": size.name}
        try:
            row |= _distances(run, size)
        except Exception as error:  # noqa: BLE001  the next family may be served
            row |= refusal(error)
        yield name, [row]
        release(run.device)


def _distances(run: Run, size: FamilySize) -> Row:
    """Over several drawn groups, each with its own weights."""
    paper = run.scale.paper
    group = Group(prompt=paper.prompt, responses=paper.responses[:PRECISE_RESPONSES])
    figures: dict[str, list[float]] = {"packed": [], "replicated": [], "samples": []}
    for seed in range(run.seed, run.seed + run.num_samples):
        if figures["samples"] and run.is_out_of_time:
            break
        drawn = replace(run, seed=seed, scale=replace(run.scale, dtype=torch.bfloat16))
        batch = batch_of(group, size, seed)
        packed, replicated, weights = _logprobs_16(drawn, size, batch)
        truth = _logprobs_32(drawn, size, batch, weights)
        distances = [float((each - truth).norm() / truth.norm()) for each in (packed, replicated)]
        figures["packed"].append(distances[0])
        figures["replicated"].append(distances[1])
        figures["samples"].append(distances[0] / distances[1])
        release(run.device)
    return {**figures, "ratio": statistics.median(figures["samples"])}


def _logprobs_16(
    run: Run, size: FamilySize, batch: RolloutBatch
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Packed and replicated, and the weights, on the host."""
    ways = Ways(run, size)
    backend = backend_of_layers(size.config, "", run.device, run.scale.dtype, deterministic=False)
    ours = Way(backend=backend, is_packed=True)
    policy = ways.policy(ours)
    packed = logprobs(policy, load_packed(ways, ours, batch))
    replicated = logprobs(policy, replicas(batch, 1, run))
    weights = {name: x.cpu() for name, x in ways.module.state_dict().items()}
    return packed, replicated, weights


def _logprobs_32(
    run: Run, size: FamilySize, batch: RolloutBatch, weights: Mapping[str, Tensor]
) -> Tensor:
    """Log-probs of each rollout alone, by reference kernels, with the same weights in float32."""
    exact = replace(run, scale=replace(run.scale, dtype=torch.float32))
    ways = Ways(exact, replace(size, config=copy.deepcopy(size.config)))
    ways.module.load_state_dict(dict(weights))
    with reference_alone():
        policy = ways.policy(Way(backend="reference", is_packed=False))
        return logprobs(policy, replicas(batch, 1, exact))


def logprobs(policy: PolicyModel, batches: list[SeededBatch]) -> Tensor:
    """Log-probs of each response token, float64 on the host."""
    found = [(seeded.column_L, _terms(policy, seeded)) for seeded in batches]
    logprob_J = torch.empty(sum(len(columns) for columns, _ in found), dtype=torch.float64)
    for columns, values in found:
        logprob_J[columns.cpu()] = values.double().cpu()
    return logprob_J


@torch.no_grad()
def _terms(policy: PolicyModel, seeded: SeededBatch) -> Tensor:
    return run_model(policy, seeded.batch).logprob_M[seeded.batch.term_target_L]
