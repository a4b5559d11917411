"""Each section of the step benchmark, small and on a CPU: what its rows hold and follow from."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.step import comparisons as step_comparisons
from benchmarks.step import memory as step_memory
from benchmarks.step import subjects as step_subjects
from benchmarks.step import updates as step_updates
from benchmarks.step.comparisons import TABLE2
from benchmarks.step.main import SECTIONS
from benchmarks.step.run import FULL, SMALL, Run
from benchmarks.step.subjects import (
    MemoryPlan,
    Way,
    keep_each_kind,
    keep_the_least,
    keep_what_fits,
    run_step,
)
from benchmarks.step.tables import layers_kept
from benchmarks.step.ways import Plan, Ways, compare_ways, load_packed, memory_figures
from benchmarks.step.workload import (
    TINY,
    Group,
    SeededBatch,
    StepWork,
    make_batch,
    mfu,
    packed_batch,
    packed_work,
    step_flops,
    upload,
    waves,
)
from ratoon.errors import RatoonError
from ratoon.planner.activation_plan import Kept, peak_bytes
from ratoon.planner.stage_plan import HeldTokens, StreamTokens
from ratoon.planner.waves import fits_forest

pytestmark = pytest.mark.more

CPU = torch.device("cpu")


def _run(stop_in_s: float = 60.0) -> Run:
    stop_at = time.monotonic() + stop_in_s
    return Run(device=CPU, scale=SMALL, num_samples=2, stop_at=stop_at, seed=0)


def _rows(section: Any, *wanted: str) -> dict[str, list[dict[str, Any]]]:
    return dict(section.measure(_run(), list(wanted) or section.cases(SMALL)))


def test_full_cases_are_the_ones_to_be_measured() -> None:
    cases = {name: section.cases(FULL) for name, section in SECTIONS.items()}
    assert cases["paper"] == ["5059x32"]
    assert cases["table2"] == [
        *("5059x32", "8192x16", "16384x8", "32768x4", "65536x4", "131072x8"),
    ]
    assert cases["memory"][0] == "8192x8"
    assert cases["memory"][-3:] == ["1048576x8", "activations 8192x32", "many 32768x512"]
    assert cases["profile"] == ["5059x32", "update 5059x32"]
    assert [way.wave for way in FULL.streamed] == [8, 4]
    assert len(cases["crossover"]) == 14
    assert FULL.crossover[1][0] / FULL.crossover[2] == 1 / 256
    assert FULL.crossover[1][-1] / FULL.crossover[2] == 4
    assert {"5059x32", "5059x32 by 9700", "1000x16 replicated"} <= set(cases["costs"])
    assert len(set(cases["costs"])) == len(FULL.costs)
    assert "dapo Qwen3-8B" in cases["updates"]


def test_one_layer_is_compared_by_hidden_gradients_and_weights() -> None:
    found = _rows(TABLE2)
    assert list(found) == ["12x4", "20x2"]
    for rows in found.values():
        ours, replicated = rows
        assert ours["against"] == replicated["how"] == "reference-replicated"
        assert {"hidden", "layers.0.mlp.down_proj.weight"} < set(ours["errors"])
        assert max(ours["errors"].values()) < 1e-5
    work = StepWork(tokens=29, rows=0, pairs=29 * 30 // 2 - _unshared_pairs((5, 3, 7, 2)))
    expected = mfu(replace(TINY, num_layers=1), work, found["12x4"][0]["seconds"])
    assert found["12x4"][0]["hardware_mfu"] == pytest.approx(expected)


def _unshared_pairs(responses: tuple[int, ...]) -> int:
    """Pairs of tokens of different responses."""
    total = sum(responses)
    return (total**2 - sum(n**2 for n in responses)) // 2


def test_a_layer_that_shares_wrongly_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the output that are not the owners' alone count shared tokens twice."""
    honest = step_comparisons._load

    def doubled(*arguments: Any) -> Any:
        parts = honest(*arguments)
        if len(parts[0].hidden_TD) == len(arguments[3]):
            return parts
        return [replace(part, dout_TD=arguments[4][part.source_T]) for part in parts]

    monkeypatch.setattr(step_comparisons, "_load", doubled)
    (rows,) = _rows(TABLE2, "12x4").values()
    assert "hidden" in rows[0]["error"]


