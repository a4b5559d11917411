"""Reports: sums and counters become means, and FLOPs a share of the device's peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RouteSums
from ratoon.planner.costs import measure
from ratoon.planner.layer_kinds import Layer, window_of, window_of_layers
from ratoon.rollout.advantages import zero_variance_groups
from ratoon.rollout.bad import bad_rollouts
from ratoon.rollout.batch import RolloutBatch, sequence_lengths
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.raw import MAX_ID
from ratoon.rollout.selection import trained_lengths
from ratoon.train.additive import mean
from ratoon.train.gradient_window import Totals, divide_number, of_batch
from ratoon.train.loss.ratios import clamp_k3
from ratoon.train.loss.spec import CounterDivisor, NoDivisor
from ratoon.train.numerics import peak_memory_bytes
from ratoon.train.passes import ForwardColumns, PassTotals
from ratoon.train.prepare import Prepared, PreparedForward, run_sequences
from ratoon.train.rollout_figures import FoundRollouts
from ratoon.train.self_check import SelfCheckOutcome
from ratoon.train.verdicts import pass_warnings
from ratoon_proto.types import DivideBy, GroupReport, PhaseSeconds, RouterReport, StepReport

# Dense bfloat16 peak, FLOP/s, by a part of the device's name; the first that fits.
_BF16_PEAKS = (("H200", 989e12), ("H100", 989e12), ("A100", 312e12), ("B200", 2250e12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that decide the work. Parameters are of the decoder layers, active ones per token."""

    layer_parameters: float
    trained_layer_parameters: float
    head_is_trained: bool
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    # Rank of an adapter on the LM head; 0: there is none.
    head_adapter_size: int = 0

    @property
    def window(self) -> int | None:
        """The window of all layers that have one; None: no layer has."""
        return window_of_layers(self.layers)

    @property
    def head_adapter_parameters(self) -> int:
        return self.head_adapter_size * (self.hidden_size + self.vocab_size)

    def mixer_flops(self, work: Work) -> tuple[float, float]:
        """FLOPs of one forward: of attention's pairs, and of recurrences."""
        of_pairs = recurrent = 0.0
        for mixer in (layer.mixer for layer in self.layers):
            pairs = work.pairs if window_of(mixer) is None else work.near_pairs
            of_pairs += 4 * mixer.pair_elements * pairs
            recurrent += mixer.token_flops * work.tokens
        return of_pairs, recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass over a batch runs through the model."""

    tokens: int
    # Rows that reach the LM head.
    rows: int
    # (query, key) pairs of one head of one layer; of one with a window, 0 if there is none.
    pairs: int
    near_pairs: int = 0


def geometry(model: PolicyModel) -> Geometry:
    """Read the sizes off a model; of routed experts the share that one token visits."""
    experts = model.sizes.experts
    active = experts.experts_per_token / experts.num_experts
    head = model.lm_head
    outside = {id(model.module.get_input_embeddings().weight), id(head.weight_VD)}
    if head.adapter is not None:
        outside |= {id(head.adapter.a_AD), id(head.adapter.b_VA)}
    all_layers = trained_layers = 0.0
    for name, parameter in model.module.named_parameters():
        # A of an embedding's adapter is looked up; B multiplies each token's column.
        if id(parameter) in outside or ".lora_embedding_A." in name:
            continue
        share = active if ".experts." in name else 1.0
        all_layers += share * parameter.numel()
        trained_layers += share * parameter.numel() * parameter.requires_grad
    return Geometry(
        layer_parameters=all_layers,
        trained_layer_parameters=trained_layers,
        head_is_trained=head.weight_VD.requires_grad,
        layers=model.sizes.layers,
        hidden_size=model.sizes.hidden_size,
        vocab_size=int(head.weight_VD.shape[0]),
        head_adapter_size=model.sizes.head_adapter_size,
    )


def logical_work(batch: RolloutBatch, plan: UpdatePlan, window: int | None = None) -> Work:
    """What replicated batches would run, attention counted without its causal half: each token with
    its whole sequence, or as much of it as `window`."""
    run = run_sequences(plan)
    length_S = sequence_lengths(batch)[run]
    trained_S = trained_lengths(batch, batch.loss_mask)[run]
    return Work(
        tokens=plan.unshared_tokens,
        rows=int(trained_S.sum()),
        pairs=int((length_S**2).sum()),
        near_pairs=int((length_S * np.minimum(length_S, window or 0)).sum()),
    )


def packed_work(run: Prepared | PreparedForward, rows: int, window: int | None) -> Work:
    """What a plan runs, with `rows` rows of the LM head."""
    near_pairs = 0
    if window is not None:
        sizes = measure(run.batch, run.prefixes, window)
        parts = (np.sort(run.prefixes.rank[[*part.sequences]]) for part in run.plan.micro_batches)
        near_pairs = sum(sizes.work(places).near_pairs for places in parts)
    plan = run.plan
    return Work(
        tokens=plan.packed_tokens, rows=rows, pairs=plan.packed_pairs, near_pairs=near_pairs
    )


def training_flops(sizes: Geometry, work: Work, *, moves_logprobs: bool = True) -> float:
    """FLOPs of one forward and backward; recomputation is not counted.

    A weight costs 2 a token forward, 2 for the gradient of its input and 2 for its own where it is
    trained; the LM head's only the forward, unless log-probs have a gradient. A (query, key) pair
    costs 14 a head dimension: two products forward, five backward. A recurrence costs its forward
    three times.
    """
    layers = work.tokens * (4 * sizes.layer_parameters + 2 * sizes.trained_layer_parameters)
    per_head_weight = 2 + moves_logprobs * (4 if sizes.head_is_trained else 2)
    head = per_head_weight * sizes.vocab_size * sizes.hidden_size * work.rows
    head += 6 * sizes.head_adapter_parameters * work.rows
    of_pairs, recurrent = sizes.mixer_flops(work)
    return float(layers + head + 14 / 4 * of_pairs + 3 * recurrent)


def forward_flops(sizes: Geometry, work: Work) -> float:
    """FLOPs of one forward alone."""
    layers = 2 * work.tokens * sizes.layer_parameters
    weights = sizes.vocab_size * sizes.hidden_size + sizes.head_adapter_parameters
    head = 2 * weights * work.rows
    return float(layers + head + sum(sizes.mixer_flops(work)))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device for `dtype`; None where it is not known, as on any CPU."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """Share of the peak; None without a peak or a time."""
    if peak is None or seconds <= 0:
        return None
    return flops / seconds / peak


class UsageMeter:
    """Holds the sizes of one model and the peak of its devices, of which each has it whole."""

    def __init__(self, model: PolicyModel, num_devices: int) -> None:
        self._device = model.device
        self._geometry = geometry(model)
        peak = peak_flops(model.device, model.lm_head_VD.dtype)
        self._peak_flops = None if peak is None else peak * num_devices

    def figures(
        self,
        run: Prepared | PreparedForward,
        flops: Callable[[Geometry, Work], float],
        rows: int,
        seconds: float,
    ) -> dict[str, float | int | None]:
        """Fields of a `StepReport`: shares of the peak, None where it is not known, and memory.

        Args:
            run: What was run.
            flops: `training_flops` or `forward_flops`.
            rows: Distinct predicting rows that were run.
            seconds: Time that it took.
        """
        window = self._geometry.window
        packed = packed_work(run, rows, window)
        hardware, logical = (
            utilisation(flops(self._geometry, work), seconds, self._peak_flops)
            for work in (packed, logical_work(run.batch, run.plan, window))
        )
        return {
            "hardware_mfu": hardware,
            "logical_mfu": logical,
            "peak_memory_bytes": peak_memory_bytes(self._device),
        }


def forward_backward_report(
    found: FoundRollouts,
    totals: Totals,
    done: PassTotals,
    meter: UsageMeter,
    self_check: SelfCheckOutcome,
) -> StepReport:
    """Report of one forward-backward.

    Its losses are divided by the loss's own counter; by 1 if that is a constant, which only the
    step knows.
    """
    prepared = found.prepared
    by = prepared.loss.default_divide_by
    own = NoDivisor() if by in (DivideBy.CONSTANT, DivideBy.NONE) else CounterDivisor(counter=by)
    divisor = divide_number(own, totals.counters)
    seconds = PhaseSeconds(plan=prepared.seconds, forward=done.forward_s, backward=done.backward_s)
    flops = partial(training_flops, moves_logprobs=prepared.loss.moves_logprobs)
    usage = meter.figures(prepared, flops, done.rows, done.forward_s + done.backward_s)
    report = _packing_report(prepared.plan, seconds, usage, done.rank_seconds)
    sums = pass_warnings(found, totals.sums)
    return replace(
        _with_totals(report, totals, divisor),
        self_check=self_check.report,
        groups=_group_reports(prepared.batch) if prepared.loss.report_groups else (),
        bad_rollouts=bad_rollouts(prepared.batch),
        warnings=(*prepared.warnings, *sums, *self_check.warnings),
    )


def _group_reports(batch: RolloutBatch) -> tuple[GroupReport, ...]:
    """Reports of all groups as sent, but for bad rollouts."""
    starts, counts_G = batch.group_offsets[:-1], np.diff(batch.group_offsets)
    lengths_G = np.add.reduceat(np.diff(batch.response_offsets), starts) / counts_G
    reports = [
        GroupReport(group_id=group_id[:MAX_ID], num_rollouts=count, response_length_mean=length)
        for group_id, count, length in zip(
            batch.group_ids, counts_G.tolist(), lengths_G.tolist(), strict=True
        )
    ]
    if batch.rewards is None:
        return tuple(reports)
    mean_G = np.add.reduceat(batch.rewards, starts) / counts_G
    square_S = np.square(batch.rewards - np.repeat(mean_G, counts_G))
    figures = {
        "reward_mean": mean_G,
        "reward_std": np.sqrt(np.add.reduceat(square_S, starts) / counts_G),
        "reward_min": np.minimum.reduceat(batch.rewards, starts),
        "reward_max": np.maximum.reduceat(batch.rewards, starts),
        "zero_variance": zero_variance_groups(batch.rewards, batch.group_offsets),
    }
    columns = zip(*(values.tolist() for values in figures.values()), strict=True)
    return tuple(
        replace(report, **dict(zip(figures, values, strict=True)))
        for report, values in zip(reports, columns, strict=True)
    )


def step_report(
    stepped: StepReport, totals: Totals, divisor: float, optimizer_s: float
) -> StepReport:
    """Report of an optimizer step, whose other figures are of its whole window."""
    seconds = replace(stepped.seconds, optimizer=optimizer_s)
    return replace(_with_totals(stepped, totals, divisor), seconds=seconds)


def forward_report(
    prepared: PreparedForward, columns: ForwardColumns, meter: UsageMeter
) -> StepReport:
    """Report of one Forward, over all trained tokens of the batch."""
    batch, mask_J = prepared.batch, prepared.batch.loss_mask
    seconds = PhaseSeconds(plan=prepared.seconds, forward=columns.forward_s)
    usage = meter.figures(prepared, forward_flops, columns.rows, columns.forward_s)
    report = replace(
        _packing_report(prepared.plan, seconds, usage, columns.rank_seconds),
        **of_batch(batch).figures(),
        entropy=float(columns.entropy_J[mask_J].mean(dtype=np.float64)) if mask_J.any() else None,
        num_groups=batch.num_groups,
        num_sequences=batch.num_sequences,
        trained_tokens=int(mask_J.sum()),
    )
    raw_J = np.repeat(batch.sampler_is_raw, np.diff(batch.response_offsets))
    usable_J = mask_J & ~raw_J
    if batch.sampler_logprobs is None or not usable_J.any():
        return report
    gap = columns.logprob_J[usable_J].astype(np.float64) - batch.sampler_logprobs[usable_J]
    kl, is_clamped = clamp_k3(torch.from_numpy(gap))
    return replace(
        report,
        sampler_kl=float(kl.mean()),
        sampler_gap_mean=float(gap.mean()),
        sampler_gap_abs_mean=float(np.abs(gap).mean()),
        sampler_gap_max=float(np.abs(gap).max()),
        clamped_sampler_gaps=int(is_clamped.sum()),
    )


def _with_totals(report: StepReport, totals: Totals, divisor: float) -> StepReport:
    """`report` with all that adds up over the calls of a window."""
    counters = totals.counters
    return replace(
        report,
        **totals.sums.figures(divisor, has_kl=totals.has_kl),
        **totals.batch.figures(),
        routers=_routers(totals.routes),
        route_mismatch=_route_mismatch(totals.routes),
        num_groups=counters.groups,
        num_sequences=counters.sequences,
        trained_tokens=counters.tokens,
    )


def _routers(routes: RouteSums) -> tuple[RouterReport, ...]:
    return tuple(
        RouterReport(
            layer=layer,
            max_load=max(load) * len(load) / sum(load),
            unused_experts=load.count(0.0),
            entropy=entropy / tokens,
        )
        for layer, (*load, tokens, entropy, _, _) in zip(routes.layers, routes.sums, strict=True)
    )


def _route_mismatch(routes: RouteSums) -> float | None:
    """Share of recorded routes, over all layers, that the routers would not take themselves."""
    sums = [of_layer[-2:] for of_layer in routes.sums]
    return mean(sum(other for _, other in sums), sum(recorded for recorded, _ in sums))


def _packing_report(
    plan: UpdatePlan,
    seconds: PhaseSeconds,
    usage: Mapping[str, Any],
    rank_seconds: tuple[float, ...],
) -> StepReport:
    """What a plan packed, and how fast it ran; `rank_seconds` is empty on a single rank."""
    wall_s = seconds.plan + seconds.forward + seconds.backward
    return StepReport(
        unshared_tokens=plan.unshared_tokens,
        packed_tokens=plan.packed_tokens,
        token_reduction=mean(plan.unshared_tokens, plan.packed_tokens),
        attention_pair_reduction=mean(plan.replicated_pairs, plan.packed_pairs),
        num_micro_batches=len(plan.micro_batches),
        seconds=seconds,
        rank_seconds=rank_seconds,
        rank_gap=plan.rank_gap if rank_seconds else None,
        tokens_per_second=mean(plan.unshared_tokens, wall_s) if plan.packed_tokens else None,
        **usage,
    )
