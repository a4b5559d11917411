"""Turns the logs of compute-sanitizer into a result file and an exit status.

A tool is clean only if its log ends with a summary of no errors and no warnings, and the program
under it succeeded.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.gpu_results import write_result

SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (?P<errors>\d+) errors?"),
    "racecheck": re.compile(
        r"RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed"
        r" \((?P<errors>\d+) errors?, (?P<warnings>\d+) warnings?\)"
    ),
}
SUCCESS = "sanitize case: all values right"
MAX_REPORTED_LINES = 60


def read_log(tool: str, text: str, exit_status: int) -> dict[str, Any]:
    """Findings of a tool; `is_clean` is false if it reports nothing."""
    found = list(SUMMARIES[tool].finditer(text))
    counts = {name: int(n) for name, n in found[-1].groupdict().items()} if found else {}
    are_values_right = SUCCESS in text
    is_clean = bool(counts) and not any(counts.values()) and exit_status == 0 and are_values_right
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    return {
        "is_clean": is_clean,
        "summary": found[-1].group() if found else "",
        "counts": counts,
        "are_values_right": are_values_right,
        "exit_status": exit_status,
        "output": (lines if is_clean else text.splitlines())[-MAX_REPORTED_LINES:],
    }


def main(arguments: list[str] | None = None) -> int:
    """Writes the file; returns 0 if every tool is clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "tools", nargs="+", metavar="TOOL:STATUS:LOG", help="a tool, its exit status and its log"
    )
    args = parser.parse_args(arguments)
    tools: dict[str, dict[str, Any]] = {}
    for text in args.tools:
        tool, exit_status, log = text.split(":", 2)
        output = Path(log).read_text(encoding="utf-8", errors="replace")
        tools[tool] = read_log(tool, output, int(exit_status))
    write_result(args.out, {"tools": tools}, seed=0)
    for tool, entry in tools.items():
        summary = entry["summary"] or "no summary"
        print(f"{tool}: {'clean' if entry['is_clean'] else 'NOT CLEAN'}: {summary}")
    return 0 if all(entry["is_clean"] for entry in tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
