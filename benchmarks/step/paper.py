"""Section `paper`: forward and backward of one recorded group through the whole model.

Enters a run, leaves the rows of its one case. Invariant: rows differ in attention and in whether
prefixes are shared or streamed, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.step.rollouts import make_batch
from benchmarks.step.run import Row, Run, Scale
from benchmarks.step.subjects import Way
from benchmarks.step.ways import Plan, Ways, compare_ways


def cases(scale: Scale) -> list[str]:
    return [f"{scale.paper.prompt}x{len(scale.paper.responses)}"]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the case and its rows: ours, packed and streamed, replicated, and other backends."""
    scale = run.scale
    for case in wanted:
        ways = Ways(run, scale.model)
        batch = make_batch((scale.paper,), scale.model.vocab_size, run.seed)
        others = [Way(backend=name, is_packed=True) for name in scale.packed[1:]]
        order = [scale.ours, *scale.streamed, scale.baseline, *others]
        yield case, compare_ways(ways, batch, order, Plan(cuts=scale.cuts))
