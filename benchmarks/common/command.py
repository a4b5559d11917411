"""Command-line options that the benchmarks share: measure into a file, draft, or report from one.

A GPU is measured into a file only if the GPU tests are green for these sources.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.document import FIGURE_COLUMNS, aligned, link, write_json
from harness.gpu_results import TESTS, require_green_tests
from ratoon.cluster.worker_start import GPU_ENVIRONMENT

Result = dict[str, Any]


def make_parser(description: str | None, *, has_device: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with the shared options; one of --out, --draft and --report is required.
    Without `has_device` only the CPU is measured."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--out", type=Path, help="measure into this result file")
    mode.add_argument("--draft", action="store_true", help="measure untested sources too; no file")
    mode.add_argument("--report", type=Path, help="print the tables of this result file")
    if not has_device:
        return parser
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tests", type=Path, default=TESTS, help="the report of make test-gpu")
    return parser


def add_document_options(parser: argparse.ArgumentParser) -> None:
    """Options for benchmarks whose report includes a plot and a section of a document."""
    parser.add_argument("--plot", type=Path, help="with --report: write this PNG")
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")


def names(text: str) -> tuple[str, ...]:
    """Parses an option's value `a,b,c`."""
    return tuple(text.split(","))


def is_for_gpu(args: argparse.Namespace) -> bool:
    """Whether to measure a GPU; if so, the process goes on in the environment of a GPU's worker.

    torch reads some of it while it is imported, so the process begins anew where it was started
    without.

    Raises:
        SystemExit: The GPU tests are missing, red, or of other sources.
    """
    is_gpu = args.device == "cuda"
    if is_gpu and not args.draft:
        require_green_tests(args.tests)
    missing = {name: value for name, value in GPU_ENVIRONMENT.items() if name not in os.environ}
    if is_gpu and missing:
        os.execve(sys.executable, sys.orig_argv, os.environ | missing)
    return is_gpu


def write_report(
    args: argparse.Namespace,
    format_tables: Callable[[Result], str],
    plot: Callable[[Result, Path], None],
    write_markdown: Callable[[Result, Path, str, str], None],
) -> None:
    """Prints the tables of --report's file, and writes what --plot and --markdown name.

    `write_markdown` takes the document and its relative links to the file and the plot; the latter
    is empty if there is no plot.
    """
    result = json.loads(args.report.read_text(encoding="utf-8"))
    print(format_tables(result))
    if args.plot is not None:
        plot(result, args.plot)
    if args.markdown is not None:
        image = "" if args.plot is None else link(args.plot, args.markdown)
        write_markdown(result, args.markdown, link(args.report, args.markdown), image)


def run_figures(
    args: argparse.Namespace,
    measure: Callable[[], Result],
    cells: Callable[[Result], list[list[str]]],
    write_markdown: Callable[[Result, Path, str], None],
) -> None:
    """Measures, or reads --report's file; prints the figures, and writes what options name.

    `cells` gives a row of each figure: what, measured, wanted. `write_markdown` takes the document
    and its relative link to the file.
    """
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = measure()
        if args.out is not None:
            write_json(args.out, result)
    print("\n".join(aligned([list(FIGURE_COLUMNS), *cells(result)])))
    if args.report is not None and args.markdown is not None:
        write_markdown(result, args.markdown, link(args.report, args.markdown))
