#!/usr/bin/env python3
"""Refuses docstrings and comments that begin in mid-sentence: with Of, The same, That or Those.

    python scripts/check_english.py             # the check; pre-commit runs it
    python scripts/check_english.py --update    # lower the baseline to the hits that are left

The rule looks at first words only, so "The same run is repeated" is refused too: name the subject.
A docstring is any statement that is a plain string, so the text below an attribute counts. A line
of comment that continues the comment above it is no beginning.

scripts/english_baseline.txt lists the files that still have hits, as "path: count". A file with
more hits than its count fails the check. A file with fewer fails it as well, until --update has
lowered its count: the baseline can only shrink.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE = "scripts/english_baseline.txt"
FOLDERS = (
    "service/src",
    "clients/python/src",
    "kernels/src",
    "proto/src",
    "harness",
    "benchmarks",
    "tests",
)
_REFUSED = re.compile(r"\b(Of|The same|That|Those)\b")


def hits(source: str) -> list[tuple[int, str]]:
    """(line number, first line) of each docstring and comment that begins with a refused word."""
    if not _REFUSED.search(source):
        return []
    begun = sorted([*_docstrings(source), *_comments(source)])
    return [(number, text.split("\n")[0]) for number, text in begun if _REFUSED.match(text)]


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield node.lineno, text.strip()


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, without the lines that continue one: below it, at its column."""
    above = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            if above != (line - 1, column):
                yield line, token.string.lstrip("#: ")
            above = token.start


def all_hits(root: Path) -> dict[str, list[tuple[int, str]]]:
    """The hits of every file that has some, by its path below `root`."""
    found: dict[str, list[tuple[int, str]]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if "_pb2" not in path.name and (own := hits(path.read_text(encoding="utf-8"))):
                found[path.relative_to(root).as_posix()] = own
    return found


def read_baseline(root: Path) -> dict[str, int]:
    lines = (root / BASELINE).read_text(encoding="utf-8").splitlines()
    return {path: int(count) for path, count in (line.rsplit(": ", 1) for line in lines)}


def complaints(
    found: Mapping[str, list[tuple[int, str]]], baseline: Mapping[str, int]
) -> Iterator[str]:
    """One line per fault; none if each file has exactly the hits that the baseline allows."""
    for path in sorted({*found, *baseline}):
        own, allowed = found.get(path, []), baseline.get(path, 0)
        if len(own) > allowed:
            yield from (f"{path}:{line}: begins in mid-sentence: {text}" for line, text in own)
            yield f"{path}: {len(own)} hits, the baseline allows {allowed}"
        elif len(own) < allowed:
            yield f"{path}: {len(own)} hits, the baseline says {allowed}: run it with --update"


def lowered(
    found: Mapping[str, list[tuple[int, str]]], baseline: Mapping[str, int]
) -> dict[str, int]:
    """The baseline with each count at most what was found; files without hits leave it."""
    counts = {path: min(len(found.get(path, [])), count) for path, count in baseline.items()}
    return {path: count for path, count in sorted(counts.items()) if count}


def main(root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--update", action="store_true", help="lower the baseline, never raise it")
    arguments = parser.parse_args()
    found, baseline = all_hits(root), read_baseline(root)
    if arguments.update:
        baseline = lowered(found, baseline)
        lines = [f"{path}: {count}\n" for path, count in baseline.items()]
        (root / BASELINE).write_text("".join(lines), encoding="utf-8")
    faults = list(complaints(found, baseline))
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
