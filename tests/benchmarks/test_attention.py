"""The attention benchmark on a CPU: its parts, its gate, its rounds, a whole small run."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import forests
from benchmarks.kernels import attention, attention_timing
from benchmarks.kernels.attention_gate import GateError, Truth, check, check_repeats, compute_truth
from benchmarks.kernels.attention_inputs import (
    Geometry,
    Part,
    Tensors,
    layout_of,
    packed_part,
    random_tensors,
    replicated_parts,
)
from benchmarks.kernels.attention_subjects import Call, Results, Subject, candidates
from harness import gpu_results
from tests.kernels.forests import Forest

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
GEOMETRY = Geometry(num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
TREES = {
    "two-groups": forests.groups(40, [[13, 70, 33], [20]]),
    "equal": forests.groups(64, [[32] * 4]),
    "binary": forests.binary(3, [5 + 7 * (node % 4) for node in range(15)]),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("max_tokens", [1, 150, 10**6])
def test_replicas_are_whole_paths_and_each_token_has_one_owner(name: str, max_tokens: int) -> None:
    nodes = forests.pack(TREES[name])
    mask = Forest(start=nodes.start, stop=nodes.stop, end=nodes.end, parent=nodes.parent).mask()
    parts = replicated_parts(nodes, max_tokens, CPU, is_padded=False)
    owned: Counter[int] = Counter()
    last_tokens: list[int] = []
    for part in parts:
        source = part.source_T.numpy()
        owned.update(source[part.is_owner_T.numpy()].tolist())
        for start, stop in zip(part.offsets[:-1], part.offsets[1:], strict=True):
            path = source[start:stop]
            assert (mask[np.ix_(path, path)] == np.tri(len(path), dtype=bool)).all()
            assert mask[path[-1]].sum() == len(path)
            last_tokens.append(int(path[-1]))
        assert len(part.lengths) == 1 or len(source) <= max_tokens
    assert owned == dict.fromkeys(range(nodes.num_tokens), 1)
    # A leaf's last token is attended by itself alone.
    leaves = [m for m in range(len(nodes.parent)) if m not in nodes.parent]
    assert sorted(last_tokens) == sorted((nodes.stop[leaves] - 1).tolist())


def test_padded_parts_count_the_longest_sequence() -> None:
    nodes = forests.pack(TREES["two-groups"])
    sizes = [len(p.lengths) for p in replicated_parts(nodes, 220, CPU, is_padded=True)]
    assert sizes == [2, 2]
    assert len(replicated_parts(nodes, 299, CPU, is_padded=False)) == 1


@dataclasses.dataclass
class _Problem:
    tensors: Tensors
    truth: Truth
    candidates: Callable[[str], list[Subject]]


def _problem(name: str) -> _Problem:
    nodes = forests.pack(TREES[name])
    layout = layout_of(nodes, CPU)
    tensors = random_tensors(nodes.num_tokens, GEOMETRY, CPU, seed=1)
    return _Problem(
        tensors=tensors,
        truth=compute_truth(tensors, layout, GEOMETRY),
        candidates=lambda backend: candidates(backend, nodes, layout, GEOMETRY),
    )


@pytest.fixture(params=list(TREES))
def problem(request: pytest.FixtureRequest) -> _Problem:
    return _problem(request.param)


@pytest.mark.parametrize("backend", ["reference", "sdpa-replicated"])
def test_right_backends_pass_the_gate(problem: _Problem, backend: str) -> None:
    ways = problem.candidates(backend)
    for way in ways:
        errors = check(way, problem.tensors, problem.truth)
        expected = {"out", "dq", "dk", "dv"} | ({"lse"} if backend == "reference" else set())
        assert {name.removesuffix("_row") for name in errors} == expected
        assert all(0 < error < 0.05 for error in errors.values()), errors


def test_replicated_gradients_over_several_parts_add_up() -> None:
    problem = _problem("two-groups")
    (way, *_) = problem.candidates("sdpa-replicated")
    nodes = forests.pack(TREES["two-groups"])
    parts = replicated_parts(nodes, 120, CPU, is_padded=False)
    assert len(parts) > 1
    check(dataclasses.replace(way, parts=parts), problem.tensors, problem.truth)


class _Altered:
    """A call whose results are changed afterwards."""

    def __init__(self, call: Call, change: Callable[[Results], None]) -> None:
        self._call, self._change = call, change

    def forward(self) -> None:
        self._call.forward()

    def backward(self) -> None:
        self._call.backward()

    def results(self) -> Results:
        results = self._call.results()
        self._change(results)
        return results


def _altered(subject: Subject, change: Callable[[Results], None]) -> Subject:
    return dataclasses.replace(
        subject, load=lambda tensors, part: _Altered(subject.load(tensors, part), change)
    )


def _scale_row(name: str) -> Callable[[Results], None]:
    def change(results: Results) -> None:
        getattr(results, name)[17, 1] *= 1.3

    return change


def _nan(results: Results) -> None:
    results.dk_TKH[3, 0, 0] = torch.nan


def _shift_lse(results: Results) -> None:
    assert results.lse_NT is not None
    results.lse_NT[2, 5] += 0.01


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_scale_row("out_TNH"), "out_row"),
        (_scale_row("dq_TNH"), "dq_row"),
        (_scale_row("dk_TKH"), "dk_row"),
        (_scale_row("dv_TKH"), "dv_row"),
        (_nan, "dk nan"),
        (_shift_lse, "lse"),
    ],
)
def test_gate_refuses_one_wrong_row(
    problem: _Problem, change: Callable[[Results], None], named: str
) -> None:
    (subject,) = problem.candidates("reference")
    with pytest.raises(GateError, match=named):
        check(_altered(subject, change), problem.tensors, problem.truth)


def test_gate_refuses_another_mask(problem: _Problem) -> None:
    """Plain causal attention over all packed tokens, in the place of the forest's."""
    nodes = forests.pack(forests.groups(len(problem.tensors.q_TNH), [[]]))
    (subject,) = candidates("reference", nodes, layout_of(nodes, CPU), GEOMETRY)
    with pytest.raises(GateError, match="out"):
        check(subject, problem.tensors, problem.truth)


