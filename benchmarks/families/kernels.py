"""Sections `attention` and `delta`: one operator alone, beside libraries on the same tokens.

Subjects of a case take turns, forward and backward are timed apart, and what is reported is the
median. Work is counted by the pairs that are attended, so that rates compare over forms.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.forests import PAPER_LENGTHS, Nodes, Tree, groups, pack
from benchmarks.common.timing import release
from benchmarks.families.cudnn import attend_each
from benchmarks.families.recurrences import FLA, FLASH_QLA, by_level, library
from benchmarks.kernels.attention_inputs import layout_of
from benchmarks.kernels.attention_timing import Clock, CudaClock, HostClock
from benchmarks.step.run import Row, Run, Scale, refusal
from ratoon.planner.costs import path_pairs
from ratoon_kernels import TreeLayout, gated_delta_rule, tree_attention
from ratoon_kernels.precision import accumulation_dtype

OURS = "ours"
# Seconds after which a subject of a case gets no further samples.
SUBJECT_S = 60.0
MIN_SAMPLES = 3
DECAY_BIAS = 3.0
# A CPU has the shapes of a GPU in so many times fewer tokens.
SMALLER = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One call of attention.

    Attributes:
        num_heads: Of queries.
        num_kv_heads: Of keys and values.
        head_dim: Of queries and keys.
        value_dim: Of values.
        window: Tokens that a query sees; 0: as many as the longest path has; None: all.
        has_sinks: Whether each head has a sink.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    has_sinks: bool = False

    def flops(self, pairs: int) -> tuple[int, int]:
        """FLOPs of forward and backward: two products, and five."""
        each = 2 * self.num_heads * pairs
        backward = 3 * self.head_dim + 2 * self.value_dim
        return each * (self.head_dim + self.value_dim), each * backward


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """A forest, and the forms that are run over it by name; libraries run the first alone."""

    tree: Tree
    forms: Mapping[str, Form]
    libraries: tuple[str, ...] = ()


def chain(length: int) -> Tree:
    return Tree([-1], [length])


def levels(depth: int, width: int, length: int) -> Tree:
    """`depth` levels of `width` segments, children of the first of the level before."""
    parents = [(level - 1) * width if level else -1 for level in range(depth) for _ in range(width)]
    return Tree(parents, [length] * (depth * width))


_D256 = Form(num_heads=16, num_kv_heads=4, head_dim=256, value_dim=256)
_D192 = Form(num_heads=16, num_kv_heads=16, head_dim=192, value_dim=128)
_D64 = Form(num_heads=64, num_kv_heads=8, head_dim=64, value_dim=64)
_GROUP = groups(5059, [list(PAPER_LENGTHS)])
CAUSAL = chain(16_384)
LIBRARIES = ("cudnn", "fa2")
ATTENTION: dict[str, AttentionCase] = {
    "256 causal 16K": AttentionCase(tree=CAUSAL, forms={OURS: _D256}, libraries=LIBRARIES),
    "256 group": AttentionCase(tree=_GROUP, forms={OURS: _D256}),
    "192/128 causal 16K": AttentionCase(tree=CAUSAL, forms={OURS: _D192}, libraries=("cudnn",)),
    "192/128 group": AttentionCase(tree=_GROUP, forms={OURS: _D192}),
    "64 sinks and windows 16K": AttentionCase(
        tree=CAUSAL,
        forms={
            OURS: _D64,
            "sinks": replace(_D64, has_sinks=True),
            "window of all": replace(_D64, window=0),
            "window of 128": replace(_D64, window=128),
        },
    ),
    "256 windows 16K": AttentionCase(
        tree=CAUSAL,
        forms={
            OURS: replace(_D256, num_kv_heads=8),
            "window of all": replace(_D256, num_kv_heads=8, window=0),
            "window of 1024": replace(_D256, num_kv_heads=8, window=1024),
        },
    ),
}
TWO_LEVELS, DEEP, FLAT = "two levels", "deep", "flat"
# Forests of Qwen3.5's recurrence.
DELTA = {TWO_LEVELS: _GROUP, DEEP: levels(32, 4, 300), FLAT: levels(1, 128, 300)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A call that gives one output, differentiable in its inputs."""

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.dout)


def attention_cases(_scale: Scale) -> list[str]:
    return list(ATTENTION)


