"""The tables that benchmarks print, and the sections of documents that they write.

Enters cells or lines, leaves the one as columns, the other in a document between two markers of
their own. Invariant: nothing else of the document changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def aligned(cells: Sequence[Sequence[str]], num_text_columns: int = 1) -> list[str]:
    """Lines of equal columns: text, which comes first, to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def link(path: Path, document: Path) -> str:
    """`path` as a document has to write it."""
    return Path(os.path.relpath(path, document.parent)).as_posix()


def replace_section(document: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """The document with `lines` between its two markers.

    Raises:
        ValueError: It does not have each marker once, in order.
    """
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end) or begin in after or end in before + after:
        raise ValueError(f"not the markers {begin} and {end} once, in this order")
    section = "\n".join(lines)
    return f"{before}{begin}\n{section}\n{end}{after}"
