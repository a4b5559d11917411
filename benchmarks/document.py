"""The sections of documents that benchmarks write.

Enters lines, leaves them in a document between two markers of their own. Invariant: nothing else of
the document changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


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
