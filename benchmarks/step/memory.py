"""Section `memory`: how long a prompt fits, and what a group takes beyond weights and gradients.

Enters a run, leaves one row for each prompt of the sweep, the rows of the group whose activation
peak is compared, and those of many responses beside a few. Invariant: a way that has no figures
says whether the service refused it, the device had no room or the budget no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.step.memory_plan import keep_each_kind, keep_the_least
from benchmarks.step.rollouts import Group, make_batch, packed_batch, packed_work, replicated_work
from benchmarks.step.rows import ACTIVATIONS, MANY
from benchmarks.step.run import Row, Run, Scale, refusal
from benchmarks.step.sizes import PEAK_FLOPS, mfu, step_flops
from benchmarks.step.subjects import Way, run_step
from benchmarks.step.timing import held_gib, require_time
from benchmarks.step.timing import measure as measure_samples
from benchmarks.step.ways import Plan, Ways, compare_ways, load_packed, memory_figures
from ratoon.model.stage_plan import HeldTokens

# Of an estimate of seconds, for the budget alone.
EXPECTED_MFU = 0.45
# Longer steps have one sample, and no other run before it unless the budget has room for both.
LONG_STEP_S = 20.0
# Pinned memory of the sweep, and of prompts that wait for their waves.
HOST_BYTES = 100 * 2**30
# The groups that compile whatever the long ones run, of two lengths.
WARM_UP_PROMPTS = (96, 160)
# What is predicted of a step that only compiles.
NO_TOKENS = [HeldTokens(tokens=0, above=0, waits=False, stream=None)]
# Of the comparison: responses in a wave, rollouts in a replicated micro-batch.
WAVE = CUT = 4
# Of the sweep, measured first.
FIRST_PROMPT = 131_072


def cases(scale: Scale) -> list[str]:
    prompts, count, _ = scale.memory
    group, many = scale.activations, scale.many
    return [
        *(f"{prompt}x{count}" for prompt in prompts),
        f"{ACTIVATIONS}{group.prompt}x{len(group.responses)}",
        f"{MANY}{many.prompt}x{len(many.responses)}",
    ]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case and its rows, those first that must not be left out."""
    scale = run.scale
    prompts, count, length = scale.memory
    *sweep, comparison, many = cases(scale)
    jobs: dict[str, Callable[[Ways], list[Row]]] = {
        comparison: _compare_activations,
        many: _many_beside_few,
    }
    for prompt in sorted(prompts, key=lambda prompt: (prompt != FIRST_PROMPT, prompt)):
        group = Group(prompt=prompt, responses=(length,) * count)
        jobs[f"{prompt}x{count}"] = partial(_sweep, group=group)
    ways = Ways(run, scale.model)
    if set(wanted) & set(sweep):
        keep_each_kind(ways.policy(scale.ours))
        _compile(ways, scale.ours, length, WARM_UP_PROMPTS)
    first = [case for case in jobs if case == f"{FIRST_PROMPT}x{count}"]
    for case in [*first, *(case for case in jobs if case not in first)]:
        if case in wanted:
            yield case, jobs[case](ways)
            ways.clear()


def _sweep(ways: Ways, group: Group) -> list[Row]:
    """One packed group, its layers keeping what fits."""
    plan = Plan(cuts=(), host_bytes=HOST_BYTES)
    return [{"prompt": group.prompt, **_try_step(ways, ways.run.scale.ours, group, plan)}]


def _compare_activations(ways: Ways) -> list[Row]:
    """Packed, streamed and replicated, all with everything but attention run again.

    What waits of the streamed one does so on the host.
    """
    scale = ways.run.scale
    batch = make_batch((scale.activations,), scale.model.vocab_size, ways.run.seed)
    streamed = Way(backend=scale.ours.backend, is_packed=True, wave=WAVE)
    order = [scale.ours, streamed, scale.baseline]
    plan = Plan(cuts=(CUT,), keeps_the_least=True, host_bytes=HOST_BYTES)
    return compare_ways(ways, batch, order, plan)


def _many_beside_few(ways: Ways) -> list[Row]:
    """All responses in waves, their prompt on the host, and as many as one wave has, packed.

    All but attention runs again.
    """
    scale = ways.run.scale
    few = Group(prompt=scale.many.prompt, responses=scale.many.responses[: scale.many_wave])
    streamed = Way(backend=scale.ours.backend, is_packed=True, wave=scale.many_wave)
    plan = Plan(cuts=(), keeps_the_least=True, host_bytes=HOST_BYTES)
    rows: list[Row] = []
    for way, group in ((scale.ours, few), (streamed, scale.many)):
        keep_the_least(ways.policy(way), NO_TOKENS, host_bytes=HOST_BYTES)
        # Memory of the host is allocated at its first use, which takes seconds.
        prompts = (*WARM_UP_PROMPTS, *([group.prompt] if way.wave else []))
        _compile(ways, way, group.responses[0], prompts)
        row = _try_step(ways, way, group, plan)
        rows.append({"responses": len(group.responses), **row})
        ways.clear()
    return rows


def _compile(ways: Ways, way: Way, response_tokens: int, prompts: tuple[int, ...]) -> None:
    """What a long step runs, on short ones: for any number of tokens."""
    policy = ways.policy(way)
    if policy.device.type != "cuda":
        return
    for prompt in prompts:
        group = Group(prompt=prompt, responses=(response_tokens,) * 2 * max(1, way.wave))
        batch = make_batch((group,), ways.size.vocab_size, ways.run.seed)
        run_step(policy, load_packed(ways, way, batch))
    ways.clear()


def _try_step(ways: Ways, way: Way, group: Group, plan: Plan) -> Row:
    """Figures of one packed group by our backend, or why there are none."""
    try:
        return _step(ways, way, group, plan)
    except Exception as error:  # noqa: BLE001  what the device says is the row's content
        return {"how": way.how, **refusal(error)}


def _step(ways: Ways, way: Way, group: Group, plan: Plan) -> Row:
    """Raises OutOfTimeError, what the device says, or RatoonError where it does not fit."""
    run = ways.run
    batch = make_batch((group,), ways.size.vocab_size, run.seed)
    work = packed_work(packed_batch(batch))
    expected_s = step_flops(ways.size, work) / PEAK_FLOPS / EXPECTED_MFU
    is_long = expected_s > LONG_STEP_S
    policy = ways.policy(way)
    batches = load_packed(ways, way, batch)
    memory = plan.limit(policy, batches)
    require_time(run.stop_at, expected_s * (1 if is_long else 2))
    is_warm = not is_long or time.monotonic() + 2 * expected_s < run.stop_at
    resident_gib = held_gib(run.device)
    started = time.monotonic()
    stay = plan.keeps_the_least
    if is_warm:
        run_step(policy, batches, gradients_stay=stay)
    warm_up_s = time.monotonic() - started
    measured = measure_samples(
        lambda: run_step(policy, batches, gradients_stay=stay),
        run.device,
        num_samples=1 if is_long else run.num_samples,
        stop_at=run.stop_at,
    )
    return {
        "how": way.how,
        "model": ways.size.name,
        "warm_up_s": warm_up_s,
        "is_warm": is_warm,
        "seconds": measured.seconds,
        "hardware_mfu": mfu(ways.size, work, measured.seconds),
        "logical_mfu": mfu(ways.size, replicated_work(batch), measured.seconds),
        "peak_gib": measured.peak_gib,
        **memory_figures(policy, memory, measured.peak_gib, resident_gib),
        "packed_tokens": work.tokens,
        "samples": measured.samples,
    }
