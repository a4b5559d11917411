"""One way to run a step over some rollouts, measured and held against the others.

Enters a model, a way and rollouts, leaves a row of figures, or one with the reason why there are
none. Invariant: a way whose log-probs or gradients are not those of the replicated run has no
figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.step.drift import drift
from benchmarks.step.memory_plan import MemoryPlan, keep_the_least, keep_what_fits
from benchmarks.step.rollouts import (
    SeededBatch,
    packed_batch,
    packed_work,
    replicated_batches,
    replicated_work,
    upload,
    waves,
)
from benchmarks.step.run import Row, Run, refusal
from benchmarks.step.sizes import ModelSize, mfu
from benchmarks.step.subjects import (
    LayerCalls,
    Way,
    compared_values,
    layer_calls,
    open_policy,
    restore_calls,
    run_step,
)
from benchmarks.step.timing import held_gib, measure, release, require_time, timed
from ratoon.errors import RatoonError
from ratoon.model.policy_model import PolicyModel
from ratoon.rollout.batch import RolloutBatch

# Of ways timed in turns: rounds go on for so long, and for so many at most.
TURNS_S = 10.0
MAX_ROUNDS = 25
# Relative L2 errors between two 16-bit runs; a wrong mask gives errors of order 1.
MAX_ERROR = 0.1
LOGPROB = "logprob"


class Ways:
    """Owns the module of one model and the policy around it, that of one way at a time."""

    def __init__(self, run: Run, size: ModelSize) -> None:
        self.run = run
        self.size = size
        self.module = run.module(size)
        self._opened: dict[str, tuple[PolicyModel, LayerCalls]] = {}

    def policy(self, way: Way) -> PolicyModel:
        """The one of the way's backend; that of another backend is not to be run until asked for.

        One is opened once, so that what it compiled is found again.
        """
        if way.backend not in self._opened:
            policy = open_policy(self.module, way)
            self._opened[way.backend] = (policy, layer_calls(self.module))
        policy, calls = self._opened[way.backend]
        restore_calls(self.module, calls)
        return policy

    def clear(self) -> None:
        """Lets go of gradients and of memory that is free."""
        self.module.zero_grad(set_to_none=True)
        release(self.run.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How rollouts are cut and what is kept of them.

    Attributes:
        cuts: Sequences in a replicated micro-batch, of which the fastest is taken.
        keeps_the_least: All but attention runs again, and gradients are there from the start, so
            that peaks compare; else what fits is kept.
        host_bytes: Of the host, for what does not fit the device; of the least, for the stages
            that wait for others.
    """

    cuts: tuple[int, ...]
    keeps_the_least: bool = False
    host_bytes: int = 0

    def limit(self, policy: PolicyModel, batches: Sequence[SeededBatch]) -> MemoryPlan | None:
        """Limits the policy for these micro-batches."""
        held = [one for seeded in batches for one in seeded.held]
        if self.keeps_the_least:
            return keep_the_least(policy, held, host_bytes=self.host_bytes)
        gradients_stay = len(batches) > 1 or bool(batches[0].stages)
        return keep_what_fits(
            policy, held, gradients_stay=gradients_stay, host_bytes=self.host_bytes
        )


def compare_ways(ways: Ways, batch: RolloutBatch, order: Sequence[Way], plan: Plan) -> list[Row]:
    """Rows of all ways over the same rollouts, checked against the replicated one where it ran."""
    found: list[tuple[Row, dict[str, Tensor]]] = []
    for way in order:
        try:
            found.append(measure_way(ways, way, batch, plan))
        except Exception as error:  # noqa: BLE001  whatever a library raises is its row's content
            found.append(({"how": way.how, **refusal(error)}, {}))
        ways.clear()
    return check(order, found)


