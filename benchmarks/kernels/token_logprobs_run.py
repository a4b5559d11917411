"""Runs the token log-probs benchmark.

A subject that cannot run, or is wrong, has a row that says why, and no figures. Each subject runs
once per round, so that changes of clocks affect all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.timing import release
from benchmarks.kernels.attention_timing import Clock
from benchmarks.kernels.token_logprobs_subjects import (
    OURS,
    Function,
    Problem,
    find,
    make_head,
    make_problem,
)

Row = dict[str, Any]

# Products of R x V x D per mode, including the recomputed logits.
PRODUCTS = {"fwd": 1, "fwd_bwd": 4, "frozen": 3}
# Our log-probs are exact to fp32. Others round logits to 16 bits: the result shows that error, and
# only larger ones are refused.
MAX_ERROR_OF_OURS = {"logprob": 5e-6, "dhidden": 2**-7, "dlm_head": 2**-7}
MAX_ERROR = {"logprob": 2e-2, "dhidden": 5e-2, "dlm_head": 5e-2}
# Beyond this the eager reference takes seconds per call.
MAX_REFERENCE_ROWS = 4096
MAX_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of the LM head, and the rows of the correctness gate."""

    vocab_size: int
    width: int
    dtype: torch.dtype
    gate_rows: int

    def as_json(self) -> Row:
        return {**asdict(self), "dtype": str(self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Contents of one run, and its clock."""

    geometry: Geometry
    subjects: tuple[str, ...]
    num_samples: int
    device: torch.device
    clock: Clock
    seed: int

    def problem(self, num_rows: int) -> Problem:
        """Deterministic in the seed and the number of rows."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        g = self.geometry
        return make_problem(
            num_rows, make_head(g.vocab_size, g.width, g.dtype, generator), generator
        )


def measure(run: Run, num_rows: int, errors: dict[str, Row]) -> Iterator[Row]:
    """Yields a result row per subject for one number of rows; `errors` is what `gate` found."""
    problem = run.problem(num_rows)
    ready: dict[str, Function] = {}
    peaks: dict[str, dict[str, float]] = {}
    rows: dict[str, Row] = {}
    for name, row in errors.items():
        rows[name] = {"num_rows": num_rows, "subject": name, **row}
        if "error" in row:
            continue
        if name == "reference" and num_rows > MAX_REFERENCE_ROWS:
            rows[name] = _refusal(num_rows, name, "takes seconds")
            continue
        function = find(name)
        try:
            peaks[name] = {mode: peak_gib(run, function, problem, mode) for mode in PRODUCTS}
            ready[name] = function
        except torch.OutOfMemoryError:
            rows[name] = _refusal(num_rows, name, "out of memory")
        release(run.device)
    samples = _sample(run, ready, problem)
    for name, of_modes in samples.items():
        rows[name] |= _figures(run, num_rows, of_modes)
        rows[name]["peak_gib"] = peaks[name]
    yield from rows.values()


def gate(run: Run) -> dict[str, Row]:
    """Each subject's errors against fp64, or the reason why it is not measured."""
    problem = run.problem(run.geometry.gate_rows)
    wide = replace(
        problem,
        hidden_RD=problem.hidden_RD.double(),
        lm_head_VD=problem.lm_head_VD.double(),
    )
    expected = _values(_truth, wide)
    del wide
    release(run.device)
    found: dict[str, Row] = {}
    for name in run.subjects:
        try:
            got = _values(find(name), problem)
        except (ImportError, RuntimeError, TypeError) as err:
            found[name] = {"error": f"{type(err).__name__}: {err}"[:MAX_MESSAGE_CHARACTERS]}
            continue
        errors = {
            key: float((got[key].double() - value).norm() / value.norm())
            for key, value in expected.items()
        }
        largest = float((got["logprob"].double() - expected["logprob"]).abs().max())
        found[name] = {"errors": {**errors, "logprob_max_abs": largest}}
        limits = MAX_ERROR_OF_OURS if name == OURS else MAX_ERROR
        if wrong := {key: error for key, error in errors.items() if not error <= limits[key]}:
            found[name] = {"error": f"wrong: {wrong}"}
        release(run.device)
    return found


def _truth(problem: Problem) -> Tensor:
    logits_RV = problem.hidden_RD @ problem.lm_head_VD.T / problem.temperature_R[:, None]
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    return logp_RV.gather(1, problem.target_R[:, None])[:, 0]


def _values(function: Function, problem: Problem) -> dict[str, Tensor]:
    leaves = _leaves(problem, is_frozen=False)
    logprob_R = function(leaves)
    logprob_R.backward(problem.dlogprob_R.to(logprob_R.dtype))
    dhidden_RD, dlm_head_VD = leaves.hidden_RD.grad, leaves.lm_head_VD.grad
    assert dhidden_RD is not None
    assert dlm_head_VD is not None
    return {"logprob": logprob_R.detach(), "dhidden": dhidden_RD, "dlm_head": dlm_head_VD}


def _leaves(problem: Problem, *, is_frozen: bool) -> Problem:
    return replace(
        problem,
        hidden_RD=problem.hidden_RD.detach().requires_grad_(),
        lm_head_VD=problem.lm_head_VD.detach().requires_grad_(not is_frozen),
    )


def work_of(function: Function, problem: Problem, mode: str) -> Callable[[], None]:
    """Returns a call of one mode: only the forward, with all gradients, or with a frozen head."""

    def forward() -> None:
        with torch.no_grad():
            function(problem)

    def both() -> None:
        leaves = _leaves(problem, is_frozen=mode == "frozen")
        function(leaves).backward(problem.dlogprob_R)

    return forward if mode == "fwd" else both


def peak_gib(run: Run, function: Function, problem: Problem, mode: str) -> float:
    """Peak GiB beyond the inputs during a call, gradients included; also the warm-up."""
    work = work_of(function, problem, mode)
    work()
    if run.device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _sample(
    run: Run, subjects: dict[str, Function], problem: Problem
) -> dict[str, dict[str, list[float]]]:
    samples = {name: {mode: [] for mode in PRODUCTS} for name in subjects}
    names = list(subjects)
    for index in range(run.num_samples):
        first = index % max(len(names), 1)
        for name in names[first:] + names[:first]:
            for mode in PRODUCTS:
                work = work_of(subjects[name], problem, mode)
                samples[name][mode].append(run.clock.milliseconds(work))
    return samples


def samples_of(run: Run, work: Callable[[], Any]) -> list[float]:
    """Milliseconds per sample, after two warm-ups."""
    for _ in range(2):
        run.clock.milliseconds(work)
    return [run.clock.milliseconds(work) for _ in range(run.num_samples)]


def _figures(run: Run, num_rows: int, samples: dict[str, list[float]]) -> Row:
    g = run.geometry
    flops = 2 * num_rows * g.vocab_size * g.width
    row: Row = {"samples": samples}
    for mode, products in PRODUCTS.items():
        row[f"{mode}_ms"] = statistics.median(samples[mode])
        row[f"{mode}_tflops"] = products * flops / row[f"{mode}_ms"] / 1e9
    return row


def _refusal(num_rows: int, subject: str, reason: str) -> Row:
    return {"num_rows": num_rows, "subject": subject, "error": reason}
