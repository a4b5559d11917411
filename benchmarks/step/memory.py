"""Section `memory`: the longest prompt that fits, and memory beyond weights and gradients.

It has a sweep over prompts, a group whose activation peak is compared between ways, and many
responses against a few. A way without figures says whether the service refused it, the device ran
out of memory or the budget out of time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.common.timing import held_gib, require_time
from benchmarks.common.timing import measure as measure_samples
from benchmarks.step.run import Row, Run, Scale, Section, figures_or_refusal
from benchmarks.step.subjects import Way, keep_each_kind, keep_the_least, run_step
from benchmarks.step.ways import Plan, Ways, compare_ways, load_packed, memory_figures
from benchmarks.step.workload import (
    PEAK_FLOPS,
    Group,
    make_batch,
    mfu,
    packed_batch,
    packed_work,
    replicated_work,
    step_flops,
)
from ratoon.planner.stage_plan import HeldTokens

# Prefixes of case names.
ACTIVATIONS, MANY = "activations ", "many "
# Rate for estimates of seconds, which only the budget uses.
EXPECTED_MFU = 0.45
# Longer steps have one sample, and a warm-up only if the budget allows both.
LONG_STEP_S = 20.0
# Pinned host memory for the sweep, and for prompts that wait for their waves.
HOST_BYTES = 100 * 2**30
# Two short lengths, which compile whatever the long groups run.
WARM_UP_PROMPTS = (96, 160)
# Held tokens for the plan of a step that only compiles.
NO_TOKENS = [HeldTokens(tokens=0, above=0, waits=False, stream=None)]
# Responses per wave, and rollouts per replicated micro-batch, in the comparison.
WAVE = CUT = 4
# Prompt length that the sweep measures first.
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
    """Yields each case with its rows, the most important ones first."""
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
    """One packed group, keeping whatever activations fit."""
    plan = Plan(cuts=(), host_bytes=HOST_BYTES)
    return [{"prompt": group.prompt, **_try_step(ways, ways.run.scale.ours, group, plan)}]


def _compare_activations(ways: Ways) -> list[Row]:
    """Packed, streamed and replicated, all recomputing everything but attention.

    The streamed one's waiting stages are offloaded to the host.
    """
    scale = ways.run.scale
    batch = make_batch((scale.activations,), scale.model.vocab_size, ways.run.seed)
    streamed = Way(backend=scale.ours.backend, is_packed=True, wave=WAVE)
    order = [scale.ours, streamed, scale.baseline]
    plan = Plan(cuts=(CUT,), keeps_the_least=True, host_bytes=HOST_BYTES)
    return compare_ways(ways, batch, order, plan)


def _many_beside_few(ways: Ways) -> list[Row]:
    """One wave's worth of responses, packed; then all in waves, their prompt on the host.

    Everything but attention is recomputed.
    """
    scale = ways.run.scale
    few = Group(prompt=scale.many.prompt, responses=scale.many.responses[: scale.many_wave])
    streamed = Way(backend=scale.ours.backend, is_packed=True, wave=scale.many_wave)
    plan = Plan(cuts=(), keeps_the_least=True, host_bytes=HOST_BYTES)
    rows: list[Row] = []
    for way, group in ((scale.ours, few), (streamed, scale.many)):
        keep_the_least(ways.policy(way), NO_TOKENS, host_bytes=HOST_BYTES)
        # Host memory is allocated on first use, which takes seconds.
        prompts = (*WARM_UP_PROMPTS, *([group.prompt] if way.wave else []))
        _compile(ways, way, group.responses[0], prompts)
        row = _try_step(ways, way, group, plan)
        rows.append({"responses": len(group.responses), **row})
        ways.clear()
    return rows


def _compile(ways: Ways, way: Way, response_tokens: int, prompts: tuple[int, ...]) -> None:
    """Compiles what a long step runs, for any number of tokens, by running short ones."""
    policy = ways.policy(way)
    if policy.device.type != "cuda":
        return
    for prompt in prompts:
        group = Group(prompt=prompt, responses=(response_tokens,) * 2 * max(1, way.wave))
        batch = make_batch((group,), ways.size.vocab_size, ways.run.seed)
        run_step(policy, load_packed(ways, way, batch))
    ways.clear()


def _try_step(ways: Ways, way: Way, group: Group, plan: Plan) -> Row:
    """Figures of one packed group by our backend, or the reason why there are none."""
    return {"how": way.how, **figures_or_refusal(partial(_step, ways, way, group, plan))}


def _step(ways: Ways, way: Way, group: Group, plan: Plan) -> Row:
    """Raises OutOfTimeError, the device's errors, or RatoonError if the group does not fit."""
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


MEMORY = Section(cases=cases, measure=measure)
