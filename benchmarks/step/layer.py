"""Section `table2`: one decoder layer, forward and backward, on groups of long prompts.

Enters a run, leaves the rows of each (P, N). Invariant: hidden states and gradients of the output
are the same in all ways; a replicated token whose twin has been run has a gradient of zero, so that
gradients summed over the replicas are those of the packed group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.step.rollouts import (
    Group,
    make_batch,
    packed_batch,
    packed_work,
    replicated_batches,
    replicated_work,
)
from benchmarks.step.run import Row, Run, Scale, refusal
from benchmarks.step.sizes import StepWork, mfu
from benchmarks.step.subjects import Way, compared_gradients, layer_step
from benchmarks.step.timing import measure as measure_samples
from benchmarks.step.timing import require_time
from benchmarks.step.ways import Ways, check
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import PackedBatch
from ratoon.rollout.paths import response_tokens
from ratoon.train.device_batch import DeviceBatch, to_device

# A replicated micro-batch has up to 4 sequences, and no more tokens than fill the device.
MAX_CUT, CUT_TOKENS = 4, 65_536
# Embedding and head are not run.
VOCAB_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """One micro-batch: packed index of each token, and the layer's input and output gradient."""

    batch: DeviceBatch
    source_T: Tensor
    hidden_TD: Tensor
    dout_TD: Tensor


def cases(scale: Scale) -> list[str]:
    return [f"{prompt}x{count}" for prompt, count in scale.table2]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case and its rows: ours, replicated, and `flash` where it is among the ways."""
    scale = run.scale
    size = replace(
        scale.model, name=f"{scale.model.name}, 1 layer", num_layers=1, vocab_size=VOCAB_SIZE
    )
    ways = Ways(run, size)
    others = [Way(backend=name, is_packed=True) for name in scale.packed[1:] if name == "flash"]
    for prompt, count in scale.table2:
        case = f"{prompt}x{count}"
        if case not in wanted or run.is_out_of_time:
            continue
        group = Group(prompt=prompt, responses=scale.paper.responses[:count])
        batch = make_batch((group,), VOCAB_SIZE, run.seed)
        yield case, _compare(ways, batch, [scale.ours, scale.baseline, *others])


def _compare(ways: Ways, batch: RolloutBatch, order: Sequence[Way]) -> list[Row]:
    packed = packed_batch(batch)
    generator = torch.Generator(ways.run.device).manual_seed(ways.run.seed)
    shape = (2, packed.forest.num_tokens, ways.size.hidden_size)
    hidden_TD, dout_TD = torch.randn(
        shape, generator=generator, device=ways.run.device, dtype=ways.run.scale.dtype
    )
    found: list[tuple[Row, dict[str, Tensor]]] = []
    for way in order:
        try:
            found.append(_measure_way(ways, way, batch, packed, hidden_TD, dout_TD))
        except Exception as error:  # noqa: BLE001  whatever a library raises is its row's content
            found.append(({"how": way.how, **refusal(error)}, {}))
        ways.clear()
    return check(order, found)


def _measure_way(
    ways: Ways,
    way: Way,
    batch: RolloutBatch,
    packed: PackedBatch,
    hidden_TD: Tensor,
    dout_TD: Tensor,
) -> tuple[Row, dict[str, Tensor]]:
    run, policy = ways.run, ways.policy(way)
    require_time(run.stop_at, 0.0)
    row: Row = {"how": way.how, "model": ways.size.name}
    if way.is_packed:
        parts = [packed]
    else:
        cut = _cut(batch)
        parts = replicated_batches(batch, cut)
        row["micro_batch_sequences"] = cut
    inputs = _load(batch, packed, parts, hidden_TD, dout_TD)
    steps = [layer_step(policy, way, part.batch) for part in inputs]

    def run_all() -> list[Tensor]:
        policy.module.zero_grad(set_to_none=True)
        return [
            step(part.hidden_TD, part.dout_TD) for step, part in zip(steps, inputs, strict=True)
        ]

    dhidden_TD = torch.zeros_like(hidden_TD, dtype=torch.float32)
    for part, gradient_TD in zip(inputs, run_all(), strict=True):
        dhidden_TD.index_add_(0, part.source_T, gradient_TD.float())
    values = {"hidden": dhidden_TD, **compared_gradients(policy)}
    measured = measure_samples(
        run_all, run.device, num_samples=run.num_samples, stop_at=run.stop_at
    )
    work, replicated = packed_work(packed), replicated_work(batch)
    return {
        **row,
        "seconds": measured.seconds,
        "hardware_mfu": mfu(ways.size, _without_head(work), measured.seconds),
        "logical_mfu": mfu(ways.size, _without_head(replicated), measured.seconds),
        "peak_gib": measured.peak_gib,
        "packed_tokens": work.tokens,
        "replicated_tokens": replicated.tokens,
        "samples": measured.samples,
    }, values


def _cut(batch: RolloutBatch) -> int:
    longest = int(np.diff(batch.response_offsets).max() + np.diff(batch.prompt_offsets).max())
    return max(1, min(MAX_CUT, CUT_TOKENS // longest, batch.num_sequences))


def _without_head(work: StepWork) -> StepWork:
    return replace(work, rows=0)


def _load(
    batch: RolloutBatch,
    packed: PackedBatch,
    parts: Sequence[PackedBatch],
    hidden_TD: Tensor,
    dout_TD: Tensor,
) -> list[LayerInputs]:
    """Inputs of each micro-batch, gathered from those of the packed one."""
    device = hidden_TD.device
    if parts[0] is packed:
        everything_T = torch.arange(len(hidden_TD), device=device)
        return [
            LayerInputs(
                batch=to_device(packed, device),
                source_T=everything_T,
                hidden_TD=hidden_TD,
                dout_TD=dout_TD,
            )
        ]
    paths = _paths(batch, packed)
    is_run = np.zeros(packed.forest.num_tokens, np.bool_)
    loaded: list[LayerInputs] = []
    for part in parts:
        is_owner: list[NDArray[np.bool_]] = []
        for sequence in part.forest.sequences.tolist():
            is_owner.append(~is_run[paths[sequence]])
            is_run[paths[sequence]] = True
        source = np.concatenate([paths[s] for s in part.forest.sequences.tolist()])
        source_T = torch.from_numpy(source).to(device)
        owner_T1 = torch.from_numpy(np.concatenate(is_owner)).to(device)[:, None]
        loaded.append(
            LayerInputs(
                batch=to_device(part, device),
                source_T=source_T,
                hidden_TD=hidden_TD[source_T],
                dout_TD=dout_TD[source_T].where(owner_T1, 0),
            )
        )
    return loaded


def _paths(batch: RolloutBatch, packed: PackedBatch) -> list[NDArray[np.int64]]:
    """Packed index of each token of each sequence of the one group."""
    tokens = response_tokens(batch, packed.forest)
    packed_of_column = np.empty(len(batch.loss_mask), np.int64)
    packed_of_column[tokens.column] = tokens.packed
    prompt = np.arange(int(batch.prompt_offsets[1]))
    bounds = batch.response_offsets.tolist()
    return [
        np.concatenate([prompt, packed_of_column[start:stop]]) for start, stop in pairwise(bounds)
    ]