def test_repeats_must_have_the_same_bits(problem: _Problem) -> None:
    (subject,) = problem.candidates("reference-deterministic")
    check_repeats(subject, problem.tensors)
    calls: list[int] = []

    def change(results: Results) -> None:
        calls.append(1)
        results.dq_TNH[0, 0, 0] = len(calls)

    with pytest.raises(GateError, match="dq"):
        check_repeats(_altered(subject, change), problem.tensors)


class _FakeClock:
    """Runs nothing; time stands still but for what each sample is said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(attention_timing.time, "monotonic", lambda: self.now_s)

    def milliseconds(self, work: Callable[[], None]) -> float:
        work()
        return 0.0


def _fake_subjects(clock: _FakeClock, order: list[str], seconds: dict[str, float]) -> list[Subject]:
    part = packed_part(forests.pack(forests.groups(1, [[]])), CPU)

    def loader(name: str) -> Callable[[Tensors, Part], Call]:
        class FakeCall:
            def forward(self) -> None:
                order.append(name)
                clock.now_s += seconds[name]

            def backward(self) -> None: ...

            def results(self) -> Results:
                raise AssertionError("what is timed is forward and backward")

        return lambda _tensors, _part: FakeCall()

    return [Subject(backend=n, how="", parts=[part], load=loader(n)) for n in seconds]


def test_rounds_are_interleaved_and_slow_subjects_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = _FakeClock(monkeypatch), []
    subjects = _fake_subjects(clock, order, {"a": 0.125, "slow": 2.0, "b": 0.125})
    tensors = random_tensors(1, GEOMETRY, CPU, seed=0)
    samples = attention_timing.sample_rounds(subjects, tensors, clock, budget_s=13.7)
    first = order[:15]
    assert [set(first[i : i + 3]) for i in range(0, 15, 3)] == [{"a", "slow", "b"}] * 5
    assert [first[i] for i in range(0, 15, 3)] == ["a", "slow", "b", "a", "slow"]
    # 5 rounds take 11.25 s, so that 10 rounds of the two quick ones are left.
    assert {name: len(s.fwd_ms) for name, s in samples.items()} == {"a": 15, "slow": 5, "b": 15}


def test_every_subject_gets_its_least_samples_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = _FakeClock(monkeypatch), []
    subjects = _fake_subjects(clock, order, {"a": 1.0, "b": 9.0})
    tensors = random_tensors(1, GEOMETRY, CPU, seed=0)
    samples = attention_timing.sample_rounds(subjects, tensors, clock, budget_s=0.0)
    assert {len(s.bwd_ms) for s in samples.values()} == {attention_timing.MIN_SAMPLES}


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_timing, "MAX_SAMPLES", attention_timing.MIN_SAMPLES + 1)
    monkeypatch.setenv(gpu_results.COMMIT_VARIABLE, "abc")
    # The tree may be edited while the tests run.
    monkeypatch.setattr(gpu_results, "source_sha256", lambda: "0" * 64)
    for name, tree in TREES.items():
        monkeypatch.setitem(forests.SHAPES, name, lambda _rng, tree=tree: tree)


def _run(out: Path, *arguments: str) -> dict[str, Any]:
    attention.main(["--device", "cpu", "--out", str(out), "--budget-s", "100", *arguments])
    return json.loads(out.read_text())


@pytest.mark.usefixtures("tiny_shapes")
def test_a_run_writes_rows_with_samples_and_reasons(tmp_path: Path) -> None:
    arguments = ("--shapes", "equal", "--backends", "reference,no-such,sdpa-replicated")
    result = _run(tmp_path / "a.json", *arguments)
    reference, unknown, replicated = result["rows"]
    assert unknown["backend"] == "no-such"
    assert "no-such" in unknown["error"]
    assert "fwd_ms" not in unknown
    for row in (reference, replicated):
        for name, flops in (("fwd", 4 * 4 * 64), ("bwd", 10 * 4 * 64)):
            samples = row["samples"][f"{name}_ms"]
            assert len(samples) >= attention_timing.MIN_SAMPLES
            assert row[f"{name}_ms"] == float(np.median(samples)) > 0
            tflops = flops * row["num_pairs"] / row[f"{name}_ms"] / 1e9
            assert row[f"{name}_tflops"] == pytest.approx(tflops)
    sizes = result["shapes"]["equal"]
    assert (sizes["tokens"], sizes["replicated_tokens"], sizes["sequences"]) == (192, 384, 4)
    assert reference["num_pairs"] == sizes["pairs"] == 64 * 65 // 2 + 4 * (64 * 32 + 32 * 33 // 2)
    assert replicated["num_pairs"] == sizes["replicated_pairs"] == 4 * 96 * 97 // 2
    assert result["runs"][0]["shapes"] == ["equal"]
    assert result["is_one_run"]
    gemm = result["runs"][0]["gemm"]
    median_ms = float(np.median(gemm["samples"]))
    assert gemm["tflops"] == pytest.approx(2 * gemm["size"] ** 3 / median_ms / 1e9)


@pytest.mark.usefixtures("tiny_shapes")
def test_merged_runs_keep_shapes_whole(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    _run(out, "--shapes", "equal,binary", "--backends", "reference")
    result = _run(out, "--merge", "--shapes", "binary", "--backends", "reference,sdpa-replicated")
    assert [run["shapes"] for run in result["runs"]] == [["equal"], ["binary"]]
    assert not result["is_one_run"]
    assert Counter(row["shape"] for row in result["rows"]) == {"equal": 1, "binary": 2}
    with pytest.raises(SystemExit, match="seed"):
        _run(out, "--merge", "--shapes", "equal", "--seed", "1")
    result = _run(out, "--merge", "--shapes", "equal,binary", "--backends", "reference")
    assert result["is_one_run"]
    assert len(result["rows"]) == 2


def test_nothing_is_measured_without_green_tests(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    with pytest.raises(SystemExit, match="green"):
        attention.main(["--out", str(out), "--tests", str(tmp_path / "tests.json")])
    assert not out.exists()
