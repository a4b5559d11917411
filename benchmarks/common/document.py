"""Writes the outputs of benchmarks: result files, aligned text tables, generated sections of
documents.

A section lies between two markers; the rest of the document is left untouched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Columns of a table of figures.
FIGURE_COLUMNS = ("", "measured", "wanted")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result file, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def aligned(cells: Sequence[Sequence[str]], num_text_columns: int = 1) -> list[str]:
    """Lines of aligned columns; the first `num_text_columns` are left-aligned, the rest right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def link(path: Path, document: Path) -> str:
    """A relative link from `document` to `path`."""
    return Path(os.path.relpath(path, document.parent)).as_posix()


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int = 1
) -> Iterator[str]:
    """Lines of a Markdown table; the first `num_text_columns` are left-aligned, the rest right."""
    marks = ["---"] * num_text_columns + ["---:"] * (len(columns) - num_text_columns)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(marks)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def figure_lines(
    result: Mapping[str, Any], cells: Iterable[Sequence[str]], of_what: str, result_link: str
) -> Iterator[str]:
    """A section's lines: what figures of a CPU were measured on, `of_what`, and their table."""
    versions = result["versions"]
    yield (
        f"\n{result['cores']} cores of {result['device']}, torch {versions['torch']}, "
        f"Ray {versions['ray']}, commit {result['commit'][:12]}, {of_what}. "
        f"[Raw samples]({result_link}).\n"
    )
    yield from markdown_table(FIGURE_COLUMNS, cells)


def write_section(path: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """`replace_section` in the document at `path`."""
    text = path.read_text(encoding="utf-8")
    path.write_text(replace_section(text, begin, end, lines), encoding="utf-8")


def replace_section(document: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """The document with `lines` between its two markers.

    Raises:
        ValueError: The markers are not there exactly once each, in order.
    """
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end) or begin in after or end in before + after:
        raise ValueError(f"not the markers {begin} and {end} once, in this order")
    section = "\n".join(lines)
    return f"{before}{begin}\n{section}\n{end}{after}"