def test_waves_stream_a_group_to_the_same_gradients() -> None:
    batch = make_batch((Group(prompt=9, responses=(4, 3, 5, 2, 6)),), TINY.vocab_size, 1)
    packed = packed_batch(batch)
    stages = waves(packed, 2)
    assert len(stages) == 4
    assert fits_forest(stages, packed.forest)
    seeded = upload(batch, packed, CPU, stages)
    # The prompt and the longest two responses, whose keys and values are in one stack.
    assert seeded.held == _stages(9, 11, 7, 2)
    assert upload(batch, packed, CPU).held == _held(29)
    assert _asked(seeded) == seeded.held
    order = [Way(backend="reference", is_packed=True, wave=2), SMALL.baseline]
    streamed, replicated = compare_ways(Ways(_run(), TINY), batch, order, Plan(cuts=(1,)))
    assert streamed["how"] == "reference-waves-of-2"
    assert max(streamed["errors"].values()) < 1e-5
    assert streamed["packed_tokens"] == replicated["packed_tokens"] == 29


def _asked(seeded: SeededBatch) -> list[HeldTokens]:
    """What the service is told of each forward."""
    asked: list[HeldTokens] = []
    policy = Ways(_run(), TINY).policy(SMALL.ours)
    vars(policy)["_plan_activations"] = asked.append
    run_step(policy, [seeded])
    return asked


def _stages(prompt: int, *sizes: int) -> list[HeldTokens]:
    """A prompt and its waves."""
    stream = StreamTokens(held=prompt + max(sizes), waiting=prompt, states=1)
    return [
        HeldTokens(tokens=prompt, above=0, waits=True, stream=stream),
        *(HeldTokens(tokens=n, above=prompt, waits=False, stream=stream) for n in sizes),
    ]


def test_memory_has_a_row_for_each_prompt_and_the_comparisons() -> None:
    found = _rows(step_memory)
    assert set(found) == {"8x2", "16x2", "activations 8x4", "many 16x12"}
    assert [row["prompt"] for case in ("8x2", "16x2") for row in found[case]] == [8, 16]
    hows = [row["how"] for row in found["activations 8x4"]]
    assert hows == ["reference", "reference-waves-of-4", "reference-replicated"]
    few, many = found["many 16x12"]
    assert (few["how"], few["responses"], few["packed_tokens"]) == ("reference", 2, 16 + 2 * 3)
    assert (many["how"], many["responses"]) == ("reference-waves-of-2", 12)
    assert many["packed_tokens"] == 16 + 12 * 3


def test_the_prompt_that_was_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "FIRST_PROMPT", 16)
    first, *_ = _rows(step_memory, "8x2", "16x2", "activations 8x4")
    assert first == "16x2"


def _held(tokens: int) -> list[HeldTokens]:
    return [HeldTokens(tokens=tokens, above=0, waits=False, stream=None)]


def test_what_is_kept_follows_from_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Ways(_run(), TINY).policy(SMALL.ours)
    assert keep_what_fits(policy, _held(100), gradients_stay=False, host_bytes=0) is None
    monkeypatch.setattr(step_subjects, "activation_bytes", lambda _device: 4_000_000)
    rich = keep_what_fits(policy, _held(100), gradients_stay=False, host_bytes=0)
    assert rich is not None
    assert rich.layers == {"products": TINY.num_layers}
    gradients = sum(p.numel() * 4 for p in policy.named_trainable().values())
    # Just enough, so that gradients which stay are too much.
    enough = rich.predicted_bytes
    monkeypatch.setattr(step_subjects, "activation_bytes", lambda _device: enough)
    assert keep_what_fits(policy, _held(100), gradients_stay=False, host_bytes=0) == rich
    poor = keep_what_fits(policy, _held(100), gradients_stay=True, host_bytes=0)
    assert poor != rich
    assert poor is None or gradients < poor.predicted_bytes <= enough
    with pytest.raises(RatoonError, match="do not fit"):
        keep_what_fits(policy, _held(10**6), gradients_stay=False, host_bytes=0)


