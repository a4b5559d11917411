"""Runs the attention benchmark: one shape after another, within a time budget.

A backend that cannot run a shape, or fails the gate on it, has a row that says why, and no
figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common.forests import Nodes, build
from benchmarks.common.timing import release
from benchmarks.kernels.attention_gate import Truth, check, check_repeats, compute_truth
from benchmarks.kernels.attention_inputs import (
    Geometry,
    Tensors,
    layout_of,
    random_tensors,
    replicated_parts,
)
from benchmarks.kernels.attention_subjects import DETERMINISTIC, Subject, candidates
from benchmarks.kernels.attention_timing import (
    Clock,
    CudaClock,
    HostClock,
    Samples,
    fastest,
    measure_memory,
    measure_sustained,
    sample_rounds,
)

Row = dict[str, Any]
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Contents of one run.

    Attributes:
        shapes: Keys of `benchmarks.common.forests.SHAPES`.
        backends: Rows of each shape, as `attention_subjects.candidates` names them.
        geometry: Heads and dtype.
        device: A CUDA device, or a CPU.
        budget_s: Seconds for everything; shapes beyond it are left out.
        seed: For the forests and the tensors.
    """

    shapes: tuple[str, ...]
    backends: tuple[str, ...]
    geometry: Geometry
    device: torch.device
    budget_s: float
    seed: int

    @property
    def is_gpu(self) -> bool:
        """The device is a GPU."""
        return self.device.type == "cuda"

    def clock(self) -> Clock:
        """The clock that times work on the device."""
        return CudaClock() if self.is_gpu else HostClock()


def measure(run: Run) -> Iterator[tuple[str, dict[str, int], list[Row]]]:
    """Yields each shape's name, sizes and rows as soon as it is measured."""
    stop_at = time.monotonic() + run.budget_s
    clock = run.clock()
    for index, shape in enumerate(run.shapes):
        remaining_s = stop_at - time.monotonic()
        if remaining_s <= 0:
            return
        shape_stop_at = time.monotonic() + remaining_s / (len(run.shapes) - index)
        nodes = build(shape, run.seed)
        yield shape, _sizes(nodes), _measure_shape(run, shape, nodes, clock, shape_stop_at)
        release(run.device)


def _measure_shape(run: Run, shape: str, nodes: Nodes, clock: Clock, stop_at: float) -> list[Row]:
    layout = layout_of(nodes, run.device)
    tensors = random_tensors(nodes.num_tokens, run.geometry, run.device, run.seed)
    truth = compute_truth(tensors, layout, run.geometry)
    subjects: dict[str, Subject] = {}
    rows: list[Row] = []
    for backend in run.backends:
        row: Row = {"shape": shape, "backend": backend}
        rows.append(row)
        start = time.monotonic()
        try:
            ways = candidates(backend, nodes, layout, run.geometry)
            subjects[backend], details = _prepare(ways, tensors, truth, clock, run)
        except Exception as error:  # noqa: BLE001  whatever a library raises goes into its row
            row["error"] = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        else:
            row |= details
        row["setup_s"] = time.monotonic() - start
        release(run.device)
    del truth
    release(run.device)
    budget_s = max(stop_at - time.monotonic(), 0.0)
    samples = sample_rounds(list(subjects.values()), tensors, clock, budget_s)
    return [_finish(row, subjects, samples, run.geometry, nodes) for row in rows]


def _prepare(
    ways: list[Subject], tensors: Tensors, truth: Truth, clock: Clock, run: Run
) -> tuple[Subject, Row]:
    """A backend's fastest way, after checking all of them, and its row so far."""
    errors = {way.how: check(way, tensors, truth) for way in ways}
    for way in ways:
        if way.backend.endswith(DETERMINISTIC):
            check_repeats(way, tensors)
    subject = fastest(ways, tensors, clock)
    details: Row = {
        "how": subject.how,
        "num_parts": len(subject.parts),
        "errors": errors[subject.how],
    }
    if run.is_gpu:
        details |= asdict(measure_memory(subject, tensors))
        details["workspace_limit_gib"] = _fp32_gradient_bytes(tensors) / 2**30
        details |= measure_sustained(subject, tensors)
    return subject, details


def _fp32_gradient_bytes(tensors: Tensors) -> int:
    """The bound on a packed backend's workspace: fp32 dQ, dK and dV."""
    elements = sum(x.numel() for x in (tensors.q_TNH, tensors.k_TKH, tensors.v_TKH))
    return elements * torch.float32.itemsize


def _finish(
    row: Row,
    subjects: dict[str, Subject],
    samples: dict[str, Samples],
    geometry: Geometry,
    nodes: Nodes,
) -> Row:
    """Adds the figures to a row without an error."""
    backend = row["backend"]
    if backend not in subjects:
        return row
    subject, mine = subjects[backend], samples[backend]
    num_pairs = sum(part.num_pairs for part in subject.parts)
    if subject.is_packed:
        num_pairs = nodes.num_pairs
    fwd_ms, bwd_ms = statistics.median(mine.fwd_ms), statistics.median(mine.bwd_ms)
    return {
        **row,
        "num_pairs": num_pairs,
        "fwd_ms": fwd_ms,
        "bwd_ms": bwd_ms,
        "fwd_tflops": geometry.forward_flops(num_pairs) / fwd_ms / 1e9,
        "bwd_tflops": geometry.backward_flops(num_pairs) / bwd_ms / 1e9,
        "samples": {"fwd_ms": mine.fwd_ms, "bwd_ms": mine.bwd_ms},
    }


def _sizes(nodes: Nodes) -> dict[str, int]:
    paths = replicated_parts(nodes, 1, torch.device("cpu"), is_padded=False)
    return {
        "tokens": nodes.num_tokens,
        "pairs": nodes.num_pairs,
        "sequences": len(paths),
        "replicated_tokens": sum(len(path.source_T) for path in paths),
        "replicated_pairs": sum(path.num_pairs for path in paths),
    }
