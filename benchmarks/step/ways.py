"""Measures the ways to run a step over the same rollouts, and checks them against each other.

A way whose log-probs or gradients are not those of the replicated run has no figures, only the
reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.timing import held_gib, measure, release, require_time, timed
from benchmarks.step.run import Row, Run, refusal
from benchmarks.step.subjects import (
    LayerCalls,
    MemoryPlan,
    Way,
    compared_values,
    keep_the_least,
    keep_what_fits,
    layer_calls,
    open_policy,
    restore_calls,
    run_step,
)
from benchmarks.step.workload import (
    AnySize,
    FamilySize,
    SeededBatch,
    mfu,
    packed_batch,
    packed_work,
    replicated_batches,
    replicated_work,
    upload,
    waves,
)
from ratoon.errors import RatoonError
from ratoon.model.policy_model import PolicyModel
from ratoon.rollout.batch import RolloutBatch

# Timing in turns stops after these seconds (and the minimum of rounds), or this many rounds.
TURNS_S = 10.0
MAX_ROUNDS = 25
# A wrong mask gives errors of order 1.
MAX_ERROR = 0.1
LOGPROB = "logprob"


class Ways:
    """Owns one model's module, and a policy around it per backend, of which one is active."""

    def __init__(
        self, run: Run, size: AnySize, activate: Callable[[Way], int] = lambda _way: 0
    ) -> None:
        """`activate` is told of each way before it runs, and returns the bytes that its libraries
        keep for a backward beside what is planned."""
        self.run = run
        self._activate = activate
        self.spare_bytes = 0
        self.size = size
        self.module = run.module(size)
        self._opened: dict[str, tuple[PolicyModel, LayerCalls]] = {}

    def policy(self, way: Way) -> PolicyModel:
        """Activates and returns the policy of the way's backend; no other may run until asked for.

        Each is opened once, to keep what it compiled.
        """
        if way.backend not in self._opened:
            policy = open_policy(self.module, way)
            self._opened[way.backend] = (policy, layer_calls(self.module))
        self.spare_bytes = self._activate(way)
        policy, calls = self._opened[way.backend]
        restore_calls(self.module, calls)
        return policy

    def clear(self) -> None:
        """Drops gradients and returns free memory to the device."""
        self.module.zero_grad(set_to_none=True)
        release(self.run.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How rollouts are cut and which activations are kept.

    Attributes:
        cuts: Sequences per replicated micro-batch to try; the fastest is used.
        keeps_the_least: Recompute all but attention and allocate gradients up front, so that peaks
            compare; otherwise keep what fits.
        host_bytes: Host memory for what does not fit the device; with `keeps_the_least`, for stages
            that wait for others.
        max_error: Relative L2 error allowed between two 16-bit runs.
    """

    cuts: tuple[int, ...]
    keeps_the_least: bool = False
    host_bytes: int = 0
    max_error: float = MAX_ERROR

    def limit(
        self, policy: PolicyModel, batches: Sequence[SeededBatch], spare_bytes: int = 0
    ) -> MemoryPlan | None:
        """Limits the policy's activations for these micro-batches; `spare_bytes` of the device are
        for others."""
        held = [one for seeded in batches for one in seeded.held]
        if self.keeps_the_least:
            return keep_the_least(policy, held, host_bytes=self.host_bytes)
        gradients_stay = len(batches) > 1 or bool(batches[0].stages)
        return keep_what_fits(
            policy,
            held,
            gradients_stay=gradients_stay,
            host_bytes=self.host_bytes,
            spare_bytes=spare_bytes,
        )


def compare_ways(ways: Ways, batch: RolloutBatch, order: Sequence[Way], plan: Plan) -> list[Row]:
    """Rows of all ways over the same rollouts, checked against the replicated one if it ran."""
    return compare_each(
        ways, order, lambda way: measure_way(ways, way, batch, plan), plan.max_error
    )


def compare_each(
    ways: Ways,
    order: Sequence[Way],
    measure_one: Callable[[Way], tuple[Row, dict[str, Tensor]]],
    max_error: float = MAX_ERROR,
) -> list[Row]:
    """A checked row per way; `measure_one` returns figures, and values to compare it by."""
    found: list[tuple[Row, dict[str, Tensor]]] = []
    for way in order:
        try:
            found.append(measure_one(way))
        except Exception as error:  # noqa: BLE001  whatever a library raises goes into its row
            found.append(({"how": way.how, **refusal(error)}, {}))
        ways.clear()
    return check(order, found, max_error)


def measure_way(
    ways: Ways, way: Way, batch: RolloutBatch, plan: Plan
) -> tuple[Row, dict[str, Tensor]]:
    """Measures one variant: its figures, and values to compare it by.

    Raises:
        OutOfTimeError: The budget is spent.
        RuntimeError: An error of the backend or the device, such as out of memory.
        RatoonError: The service refuses it, as it does not fit.
    """
    run, policy = ways.run, ways.policy(way)
    require_time(run.stop_at, 0.0)
    row: Row = {"how": way.how, "model": ways.size.name}
    if way.is_packed:
        batches = load_packed(ways, way, batch)
        memory = plan.limit(policy, batches, ways.spare_bytes)
    else:
        cut, tried = _fastest_cut(ways, way, batch, plan)
        batches = replicas(batch, cut, run)
        memory = plan.limit(policy, batches, ways.spare_bytes)
        row |= {"micro_batch_sequences": cut, **tried}
    started = time.monotonic()
    # The warm-up: compiles, and fills the allocator's cache.
    # Values go to the host, so that every way has the same memory free.
    stay = plan.keeps_the_least
    compared = compared_values(policy, batches, gradients_stay=stay).items()
    values = {name: value.cpu() for name, value in compared}
    del compared
    row["warm_up_s"] = time.monotonic() - started
    ways.module.zero_grad(set_to_none=True)
    resident_gib = held_gib(run.device)
    measured = measure(
        lambda: run_step(policy, batches, gradients_stay=stay),
        run.device,
        num_samples=run.num_samples,
        stop_at=run.stop_at,
    )
    window = ways.size.window if isinstance(ways.size, FamilySize) else None
    work = packed_work(packed_batch(batch), window)
    replicated = replicated_work(batch, window)
    return {
        **row,
        "seconds": measured.seconds,
        "hardware_mfu": mfu(ways.size, work, measured.seconds),
        "logical_mfu": mfu(ways.size, replicated, measured.seconds),
        "peak_gib": measured.peak_gib,
        **memory_figures(policy, memory, measured.peak_gib, resident_gib),
        "packed_tokens": work.tokens,
        "replicated_tokens": replicated.tokens,
        "packed_pairs": work.pairs,
        "samples": measured.samples,
    }, values


def sample_in_turns(
    ways: Ways,
    batch: RolloutBatch,
    order: Sequence[Way],
    plan: Plan,
    rows: Sequence[Row],
    min_rounds: int,
) -> list[Row]:
    """The rows of `order`, timed again in rounds: each way once per round, starting in rotation.

    Args:
        ways: As `compare_ways` left it: everything compiled, little memory in use.
        batch: Must fit the device in the forms of all ways at once.
        order: Ways of one cut.
        plan: Has only that cut.
        rows: From `compare_ways`; those without figures are returned as they are.
        min_rounds: Run at least these, unless the budget is spent.
    """
    run = ways.run
    (cut,) = plan.cuts
    loaded = {
        i: load_packed(ways, way, batch) if way.is_packed else replicas(batch, cut, run)
        for i, way in enumerate(order)
        if "error" not in rows[i]
    }
    samples: dict[int, list[float]] = {i: [] for i in loaded}
    turns = list(loaded)
    stop_at = time.monotonic() + TURNS_S
    for done in range(MAX_ROUNDS):
        has_enough = done >= min_rounds and time.monotonic() > stop_at
        if has_enough or (done and run.is_out_of_time):
            break
        for i in turns:
            policy = ways.policy(order[i])
            plan.limit(policy, loaded[i], ways.spare_bytes)
            samples[i].append(timed(partial(run_step, policy, loaded[i]), run.device))
        turns = turns[1:] + turns[:1]
    del loaded
    ways.clear()
    return [_retimed(row, samples[i]) if i in samples else dict(row) for i, row in enumerate(rows)]


def _retimed(row: Row, samples: list[float]) -> Row:
    seconds = statistics.median(samples)
    rates = {name: row[name] * row["seconds"] / seconds for name in ("hardware_mfu", "logical_mfu")}
    return {**row, "seconds": seconds, **rates, "samples": samples}


def memory_figures(
    policy: PolicyModel, plan: MemoryPlan | None, peak: float, resident: float
) -> Row:
    """Memory in GiB beyond weights, measured and predicted, and beyond gradients; empty on a CPU.

    The latter is known only if all gradients exist at the peak. `peak` and `resident` are GiB at
    the peak, and with weights and inputs alone.
    """
    if plan is None:
        return {}
    parameters = policy.named_trainable().values()
    gradients = sum(p.numel() * p.element_size() for p in parameters) / 2**30
    return {
        **({"activation_gib": peak - resident - gradients} if plan.gradients_stay else {}),
        "gradients_stay": plan.gradients_stay,
        "beyond_weights_gib": peak - resident,
        "predicted_gib": plan.predicted_bytes / 2**30,
        "layers_kept": plan.layers,
        **({"layers_waiting": plan.waiting} if plan.waiting else {}),
    }


def check(
    order: Sequence[Way],
    found: list[tuple[Row, dict[str, Tensor]]],
    max_error: float = MAX_ERROR,
) -> list[Row]:
    """The rows with their errors against the first replicated way with figures, or else the first.

    If there are log-probs, also their drift from that way and from the first packed one of another
    backend.
    """
    ran = [i for i, (row, _) in enumerate(found) if "error" not in row]
    truth = min(ran, key=lambda i: (order[i].is_packed, i), default=-1)
    rows: list[Row] = []
    for i, (row, values) in enumerate(found):
        if i == truth or "error" in row:
            rows.append(row)
            continue
        errors = {name: relative_error(values[name], x) for name, x in found[truth][1].items()}
        wrong = {name: error for name, error in errors.items() if not error <= max_error}
        against: dict[str, Any] = {"against": found[truth][0]["how"], "errors": errors}
        if wrong:
            rows.append({"how": row["how"], "error": f"wrong: {wrong}", **against})
            continue
        second = [j for j in ran if order[j].is_packed and order[j].backend != order[i].backend]
        others = {found[j][0]["how"]: found[j][1] for j in (truth, *second[:1])}
        drifts = {
            how: drift(values[LOGPROB], other[LOGPROB])
            for how, other in others.items()
            if LOGPROB in values
        }
        rows.append({**row, **against, **({"drift": drifts} if drifts else {})})
    return rows


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    difference = torch.linalg.vector_norm((got - want).float())
    return float(difference / torch.linalg.vector_norm(want.float()))


def load_packed(ways: Ways, way: Way, batch: RolloutBatch) -> list[SeededBatch]:
    """The single packed micro-batch on the device, with its stages if the way streams it."""
    packed = packed_batch(batch)
    stages = waves(packed, way.wave) if way.wave else ()
    return [upload(batch, packed, ways.run.device, stages)]


def replicas(batch: RolloutBatch, cut: int, run: Run) -> list[SeededBatch]:
    """Replicated micro-batches of `cut` rollouts each, on the device."""
    return [upload(batch, packed, run.device) for packed in replicated_batches(batch, cut)]


def _fastest_cut(ways: Ways, way: Way, batch: RolloutBatch, plan: Plan) -> tuple[int, Row]:
    """The fastest cut on the first few rollouts, and the seconds of each.

    These rollouts are the largest cut's first micro-batch; each cut is warmed up.
    """
    if len(plan.cuts) == 1:
        return plan.cuts[0], {}
    policy, seconds = ways.policy(way), dict[int, float]()
    failed: Exception | None = None
    for cut in plan.cuts:
        batches = replicas(batch, cut, ways.run)
        first = batches[: max(plan.cuts) // cut]
        try:
            plan.limit(policy, batches, ways.spare_bytes)
            run_step(policy, first[:1])
            seconds[cut] = timed(partial(run_step, policy, first), ways.run.device)
        except (torch.OutOfMemoryError, RatoonError) as error:
            # Its frames would keep the memory alive.
            failed = error.with_traceback(None)
        ways.clear()
    if failed is not None and not seconds:
        raise failed
    tried = {str(cut): seconds.get(cut) for cut in plan.cuts}
    return min(seconds, key=lambda cut: seconds[cut]), {"tried_seconds": tried}


def drift(got_J: Tensor, other_J: Tensor) -> Row:
    """Mean and largest absolute difference, and the mean of exp(d) - 1 - d with d = got - other.

    The last is the k3 estimate of a KL divergence (Schulman, "Approximating KL divergence", 2020),
    taking the tokens as samples of `other`. Neither side is the truth: both round to the model's
    dtype.
    """
    d_J = got_J.double() - other_J.double()
    return {
        "mean_abs": float(d_J.abs().mean()),
        "max_abs": float(d_J.abs().max()),
        "k3": float((d_J.expm1() - d_J).mean()),
    }