def test_the_least_is_predicted_with_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Ways(_run(), TINY).policy(SMALL.ours)
    assert keep_the_least(policy, _held(100), host_bytes=0) is None, "a CPU has no limits"
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    plain = keep_the_least(policy, _held(100), host_bytes=0)
    assert plain is not None
    least = (Kept.ATTENTION,) * TINY.num_layers
    assert (plain.layers, plain.waiting) == ({"attention": TINY.num_layers}, {})
    planned: Any = policy
    prompt, wave, small = _stages(60, 40, 10)
    assert [planned._plan_activations(one) for one in (prompt, wave, small)] == [least] * 3
    streamed = keep_the_least(policy, [prompt, wave, small], host_bytes=0)
    assert streamed is not None
    assert streamed.waiting == streamed.layers == plain.layers
    gradients = sum(p.numel() * 4 for p in policy.named_trainable().values())
    # Keys and values of 2 heads of 8 in 2 layers, and gradients of them, in float32.
    stacks = 100 * 2 * 2 * (2 * 8) * (4 + 4)
    sizes = policy.sizes
    prompt_bytes = 60 * (4 * sizes.hidden_size * 4 + 2 * sizes.kept_bytes(Kept.ATTENTION))
    # Gradients of layers that stay are not there a second time.
    assert plain.predicted_bytes == peak_bytes(sizes, least, 100, 100) + gradients
    wave_bytes = prompt_bytes + peak_bytes(sizes, least, 40, 40)
    assert streamed.predicted_bytes == wave_bytes + gradients + stacks
    # The prompt on the host: more than it has in the backward, the wave has beside it.
    lent = 60 * 2 * sizes.kept_bytes(Kept.HOST)
    on_host = keep_the_least(policy, [prompt, wave, small], host_bytes=lent)
    assert on_host is not None
    assert (on_host.layers, on_host.waiting) == ({"attention": 2}, {"host": 2})
    assert planned._plan_activations(prompt) == (Kept.HOST,) * 2
    assert planned._plan_activations(wave) == planned._plan_activations(small) == least
    wave_bytes -= 60 * 2 * sizes.kept_bytes(Kept.ATTENTION)
    own_bytes = peak_bytes(sizes, (Kept.HOST,) * 2, 60, 60)
    assert on_host.predicted_bytes == max(wave_bytes, own_bytes) + gradients + stacks


@pytest.mark.parametrize("stay", [False, True])
def test_gradients_are_there_from_the_start_or_from_their_backward_on(
    monkeypatch: pytest.MonkeyPatch, stay: bool
) -> None:
    """Peaks compared packed groups without most of their gradients with waves that had them all."""
    ways = Ways(_run(), TINY)
    policy = ways.policy(SMALL.ours)
    parameters = policy.named_trainable()
    batches = load_packed(ways, SMALL.ours, make_batch((SMALL.paper,), TINY.vocab_size, 0))
    expected = _gradients_after(policy, batches)
    held: list[int] = []
    forward = step_subjects.train_rows

    def watched(*arguments: Any) -> Any:
        held.append(sum(p.grad is not None for p in parameters.values()))
        return forward(*arguments)

    monkeypatch.setattr(step_subjects, "train_rows", watched)
    for _ in range(2):
        run_step(policy, batches, gradients_stay=stay)
    assert held == [len(parameters) if stay else 0] * 2
    # Gradients of the previous step are not in them.
    for name, gradient in _gradients_after(policy, batches, gradients_stay=stay).items():
        assert expected[name].norm() > 0
        torch.testing.assert_close(gradient, expected[name])


