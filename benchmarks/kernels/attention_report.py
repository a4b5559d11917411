"""Table, targets and document section of an attention result.

A backend without figures shows its reason, a missed target what was reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.document import aligned, markdown_table, replace_section

Row = dict[str, Any]

# DualKV, Table 1: speed-up of its attention over replicated FlashAttention-2, forward and backward.
PUBLISHED_SPEEDUPS = {"t1-28-4k": 1.62, "t1-28-16k": 3.74, "t1-16-32k": 5.16, "t1-28-32k": 6.00}
FASTER_THAN_PUBLISHED = 1.5
TFLOPS_SHAPES = (*PUBLISHED_SPEEDUPS, "paper")
MIN_FWD_TFLOPS = 670.0
MIN_BWD_TFLOPS = 570.0
MIN_SPEEDUP_OVER_FLASH = {"forest16": 1.3, "binary6": 1.3, "short": 2.0}
MAX_DETERMINISTIC_SLOWDOWN = 1.5

OURS, DETERMINISTIC = "cuda", "cuda-deterministic"
FLASH, FA2 = "flash", "fa2-replicated"
COLUMNS = (
    *("shape", "backend", "fwd ms", "bwd ms", "fwd TFLOP/s", "bwd TFLOP/s"),
    *("x flash", "x FA2 replicated", "peak GiB"),
)
# Columns for a loop without pauses, if it was measured.
SUSTAINED_COLUMNS = ("sustained TFLOP/s", "J / TFLOP")
NUM_TEXT_COLUMNS = 2
NOTHING = "–"
BEGIN = "<!-- attention results: written by benchmarks/kernels/attention.py -->"
END = "<!-- end of attention results -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure's target and what was reached."""

    name: str
    bound: float
    reached: float
    is_met: bool


class Table:
    """A result's rows with figures, by shape and backend."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._measured = {(r["shape"], r["backend"]): r for r in rows if "error" not in r}
        self.shapes = list(dict.fromkeys(row["shape"] for row in rows))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that have figures."""
        is_sustained = any("joules" in row for row in self.rows)
        return (*COLUMNS, *(SUSTAINED_COLUMNS if is_sustained else ()))

    def row(self, shape: str, backend: str) -> Row | None:
        return self._measured.get((shape, backend))

    def speedup(self, shape: str, backend: str, over: str) -> float | None:
        """Seconds of `over` over those of `backend`, forward and backward together."""
        mine, other = self.row(shape, backend), self.row(shape, over)
        if mine is None or other is None:
            return None
        return (other["fwd_ms"] + other["bwd_ms"]) / (mine["fwd_ms"] + mine["bwd_ms"])


def gemm_tflops(result: dict[str, Any]) -> float:
    """TFLOP/s of the bf16 matrix product, the best of the runs."""
    return max(run["gemm"]["tflops"] for run in result["runs"])


def targets(rows: list[Row]) -> list[Target]:
    """Every target for which the rows have figures."""
    table = Table(rows)
    found: list[Target] = []
    for shape in table.shapes:
        found += _tflops_targets(table, shape)
        found += _speed_targets(table, shape)
        found += _workspace_targets(table, shape)
    return found


def format_table(result: dict[str, Any]) -> str:
    """The table for a terminal, with its provenance."""
    table = Table(result["rows"])
    lines = aligned([list(table.columns), *_cells(table)], NUM_TEXT_COLUMNS)
    lines.insert(1, "-" * max(map(len, lines)))
    notes = [_provenance(result), *_errors(result["rows"]), *_target_lines(result["rows"])]
    return "\n".join([*lines, "", *notes])


def write_markdown(result: dict[str, Any], path: Path, link: str, image: str) -> None:
    """Replaces the section between a document's two markers, or appends it with them.

    Raises `ValueError`.
    """
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text and END not in text:
        text = f"{text.rstrip()}\n\n## Measured\n\n{BEGIN}{END}\n"
    written = replace_section(text, BEGIN, END, _markdown(result, link, image))
    path.write_text(written, encoding="utf-8")


def _markdown(result: dict[str, Any], link: str, image: str) -> Iterator[str]:
    yield f"\n{_provenance(result)} [Raw samples]({link}).\n"
    if image:
        yield f"![TFLOP/s of unmasked work, by shape and backend]({image})\n"
    table = Table(result["rows"])
    yield from markdown_table(table.columns, _cells(table), NUM_TEXT_COLUMNS)
    yield ""
    yield from (f"- {line}" for line in _errors(result["rows"]))
    yield from (f"- {line}" for line in _target_lines(result["rows"]))


