"""The step benchmark, small and on a CPU: what it measures, checks, writes and merges."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.common import timing as step_timing
from benchmarks.common.forests import Tree, build, pack
from benchmarks.kernels.attention_inputs import layout_of
from benchmarks.step import main as step
from benchmarks.step import varlen as step_varlen
from benchmarks.step import ways as step_ways
from benchmarks.step.main import (
    SAME_ON_MERGE,
    SECTIONS,
    add_case,
    empty_payload,
    joined_result,
    merged_payload,
)
from benchmarks.step.run import FULL, SMALL, Run
from benchmarks.step.subjects import Way, build_module, compared_values, open_policy
from benchmarks.step.ways import drift
from benchmarks.step.workload import (
    QWEN3_1_7B,
    QWEN3_8B,
    TINY,
    Group,
    StepWork,
    make_batch,
    mfu,
    packed_batch,
    packed_work,
    replicated_batches,
    replicated_work,
    step_flops,
    upload,
)
from harness import gpu_results
from ratoon.cluster.worker_start import GPU_ENVIRONMENT
from ratoon.train import report as flops
from ratoon_kernels import BackendUnavailableError, registry, select_backend
from ratoon_kernels.tree_attention import op

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
CUT = step_ways.Plan(cuts=(2,))
ON_CPU = ("--device", "cpu", "--samples", "2")


def _run(stop_in_s: float = 60.0) -> Run:
    return Run(device=CPU, scale=SMALL, num_samples=2, stop_at=time.monotonic() + stop_in_s, seed=0)


def _paper() -> Any:
    return make_batch((FULL.paper,), 151_936, 0)


def test_flops_are_those_computed_by_hand() -> None:
    size = replace(TINY, num_layers=1)
    # q and o 32 x 32, k and v 32 x 16, two norms of 8, three of 32 x 48, two norms of 32.
    assert size.layer_parameters == 2 * 1024 + 2 * 512 + 16 + 3 * 1536 + 64
    work = StepWork(tokens=10, rows=3, pairs=25)
    by_hand = 6 * 7760 * 10 + 6 * 67 * 32 * 3 + 14 * 8 * 4 * 25
    assert step_flops(size, work) == by_hand
    assert mfu(size, work, 0.5) == by_hand / 0.5 / 989e12


def test_flops_are_those_of_the_service() -> None:
    module = build_module(TINY, CPU, torch.float32, 0)
    model = open_policy(module, SMALL.ours)
    sizes = flops.geometry(model)
    last_norm = TINY.hidden_size
    assert sizes.layer_parameters == TINY.layer_parameters + last_norm
    work = StepWork(tokens=10, rows=3, pairs=25)
    service = flops.training_flops(sizes, flops.Work(tokens=10, rows=3, pairs=25))
    assert service == step_flops(TINY, work) + 6 * last_norm * 10


def test_full_sizes_are_those_of_the_published_models() -> None:
    """Model cards: 6.95 and 1.4 billion parameters without embeddings, 8.2 and 1.7 with them."""
    assert QWEN3_8B.layer_parameters / 1e9 == pytest.approx(6.95, abs=0.005)
    embeddings = QWEN3_8B.vocab_size * QWEN3_8B.hidden_size
    assert (QWEN3_8B.layer_parameters + 2 * embeddings) / 1e9 == pytest.approx(8.2, abs=0.05)
    assert QWEN3_1_7B.layer_parameters / 1e9 == pytest.approx(1.4, abs=0.05)
    embeddings = QWEN3_1_7B.vocab_size * QWEN3_1_7B.hidden_size
    assert (QWEN3_1_7B.layer_parameters + embeddings) / 1e9 == pytest.approx(1.7, abs=0.05)


def test_mfu_of_the_recorded_group_is_the_known_one() -> None:
    """3.9 s are 60%; replicated FlashAttention-2 in 28.15 s is 8% of hardware, 35% logical."""
    batch = _paper()
    work, replicated = packed_work(packed_batch(batch)), replicated_work(batch)
    assert work.tokens == 41_323
    assert work.pairs == build("paper", 0).num_pairs
    assert replicated.tokens == 32 * 5059 + 36_264
    assert replicated.rows == 36_264
    assert mfu(QWEN3_8B, work, 3.9) == pytest.approx(0.60, abs=0.005)
    assert mfu(QWEN3_8B, work, 28.15) == pytest.approx(0.083, abs=0.001)
    assert mfu(QWEN3_8B, replicated, 28.15) == pytest.approx(0.347, abs=0.002)


def test_replicated_micro_batches_hold_every_rollout_alone() -> None:
    groups = (Group(prompt=5, responses=(2, 3, 1)), Group(prompt=4, responses=(2,)))
    batch = make_batch(groups, 67, 0)
    cut = replicated_batches(batch, 3)
    assert [part.forest.num_tokens for part in cut] == [7 + 8 + 6, 6]
    assert [part.forest.sequences.tolist() for part in cut] == [[0, 1, 2], [3]]
    for part in cut:
        forest = part.forest
        for i, sequence in enumerate(forest.sequences.tolist()):
            rows = slice(int(forest.node_start[i]), int(forest.node_end[i]))
            np.testing.assert_array_equal(forest.tokens[rows], batch.sequence_tokens(sequence))
            np.testing.assert_array_equal(part.position[rows], np.arange(rows.stop - rows.start))
    columns = np.concatenate([part.term_token for part in cut])
    assert sorted(columns.tolist()) == list(range(8))


def test_packed_and_replicated_steps_have_one_gradient() -> None:
    """Over all cuts, and the rows of a group that share tokens of their responses too."""
    batch = make_batch((Group(prompt=3, responses=(4, 4, 4, 2)),), 3, 0)
    module = build_module(replace(TINY, vocab_size=3), CPU, torch.float32, 0)
    policy = open_policy(module, SMALL.ours)
    expected = compared_values(policy, [upload(batch, packed_batch(batch), CPU)])
    assert packed_work(packed_batch(batch)).tokens < 3 + 14, "no response tokens are shared"
    for cut in (1, 3, 4):
        parts = [upload(batch, part, CPU) for part in replicated_batches(batch, cut)]
        got = compared_values(policy, parts)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert value.norm() > 0
            assert step_ways.relative_error(got[name], value) < 1e-5


def test_a_module_depends_on_its_seed_alone() -> None:
    state = torch.random.get_rng_state()
    first, second = (build_module(TINY, CPU, torch.float32, 7) for _ in range(2))
    other = build_module(TINY, CPU, torch.float32, 8)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = zip(first.parameters(), second.parameters(), other.parameters(), strict=True)
    for a, b, c in pairs:
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)


def test_a_wrong_way_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = step_ways.Ways(_run(), TINY)
    batch = make_batch((SMALL.paper,), TINY.vocab_size, 0)
    honest = step_ways.run_step

    def off(policy: Any, batches: Any, **how: Any) -> Any:
        logprobs = honest(policy, batches, **how)
        if len(batches) == 1:
            policy.module.model.layers[0].self_attn.q_proj.weight.grad.mul_(1.2)
        return logprobs

    monkeypatch.setattr("benchmarks.step.subjects.run_step", off)
    ours, replicated = step_ways.compare_ways(ways, batch, [SMALL.ours, SMALL.baseline], CUT)
    assert "layers.0.self_attn.q_proj" in ours["error"]
    assert "v_proj" not in ours["error"]
    assert "seconds" not in ours
    assert replicated["seconds"] > 0


def test_a_way_that_fails_says_why_and_leaves_the_others() -> None:
    ways = step_ways.Ways(_run(), TINY)
    batch = make_batch((SMALL.paper,), TINY.vocab_size, 0)
    order = [Way(backend="cuda", is_packed=True), SMALL.ours]
    failed, ours = step_ways.compare_ways(ways, batch, order, CUT)
    assert failed["error"].startswith("BackendUnavailableError")
    assert ours["seconds"] == statistics.median(ours["samples"])
    late = step_ways.Ways(_run(stop_in_s=-1.0), TINY)
    (row,) = step_ways.compare_ways(late, batch, [SMALL.ours], CUT)
    assert "OutOfTimeError" in row["error"]


@pytest.mark.parametrize(("seconds", "count"), [(4.4, 5), (4.6, 3), (11.0, 2), (31.0, 1)])
def test_what_takes_long_has_few_samples(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    monkeypatch.setattr(step_timing, "timed", lambda _work, _device: seconds)
    stop_at = time.monotonic() + 1000
    found = step_timing.measure(lambda: None, CPU, num_samples=5, stop_at=stop_at)
    assert found.samples == [seconds] * count
    at_once = step_timing.measure(lambda: None, CPU, num_samples=5, stop_at=time.monotonic())
    assert at_once.samples == [seconds], "one there is in any case"


def test_fa2_is_never_chosen_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    of_op: Any = op
    monkeypatch.setattr(op, "TREE_ATTENTION_BACKENDS", of_op.TREE_ATTENTION_BACKENDS)
    monkeypatch.setattr(registry, "_BACKENDS", registry._BACKENDS)
    before = select_backend("tree_attention", None, CPU, torch.float32, 8)
    step_varlen.install()
    step_varlen.install()
    assert list(of_op.TREE_ATTENTION_BACKENDS)[-1] == step_varlen.FA2
    assert select_backend("tree_attention", None, CPU, torch.float32, 8) == before
    with pytest.raises(BackendUnavailableError, match="CUDA"):
        select_backend("tree_attention", step_varlen.FA2, CPU, torch.bfloat16, 128)


def test_fa2_takes_separate_sequences_only() -> None:
    table = torch.tensor([[0, 7, 7, -1], [7, 9, 9, -1], [9, 14, 14, -1]])
    offsets, longest = step_varlen.sequence_bounds(table)
    assert offsets.tolist() == [0, 7, 9, 14]
    assert offsets.dtype is torch.int32
    assert longest == 7
    table[2, 3] = 1
    with pytest.raises(ValueError, match="shared prefixes"):
        step_varlen.sequence_bounds(table)


def test_fa2_gives_contiguous_results_of_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled layer has its queries by heads; torch's kernel gave their strides back."""

    def flash_forward(q: Tensor, *_rest: Any, **_settings: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(q).zero_(), q.new_zeros(q.shape[1::-1])

    def flash_backward(_dout: Tensor, *rest: Any, **_settings: Any) -> list[Tensor]:
        return [torch.empty_like(x).zero_() for x in rest[:3]]

    monkeypatch.setattr(step_varlen, "_flash_forward", flash_forward)
    monkeypatch.setattr(step_varlen, "_flash_backward", flash_backward)
    backends = {**registry.TREE_ATTENTION_BACKENDS, step_varlen.FA2: step_varlen}
    monkeypatch.setattr(op, "TREE_ATTENTION_BACKENDS", backends)
    layout = layout_of(pack(Tree([-1, -1], [5, 3])), CPU)
    q, k, v = (torch.randn(heads, 8, 4).transpose(0, 1) for heads in (4, 2, 2))
    settings = (0.5, 3, step_varlen.FA2, False)
    args: Any = (q, k, v, layout.end_T, step_varlen.plan(layout), torch.zeros(4), *settings)
    check: Any = torch.library.opcheck
    ops = torch.ops.ratoon
    check(ops.tree_attention.default, args, test_utils="test_faketensor")
    out, lse = ops.tree_attention(*args)
    args = (torch.zeros_like(out), None, q, k, v, out, lse, *args[3:])
    check(ops.tree_attention_backward.default, args, test_utils="test_faketensor")


def test_sections_are_merged_into_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    step.main([*ON_CPU, "--out", str(path), "--only", "paper"])
    first = json.loads(path.read_text())
    assert {row["case"] for row in first["paper"]} == {"12x4"}
    assert [run["cases"]["paper"] for run in first["runs"]] == [["12x4"]]
    for row in first["paper"]:
        assert len(row["samples"]) == 2
        if row["how"] != "reference-replicated":
            assert row["drift"]["reference-replicated"]["max_abs"] < 1e-4
    step.main([*ON_CPU, "--out", str(path), "--only", "paper", "--missing"])
    assert json.loads(path.read_text())["paper"] == first["paper"]
    step.main([*ON_CPU, "--out", str(path), "--only", "paper"])
    second = json.loads(path.read_text())
    assert len(second["paper"]) == len(first["paper"])
    assert second["paper"][0]["samples"] != first["paper"][0]["samples"]
    assert len(second["runs"]) == 1, "a run that has no case left is still there"
    capsys.readouterr()
    step.main(["--report", str(path)])
    assert "reference-replicated" in capsys.readouterr().out
    path.write_text(json.dumps({**second, "source_sha256": "0" * 64}))
    step.main([*ON_CPU, "--out", str(path), "--only", "paper", "--new"])
    assert json.loads(path.read_text())["source_sha256"] == second["source_sha256"]


@pytest.mark.parametrize("name", ["source_sha256", "gpu", "versions", "seed", "models"])
def test_parts_of_another_kind_are_not_merged(name: str) -> None:
    run = _run()
    result: dict[str, Any] = {**gpu_results.describe_gpu(run.seed), **empty_payload(run)}
    assert merged_payload(result, run)["runs"][0] == result["runs"][0]
    with pytest.raises(SystemExit, match=name):
        merged_payload({**result, name: "another"}, run)


def _result_of(case: str, sources: str) -> dict[str, Any]:
    run = _run()
    result: dict[str, Any] = {**gpu_results.describe_gpu(run.seed), **empty_payload(run)}
    add_case(result, "paper", case, [{"how": sources}])
    return {**result, "source_sha256": sources}


def test_results_of_other_sources_are_joined_where_the_file_says_why() -> None:
    old, new = _result_of("a", "old"), _result_of("b", "new")
    join = partial(joined_result, sections=SECTIONS, same=SAME_ON_MERGE)
    with pytest.raises(SystemExit, match="say why"):
        join(old, new, "")
    joined = join(old, new, "a comment changed")
    assert joined["stale"] == "a comment changed"
    assert joined["source_sha256"] == "new"
    assert [(row["case"], row["how"]) for row in joined["paper"]] == [("a", "old"), ("b", "new")]
    assert [run["source_sha256"] for run in joined["runs"]] == ["old", "new"]
    again = join(joined, _result_of("a", "new"), "")
    assert "stale" not in again
    assert [run["cases"]["paper"] for run in again["runs"]] == [["b"], ["a"]]
    with pytest.raises(SystemExit, match="seed"):
        join(old, {**new, "seed": 1}, "a comment changed")


def test_a_gpu_is_measured_in_the_environment_of_a_worker() -> None:
    measure = (
        "import os, sys, argparse; from benchmarks.common.command import is_for_gpu;"
        "is_for_gpu(argparse.Namespace(device='cuda', draft=True));"
        "print(dict(os.environ), sys.argv)"
    )
    without = {name: value for name, value in os.environ.items() if name not in GPU_ENVIRONMENT}
    command = [sys.executable, "-c", measure, "an argument"]
    told = subprocess.run(
        command, env=without, cwd=gpu_results.ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "'an argument'" in told
    assert all(f"{name!r}: {value!r}" in told for name, value in GPU_ENVIRONMENT.items())


def test_a_run_says_what_environment_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker's, in which an update that fills the device has room."""
    for name, value in GPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert empty_payload(_run())["runs"][0]["environment"] == GPU_ENVIRONMENT
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert empty_payload(_run())["runs"][0]["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == ""


def test_nothing_runs_on_a_gpu_where_its_tests_are_not_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpu_results.COMMIT_VARIABLE, "0" * 40)
    tests = tmp_path / "tests.json"
    arguments = ["--out", str(tmp_path / "step.json"), "--tests", str(tests)]
    with pytest.raises(SystemExit, match="absent"):
        step.main(arguments)
    report = {"source_sha256": "0" * 64, "tests": [], "not_run": []}
    tests.write_text(json.dumps(report))
    with pytest.raises(SystemExit, match="other sources"):
        step.main(arguments)
    failed = {"id": "tests/x.py::test_x", "outcome": "failed", "seconds": 1.0}
    report |= {"source_sha256": gpu_results.source_sha256(), "tests": [failed]}
    tests.write_text(json.dumps(report))
    with pytest.raises(SystemExit, match="red"):
        step.main(arguments)
    assert not (tmp_path / "step.json").exists()


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.main(["--draft", "--device", "cpu", "--only", "paper", "--cases", "1x1"])
    assert "12x4" in capsys.readouterr().err


def test_drift_is_that_of_two_distributions() -> None:
    """Tokens drawn from `other` in their true shares: the estimate is the divergence itself."""
    other, got = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    tokens = torch.tensor([0, 0, 1, 2])
    found = drift(got.log()[tokens], other.log()[tokens])
    assert found["max_abs"] == pytest.approx(math.log(2))
    assert found["mean_abs"] == pytest.approx(0.75 * math.log(2))
    divergence = float((other * (other.log() - got.log())).sum())
    assert found["k3"] == pytest.approx(divergence)
    same = drift(other.log(), other.log())
    assert set(same.values()) == {0.0}