def measure_attention(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with a row per form of ours and per library."""
    for name in wanted:
        if run.is_out_of_time:
            return
        case = ATTENTION[name]
        nodes = pack(_sized(case.tree, run.device))
        subjects: dict[str, Callable[[], Subject]] = {}
        facts: dict[str, Row] = {}
        for how, form in case.forms.items():
            form = _resolved(form, nodes)
            subjects[how] = functools.partial(_ours, run, nodes, form)
            facts[how] = _facts(form, nodes)
        for how in case.libraries:
            form = _resolved(next(iter(case.forms.values())), nodes)
            subjects[how] = functools.partial(_by_torch, run, nodes, form, how)
            facts[how] = _facts(form, nodes)
        rows = _measure(run, subjects, case.libraries)
        yield name, [_rated({**facts[row["how"]], **row}) for row in rows]


def delta_cases(_scale: Scale) -> list[str]:
    return list(DELTA)


def measure_delta(
    run: Run, wanted: list[str], libraries: Sequence[str] = (FLA, FLASH_QLA)
) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with our row, and one per library, level by level."""
    for name in wanted:
        if run.is_out_of_time:
            return
        nodes = pack(_sized(DELTA[name], run.device))
        layout = layout_of(nodes, run.device)
        inputs, dout = _recurrence(run, nodes.num_tokens)
        scale = inputs[0].shape[-1] ** -0.5
        ours = Subject(
            run=lambda *rows, of=layout, by=scale: cast("Any", gated_delta_rule)(*rows, of, by),
            inputs=inputs,
            dout=dout,
        )
        subjects: dict[str, Callable[[], Subject]] = {OURS: lambda of=ours: of}
        for each in libraries:
            subjects[each] = functools.partial(_by_library, each, ours, layout, scale)
        rows = _measure(run, subjects, libraries)
        yield name, [{"tokens": nodes.num_tokens, **row} for row in rows]


def _measure(
    run: Run, subjects: Mapping[str, Callable[[], Subject]], libraries: Sequence[str]
) -> list[Row]:
    """A row per subject, warmed up and then timed in turns. Libraries have the inputs of the first
    subject, and their distances from it."""
    clock: Clock = CudaClock() if run.device.type == "cuda" else HostClock()
    rows: dict[str, Row] = {}
    ready: dict[str, Subject] = {}
    first: tuple[Tensor, ...] = ()
    for how, make in subjects.items():
        rows[how] = {"how": how}
        started = time.monotonic()
        try:
            subject = make()
            out = subject.run(*subject.inputs)
            results = (out.detach(), *subject.gradients(out))
            first = first or results
            if how in libraries:
                rows[how]["errors"] = _distances(results, first)
            ready[how] = subject
        except Exception as error:  # noqa: BLE001  whatever a library raises goes into its row
            rows[how] |= refusal(error)
        rows[how]["warm_up_s"] = time.monotonic() - started
        release(run.device)
    del first
    samples = _sample(run, ready, clock)
    for how, (forward, backward) in samples.items():
        rows[how] |= {
            "fwd_ms": statistics.median(forward),
            "bwd_ms": statistics.median(backward),
            "samples": {"fwd_ms": forward, "bwd_ms": backward},
        }
    return list(rows.values())


def _sample(
    run: Run, subjects: Mapping[str, Subject], clock: Clock
) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of forwards and of backwards, in rounds that begin in rotation."""
    samples = {how: (list[float](), list[float]()) for how in subjects}
    spent = dict.fromkeys(subjects, 0.0)
    for index in range(run.num_samples):
        if index >= MIN_SAMPLES and run.is_out_of_time:
            break
        active = [how for how in subjects if spent[how] < SUBJECT_S]
        first = index % max(len(active), 1)
        for how in active[first:] + active[:first]:
            started = time.monotonic()
            forward, backward = _once(subjects[how], clock)
            samples[how][0].append(forward)
            samples[how][1].append(backward)
            spent[how] += time.monotonic() - started
    return samples


def _once(subject: Subject, clock: Clock) -> tuple[float, float]:
    outs: list[Tensor] = []
    forward = clock.milliseconds(lambda: outs.append(subject.run(*subject.inputs)))
    backward = clock.milliseconds(lambda: _drop(subject.gradients(outs[0])))
    return forward, backward


def _drop(_results: object) -> None:
    """A timed call returns nothing."""


def _distances(results: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    """Relative L2 distances of output and gradients."""
    return [
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        for a, b in zip(results, others, strict=True)
    ]


def _sized(tree: Tree, device: torch.device) -> Tree:
    """The tree, smaller on a CPU."""
    if device.type == "cuda":
        return tree
    return Tree(tree.parents, [math.ceil(length / SMALLER) for length in tree.lengths])


def _resolved(form: Form, nodes: Nodes) -> Form:
    depth = int(_ends(nodes).max())
    return replace(form, window=depth) if form.window == 0 else form


def _ends(nodes: Nodes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Depth of each node's end, int64 [M]."""
    end = nodes.stop - nodes.start
    for node, parent in enumerate(nodes.parent.tolist()):
        end[node] += end[parent] if parent >= 0 else 0
    return end


def _facts(form: Form, nodes: Nodes) -> Row:
    end = _ends(nodes)
    begin = end - (nodes.stop - nodes.start)
    pairs = int((path_pairs(end, form.window) - path_pairs(begin, form.window)).sum())
    forward, backward = form.flops(pairs)
    return {
        "heads": [form.num_heads, form.num_kv_heads],
        "head_dims": [form.head_dim, form.value_dim],
        "window": form.window,
        "has_sinks": form.has_sinks,
        "tokens": nodes.num_tokens,
        "pairs": pairs,
        "fwd_flops": forward,
        "bwd_flops": backward,
    }


def _rated(row: Row) -> Row:
    if "fwd_ms" not in row:
        return row
    rates = {f"{x}_tflops": row[f"{x}_flops"] / row[f"{x}_ms"] / 1e9 for x in ("fwd", "bwd")}
    return {**row, **rates}


def _normal(run: Run, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normally distributed tensors: on constants the chip would run faster than on real data."""
    generator = torch.Generator(run.device).manual_seed(run.seed)
    return [
        torch.randn(shape, generator=generator, dtype=run.scale.dtype, device=run.device)
        for shape in shapes
    ]


def _drawn(run: Run, form: Form, num_tokens: int) -> tuple[list[Tensor], Tensor]:
    q, k, v, dout = _normal(
        run,
        (num_tokens, form.num_heads, form.head_dim),
        (num_tokens, form.num_kv_heads, form.head_dim),
        (num_tokens, form.num_kv_heads, form.value_dim),
        (num_tokens, form.num_heads, form.value_dim),
    )
    return [q, k, v], dout


def _ours(run: Run, nodes: Nodes, form: Form) -> Subject:
    layout = layout_of(nodes, run.device)
    given, dout = _drawn(run, form, nodes.num_tokens)
    if form.has_sinks:
        given.append(torch.zeros(form.num_heads, dtype=run.scale.dtype, device=run.device))

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        scale = form.head_dim**-0.5
        return tree_attention(q, k, v, layout, scale, window=form.window, sink_N=sink)[0]

    return Subject(run=attend, inputs=_leaves(given), dout=dout)


def _by_torch(run: Run, nodes: Nodes, form: Form, kernel: str) -> Subject:
    """torch's own attention by one of its kernels; on a CPU by what it has."""
    kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    allowed = [kinds[kernel]] if run.device.type == "cuda" else [SDPBackend.MATH]
    offsets = [*nodes.start[nodes.parent < 0].tolist(), nodes.num_tokens]
    given, dout = _drawn(run, form, nodes.num_tokens)

    def attend(*rows: Tensor) -> Tensor:
        q, k, v = rows
        with sdpa_kernel(allowed):
            return attend_each((q, k, v), offsets, form.head_dim**-0.5)

    return Subject(run=attend, inputs=_leaves(given), dout=dout)


def _recurrence(run: Run, num_tokens: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs of the recurrence, with decays of about 0.95, and the output's gradient."""
    keys, values, dim = (16, 32, 128) if run.device.type == "cuda" else (2, 4, 16)
    q, k, v, dout, g, beta = _normal(
        run,
        (num_tokens, keys, dim),
        (num_tokens, keys, dim),
        (num_tokens, values, dim),
        (num_tokens, values, dim),
        (num_tokens, values),
        (num_tokens, values),
    )
    g = torch.nn.functional.logsigmoid(g.to(accumulation_dtype(g.dtype)) + DECAY_BIAS)
    return _leaves([q, k, v, g, beta.sigmoid()]), dout


def _by_library(name: str, ours: Subject, layout: TreeLayout, scale: float) -> Subject:
    call, table = library(name), layout.node_table_M4
    return replace(ours, run=lambda *rows: by_level(call, rows, table, scale))


def _leaves(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in given)