def _gradients_after(policy: Any, batches: Any, **how: Any) -> dict[str, torch.Tensor]:
    run_step(policy, batches, **how)
    return {name: p.grad.clone() for name, p in policy.named_trainable().items()}


def test_what_is_beyond_gradients_is_said_where_all_are_there() -> None:
    policy = Ways(_run(), TINY).policy(SMALL.ours)
    gradients = sum(p.numel() * 4 for p in policy.named_trainable().values()) / 2**30
    plan = MemoryPlan(
        layers={"attention": 2}, waiting={}, predicted_bytes=2**31, gradients_stay=True
    )
    found = memory_figures(policy, plan, 5.0, 1.0)
    assert found["activation_gib"] == pytest.approx(4.0 - gradients)
    assert (found["beyond_weights_gib"], found["predicted_gib"]) == (4.0, 2.0)
    absent = memory_figures(policy, replace(plan, gradients_stay=False), 5.0, 1.0)
    assert "activation_gib" not in absent
    assert absent["beyond_weights_gib"] == 4.0
    assert "layers_waiting" not in found
    waiting = memory_figures(policy, replace(plan, waiting={"host": 2}), 5.0, 1.0)
    assert layers_kept(waiting) == "2 attention, waiting 2 host"
    alike = memory_figures(policy, replace(plan, waiting={"attention": 2}), 5.0, 1.0)
    assert layers_kept(alike) == layers_kept(found) == "2 attention"


def test_a_warm_up_has_layers_of_every_kind() -> None:
    size = replace(TINY, num_layers=6)
    policy = Ways(_run(), size).policy(SMALL.ours)
    keep_each_kind(policy)
    planned: Any = policy
    kinds = planned._plan_activations(10)
    assert len(kinds) == 6
    assert list(dict.fromkeys(kinds)) == list(Kept), "the order of every plan"


def test_a_prompt_that_the_budget_does_not_reach_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if a step took hours.
    monkeypatch.setattr(step_memory, "EXPECTED_MFU", 1e-12)
    found = dict(step_memory.measure(_run(), ["8x2"]))
    (row,) = found["8x2"]
    assert "OutOfTimeError" in row["error"]
    assert row["prompt"] == 8


def test_updates_are_whole_and_change_the_weights() -> None:
    found = _rows(step_updates)
    assert list(found) == ["grpo tiny", "grpo-kl tiny", "grpo-muon tiny", "dapo tiny"]
    rows = {case: row for case, (row,) in found.items()}
    for row in rows.values():
        assert "error" not in row
        phases = [
            *("old_logprobs_s", "forward_s", "backward_s", "optimizer_s"),
        ]
        assert row["total_s"] == pytest.approx(sum(row[name] for name in phases))
        assert row["update_s"] > sum(row[name] for name in phases[1:])
        assert row["seconds"] == statistics.median(row["samples"])
        assert row["on_policy_s"] == statistics.median(row["on_policy_samples"])
        assert row["clip_fraction"] == 0, "old log-probs are of the weights that are trained"
        assert row["joules"] is None, "a CPU does not count them"
    assert rows["grpo tiny"]["step"]["seconds"] > 0
    assert not rows["grpo tiny"]["has_reference"]
    assert rows["grpo-kl tiny"]["has_reference"]
    assert rows["grpo-kl tiny"]["step"] == {}, "a plain step has no reference to compare with"
    assert rows["grpo-muon tiny"]["step"] == {}, "what it is beside is the update by AdamW"
    assert rows["dapo tiny"]["step"] == {}, "several groups need not fit at once"


def test_update_flops_add_the_forwards_beside_the_step() -> None:
    work = StepWork(tokens=10, rows=3, pairs=25)
    weights = 2 * (TINY.layer_parameters * 10 + 67 * 32 * 3)
    forward = weights + 4 * 8 * 4 * 2 * 25
    expected = step_flops(TINY, work) + 2 * forward
    assert step_updates.update_flops(TINY, work, 2) == pytest.approx(expected)
    assert packed_work(packed_batch(make_batch((SMALL.paper,), 67, 0))).tokens == 29
