"""Section `memory`: how long a prompt fits, and what a group takes beyond weights and gradients.

Enters a run, leaves one row for each prompt of the sweep and the rows of the group whose activation
peak is compared. Invariant: a prompt that has no figures says whether the service refused it, the
device had no room or the budget no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.step_memory_plan import keep_each_kind
from benchmarks.step_rollouts import (
    Group,
    SeededBatch,
    make_batch,
    packed_batch,
    packed_work,
    replicated_work,
    upload,
)
from benchmarks.step_run import Row, Run, Scale, refusal
from benchmarks.step_sizes import PEAK_FLOPS, mfu, step_flops
from benchmarks.step_subjects import Way, run_step
from benchmarks.step_timing import held_gib, require_time
from benchmarks.step_timing import measure as measure_samples
from benchmarks.step_ways import Plan, Ways, compare_ways, memory_figures

# Of an estimate of seconds, for the budget alone; longer steps are run once, unwarmed.
EXPECTED_MFU = 0.45
LONG_STEP_S = 20.0
# Pinned memory of the sweep.
HOST_BYTES = 80 * 2**30
# The groups that compile whatever the long ones run, of two lengths.
WARM_UP_PROMPTS = (96, 160)
# Of the comparison: responses in a wave, rollouts in a replicated micro-batch.
WAVE = CUT = 4
ACTIVATIONS = "activations "


def cases(scale: Scale) -> list[str]:
    prompts, count, _ = scale.memory
    group = scale.activations
    comparison = f"{ACTIVATIONS}{group.prompt}x{len(group.responses)}"
    return [*(f"{prompt}x{count}" for prompt in prompts), comparison]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each prompt of the sweep with its one row, ours, then the comparison."""
    scale = run.scale
    prompts, count, length = scale.memory
    ways = Ways(run, scale.model)
    comparison = cases(scale)[-1]
    if comparison in wanted:
        yield comparison, _compare_activations(ways)
    if set(wanted) - {comparison}:
        _compile(ways, length)
    for prompt in prompts:
        case = f"{prompt}x{count}"
        if case not in wanted:
            continue
        try:
            row = _step(ways, Group(prompt=prompt, responses=(length,) * count))
        except Exception as error:  # noqa: BLE001  what the device says is the row's content
            row = {"how": scale.ours.how, **refusal(error)}
        ways.clear()
        yield case, [{"prompt": prompt, **row}]


def _compare_activations(ways: Ways) -> list[Row]:
    """Packed, streamed and replicated, all with everything but attention run again."""
    scale = ways.run.scale
    batch = make_batch((scale.activations,), scale.model.vocab_size, ways.run.seed)
    streamed = Way(backend=scale.ours.backend, is_packed=True, wave=WAVE)
    order = [scale.ours, streamed, scale.baseline]
    return compare_ways(ways, batch, order, Plan(cuts=(CUT,), keeps_the_least=True))


def _compile(ways: Ways, response_tokens: int) -> None:
    """What a long step runs, on short ones: layers of each kind, for any number of tokens."""
    policy = ways.policy(ways.run.scale.ours)
    if policy.device.type != "cuda":
        return
    keep_each_kind(policy)
    for prompt in WARM_UP_PROMPTS:
        group = Group(prompt=prompt, responses=(response_tokens,) * 2)
        batch = make_batch((group,), ways.size.vocab_size, ways.run.seed)
        run_step(policy, [upload(batch, packed_batch(batch), policy.device)])
    ways.clear()


def _step(ways: Ways, group: Group) -> Row:
    """Figures of one packed group by our backend.

    Raises:
        OutOfTimeError: The budget would not do.
        RuntimeError: What the device says, out of memory for one.
        RatoonError: The service would not run it: it does not fit.
    """
    run, way = ways.run, ways.run.scale.ours
    batch = make_batch((group,), ways.size.vocab_size, run.seed)
    packed = packed_batch(batch)
    work = packed_work(packed)
    expected_s = step_flops(ways.size, work) / PEAK_FLOPS / EXPECTED_MFU
    is_long = expected_s > LONG_STEP_S
    require_time(run.stop_at, expected_s * (1 if is_long else 2))
    policy = ways.policy(way)
    batches: list[SeededBatch] = [upload(batch, packed, run.device)]
    memory = Plan(cuts=(), host_bytes=HOST_BYTES).limit(policy, batches)
    resident_gib = held_gib(run.device)
    started = time.monotonic()
    if not is_long:
        run_step(policy, batches)
    warm_up_s = time.monotonic() - started
    num_samples = 1 if is_long else run.num_samples
    measured = measure_samples(
        lambda: run_step(policy, batches),
        run.device,
        num_samples=num_samples,
        stop_at=run.stop_at,
    )
    return {
        "how": way.how,
        "model": ways.size.name,
        "warm_up_s": warm_up_s,
        "is_warm": not is_long,
        "seconds": measured.seconds,
        "hardware_mfu": mfu(ways.size, work, measured.seconds),
        "logical_mfu": mfu(ways.size, replicated_work(batch), measured.seconds),
        "peak_gib": measured.peak_gib,
        **memory_figures(policy, memory, measured.peak_gib, resident_gib),
        "packed_tokens": work.tokens,
        "samples": measured.samples,
    }
