"""What a result of the step benchmark says: its tables, the targets, a section of a document.

Enters the result file's content, leaves text. Invariant: a ratio is between two rows of one case,
which are of one run; a way without figures shows its reason, and a missed target what was reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.document import aligned, replace_section
from benchmarks.step.tables import tables
from benchmarks.step.targets import targets

BEGIN = "<!-- step results: written by benchmarks/step/main.py -->"
END = "<!-- end of step results -->"


def format_tables(result: dict[str, Any]) -> str:
    """Every table for a terminal, and what they were measured on."""
    lines = [_provenance(result)]
    for table in tables(result):
        lines += [
            "",
            table.title,
            *aligned([table.columns, *table.rows], table.num_text_columns),
            *table.notes,
        ]
    found = _target_lines(result)
    return "\n".join([*lines, "", *found] if found else lines)


def write_markdown(
    result: dict[str, Any], path: Path, link: str, image: str, missing: Sequence[str]
) -> None:
    """Replaces what stands between the two markers of a document.

    Args:
        result: The result file's content.
        path: The document.
        link: To the result file, as the document has to write it.
        image: To the plot, likewise; empty where there is none.
        missing: Cases that the result does not have yet.

    Raises:
        ValueError: The document does not have each marker once, in order.
    """
    text = path.read_text(encoding="utf-8")
    written = replace_section(text, BEGIN, END, _markdown(result, link, image, missing))
    path.write_text(written, encoding="utf-8")


def _markdown(
    result: dict[str, Any], link: str, image: str, missing: Sequence[str]
) -> Iterator[str]:
    yield f"\n{_provenance(result)} [Raw samples]({link}).\n"
    if missing:
        yield f"Not measured yet: {', '.join(missing)}.\n"
    if image:
        yield f"![Seconds, memory and speed-ups of the tables below]({image})\n"
    for table in tables(result):
        yield f"### {table.title}\n"
        yield "| " + " | ".join(table.columns) + " |"
        numbers = ["---:"] * (len(table.columns) - table.num_text_columns)
        yield "|" + "|".join(["---"] * table.num_text_columns + numbers) + "|"
        yield from ("| " + " | ".join(row) + " |" for row in table.rows)
        yield ""
        if table.notes:
            # A star that begins an item would begin a list in it.
            yield from (f"- {note}".replace("*", r"\*") for note in table.notes)
            yield ""
    yield from (f"- {line}" for line in _target_lines(result))


def _provenance(result: dict[str, Any]) -> str:
    versions = result["versions"]
    runs = result["runs"]
    several = f", {len(runs)} runs: each case is of one" if len(runs) > 1 else ""
    digest, _, dirty = result["commit"].partition("-")
    commit = f"{digest[:12]}-dirty" if dirty else digest[:12]
    gemm = max(run["gemm"]["tflops"] for run in runs)
    stale = f" STALE: {result['stale']}." if result.get("stale") else ""
    return (
        f"{result['gpu']}, driver {versions['driver']}, torch {versions['torch']}, commit "
        f"{commit}, gradients in {result['gradient_dtype']}, bf16 GEMM {gemm:.0f} TFLOP/s"
        f"{several}.{stale}"
    )


def _target_lines(result: dict[str, Any]) -> list[str]:
    found = targets(result)
    missed = [
        f"missed: {t.name}: {t.reached:.3f}, not {t.bound:.2f}" for t in found if not t.is_met
    ]
    return [f"{len(found) - len(missed)} of {len(found)} targets met", *missed] if found else []