def measure_way(
    ways: Ways, way: Way, batch: RolloutBatch, plan: Plan
) -> tuple[Row, dict[str, Tensor]]:
    """Figures of one way and what it is to be compared by.

    Raises:
        OutOfTimeError: The budget is spent.
        RuntimeError: What the backend or the device says, out of memory for one.
        RatoonError: The service would not run it: it does not fit.
    """
    run, policy = ways.run, ways.policy(way)
    require_time(run.stop_at, 0.0)
    row: Row = {"how": way.how, "model": ways.size.name}
    if way.is_packed:
        batches = load_packed(ways, way, batch)
        memory = plan.limit(policy, batches)
    else:
        cut, tried = _fastest_cut(ways, way, batch, plan)
        batches = replicas(batch, cut, run)
        memory = plan.limit(policy, batches)
        row |= {"micro_batch_sequences": cut, **tried}
    started = time.monotonic()
    # Compiles what there is to compile, and the allocator has its memory from then on.
    # On the host, so that all ways find the same memory free.
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
    work, replicated = packed_work(packed_batch(batch)), replicated_work(batch)
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
    """The rows of `order`, timed anew in rounds: each way once, another one first in each.

    Args:
        ways: As `compare_ways` left it: all is compiled, and little memory in use.
        batch: All of it has room on the device, in every way's form at once.
        order: Ways of one cut.
        plan: Of that cut.
        rows: Of `compare_ways`; those without figures stay as they are.
        min_rounds: However long they take, unless the budget is spent.
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
            plan.limit(policy, loaded[i])
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
    """GiB beyond weights, as they are and as predicted, and beyond gradients; none on a CPU.

    What is beyond gradients is known only where all of them are there at the peak. `peak` and
    `resident` are GiB at the peak and with weights and inputs alone.
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


def check(order: Sequence[Way], found: list[tuple[Row, dict[str, Tensor]]]) -> list[Row]:
    """The rows with their errors against a replicated way, or the first, that has figures.

    Where there are log-probs, also their drift from that way and from the first packed one of
    another backend.
    """
    ran = [i for i, (row, _) in enumerate(found) if "error" not in row]
    truth = min(ran, key=lambda i: (order[i].is_packed, i), default=-1)
    rows: list[Row] = []
    for i, (row, values) in enumerate(found):
        if i == truth or "error" in row:
            rows.append(row)
            continue
        errors = {name: relative_error(values[name], x) for name, x in found[truth][1].items()}
        wrong = {name: error for name, error in errors.items() if not error <= MAX_ERROR}
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
    """The one packed micro-batch on the device, with its stages where the way streams it."""
    packed = packed_batch(batch)
    stages = waves(packed, way.wave) if way.wave else ()
    return [upload(batch, packed, ways.run.device, stages)]


def replicas(batch: RolloutBatch, cut: int, run: Run) -> list[SeededBatch]:
    """Replicated micro-batches of `cut` rollouts, on the device."""
    return [upload(batch, packed, run.device) for packed in replicated_batches(batch, cut)]


def _fastest_cut(ways: Ways, way: Way, batch: RolloutBatch, plan: Plan) -> tuple[int, Row]:
    """The cut that takes the least time on the first few rollouts, and the seconds of each.

    They are those of the largest cut's first micro-batch; what they compile runs before.
    """
    if len(plan.cuts) == 1:
        return plan.cuts[0], {}
    policy, seconds = ways.policy(way), dict[int, float]()
    failed: Exception | None = None
    for cut in plan.cuts:
        batches = replicas(batch, cut, ways.run)
        first = batches[: max(plan.cuts) // cut]
        try:
            plan.limit(policy, batches)
            run_step(policy, first[:1])
            seconds[cut] = timed(partial(run_step, policy, first), ways.run.device)
        except (torch.OutOfMemoryError, RatoonError) as error:
            # With its frames it would hold the memory that was not enough.
            failed = error.with_traceback(None)
        ways.clear()
    if failed is not None and not seconds:
        raise failed
    tried = {str(cut): seconds.get(cut) for cut in plan.cuts}
    return min(seconds, key=lambda cut: seconds[cut]), {"tried_seconds": tried}