def _cells(table: Table) -> Iterator[list[str]]:
    for row in table.rows:
        shape, backend = row["shape"], row["backend"]
        if "error" in row:
            yield [shape, backend, *[NOTHING] * (len(table.columns) - NUM_TEXT_COLUMNS)]
            continue
        cells = [
            shape,
            backend,
            *(f"{row[name]:.2f}" for name in ("fwd_ms", "bwd_ms")),
            *(f"{row[name]:.0f}" for name in ("fwd_tflops", "bwd_tflops")),
            *(_ratio(table.speedup(shape, backend, over)) for over in (FLASH, FA2)),
            f"{row['peak_gib']:.2f}" if "peak_gib" in row else NOTHING,
        ]
        yield [*cells, *_sustained_cells(row)][: len(table.columns)]


def _sustained_cells(row: Row) -> list[str]:
    if "joules" not in row:
        return [NOTHING, NOTHING]
    tflop = (row["fwd_tflops"] * row["fwd_ms"] + row["bwd_tflops"] * row["bwd_ms"]) / 1e3
    return [f"{1e3 * tflop / row['sustained_ms']:.0f}", f"{row['joules'] / tflop:.2f}"]


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _provenance(result: dict[str, Any]) -> str:
    versions = result["versions"]
    runs = "" if result["is_one_run"] else f", {len(result['runs'])} runs: each shape is of one"
    digest, _, dirty = result["commit"].partition("-")
    commit = f"{digest[:12]}-dirty" if dirty else digest[:12]
    stale = f" STALE: {result['stale']}." if result.get("stale") else ""
    return (
        f"{result['gpu']}, driver {versions['driver']}, torch {versions['torch']}, "
        f"flash-attn-4 {versions['flash-attn-4']}, commit {commit}, "
        f"bf16 GEMM {gemm_tflops(result):.0f} TFLOP/s{runs}.{stale}"
    )


def _errors(rows: list[Row]) -> list[str]:
    return [
        f"{row['shape']}, {row['backend']}: {' '.join(row['error'].split())}"
        for row in rows
        if "error" in row
    ]


def _target_lines(rows: list[Row]) -> list[str]:
    found = targets(rows)
    missed = [
        f"missed: {t.name}: {t.reached:.2f}, not {t.bound:.2f}" for t in found if not t.is_met
    ]
    return [f"{len(found) - len(missed)} of {len(found)} targets met", *missed] if found else []


def _tflops_targets(table: Table, shape: str) -> Iterator[Target]:
    row = table.row(shape, OURS)
    if row is None or shape not in TFLOPS_SHAPES:
        return
    yield _at_least(f"{shape} forward TFLOP/s", MIN_FWD_TFLOPS, row["fwd_tflops"])
    yield _at_least(f"{shape} backward TFLOP/s", MIN_BWD_TFLOPS, row["bwd_tflops"])


def _speed_targets(table: Table, shape: str) -> Iterator[Target]:
    over_flash = table.speedup(shape, OURS, FLASH)
    if over_flash is not None:
        bound = MIN_SPEEDUP_OVER_FLASH.get(shape, 1.0)
        yield _at_least(f"{shape} speed-up over {FLASH}", bound, over_flash)
    over_fa2 = table.speedup(shape, OURS, FA2)
    if over_fa2 is not None and shape in PUBLISHED_SPEEDUPS:
        bound = FASTER_THAN_PUBLISHED * PUBLISHED_SPEEDUPS[shape]
        yield _at_least(f"{shape} speed-up over {FA2}", bound, over_fa2)
    slowdown = table.speedup(shape, DETERMINISTIC, OURS)
    if slowdown is not None:
        name = f"{shape} time of {DETERMINISTIC} over {OURS}"
        yield _at_most(name, MAX_DETERMINISTIC_SLOWDOWN, 1 / slowdown)


def _workspace_targets(table: Table, shape: str) -> Iterator[Target]:
    for backend in (OURS, DETERMINISTIC):
        row = table.row(shape, backend)
        if row is not None and "workspace_limit_gib" in row:
            reached = max(row["forward_workspace_gib"], row["backward_workspace_gib"])
            yield _at_most(
                f"{shape} workspace GiB of {backend}", row["workspace_limit_gib"], reached
            )


def _at_least(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached >= bound)


def _at_most(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached <= bound)
