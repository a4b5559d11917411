"""Benchmarks updates through the whole service on one device, with worker kills in mid-update.

Measures into a result file, written after each update, or prints a file's table and section of a
document. A file is written only if the GPU tests are green for these sources.

    python benchmarks/service/main.py --out benchmarks/results/h200/service.json
    python benchmarks/service/main.py --report benchmarks/results/h200/service.json
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import aligned, link, markdown_table, write_section
from benchmarks.service.run import (
    FULL,
    KILLED,
    NOT_FINISHED,
    POLICIES,
    RESUMED,
    SMALL,
    STEADY,
    measure,
)
from harness.gpu_results import describe_gpu, write_result

BEGIN = "<!-- service: written by benchmarks/service/main.py -->"
END = "<!-- end of service -->"
COLUMNS = (
    *("policy", "update s", "trained s", "publish s", "beyond s", "killed update s"),
    *("created s", "pull GiB/s", "peak GiB"),
)


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    if args.report is None:
        _measure(args)
        return
    result = json.loads(args.report.read_text(encoding="utf-8"))
    print(format_table(result))
    if args.markdown is not None:
        write_markdown(result, args.markdown, link(args.report, args.markdown))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weights-root", type=Path, help="versions go below it, /dev/shm say, and not to the disk"
    )
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=POLICIES, help="which of them, in order"
    )
    return parser.parse_args(arguments)


def _measure(args: argparse.Namespace) -> None:
    # Ends the service with this process, so that its worker frees the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def keep(payload: dict[str, Any]) -> None:
        row = payload["rows"][-1]
        last = {**row, "updates": row["updates"][-1:]}
        print(len(row["updates"]), json.dumps(last), file=sys.stderr, flush=True)
        if args.out is not None:
            write_result(args.out, payload, seed=args.seed)

    plan = FULL if is_for_gpu(args) else SMALL
    with ExitStack() as folders:
        root = Path(folders.enter_context(TemporaryDirectory(prefix="rt-")))
        weights_root: Path | None = None
        if args.weights_root is not None:
            name = folders.enter_context(TemporaryDirectory(prefix="rt-", dir=args.weights_root))
            weights_root = Path(name)
        payload = measure(plan, args.device, root, args.seed, args.policies, weights_root, keep)
    print(format_table({**describe_gpu(args.seed), **payload}))


def measured_rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows by policy; that of an interrupted policy is left out."""
    return {row["policy"]: row for row in result["rows"] if row["failure"] != NOT_FINISHED}


def is_same_as_steady(result: dict[str, Any], policy: str) -> bool:
    """Whether a policy's answers and weights equal the steady one's, bit for bit."""
    rows = {row["policy"]: row for row in result["rows"]}
    steady, other = rows[STEADY], rows[policy]
    if steady["failure"] or other["failure"]:
        return False
    told = ("version", "loss", "grad_norm")
    return steady["digests"] == other["digests"] and all(
        mine[name] == others[name]
        for mine, others in zip(steady["updates"], other["updates"], strict=True)
        for name in told
    )


def format_table(result: dict[str, Any]) -> str:
    """The table for a terminal."""
    table = aligned([list(COLUMNS), *map(_cells, measured_rows(result).values())])
    return "\n".join([_provenance(result), *table, *_notes(result)])


def write_markdown(result: dict[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    lines = [
        f"\n{_provenance(result)} [Raw samples]({result_link}).\n",
        *markdown_table(COLUMNS, map(_cells, measured_rows(result).values())),
        "",
        *(f"- {note}" for note in _notes(result)),
    ]
    write_section(path, BEGIN, END, lines)


def _cells(row: dict[str, Any]) -> list[str]:
    """Medians over undisturbed updates, without the first, which compiles."""
    if row["failure"]:
        return [row["policy"], *("–" for _ in COLUMNS[1:])]
    whole = [update for update in row["updates"][1:] if not update["is_killed"]]
    killed = [update["seconds"] for update in row["updates"] if update["is_killed"]]
    names = ("seconds", "trained_s", "publish_s", "beyond_s")
    medians = [statistics.median(update[name] for update in whole) for name in names]
    return [
        row["policy"],
        *(f"{median:.2f}" for median in medians),
        f"{killed[0]:.1f}" if killed else "–",
        f"{row['created_s']:.1f}",
        f"{row['pulled_gib'] / row['pull_s']:.2f}",
        f"{max(update['peak_gib'] for update in row['updates']):.1f}",
    ]


def _notes(result: dict[str, Any]) -> Iterator[str]:
    rows = measured_rows(result)
    if missing := [name for name in POLICIES if name not in rows]:
        yield f"not measured yet: {', '.join(missing)}"
    for policy in (RESUMED, KILLED):
        if {STEADY, policy} <= rows.keys():
            found = "met" if is_same_as_steady(result, policy) else "missed"
            yield f"{found}: what {policy} was told, and its weights, are the bits of {STEADY}"
    first = [
        f"{name} {row['updates'][0]['seconds']:.1f}" for name, row in rows.items() if row["updates"]
    ]
    yield f"seconds of the first update, which compiles and runs the self-check: {', '.join(first)}"
    yield from (f"{name}: {row['failure']}" for name, row in rows.items() if row["failure"])
    yield f"the service was well {result['start_s']:.1f} s after its start"


def _provenance(result: dict[str, Any]) -> str:
    plan, versions = result["plan"], result["versions"]
    group, stale = plan["group"], result.get("stale")
    return (
        f"{result['gpu']}, torch {versions['torch']}, commit {result['commit'][:12]}, "
        f"{plan['model']['name']} in {plan['dtype']}, {plan['num_updates']} updates of "
        f"{len(group['responses'])} responses to a prompt of {group['prompt']}, "
        f"longer by {plan['longer_by']} each time, versions "
        f"{'in memory' if result['weights_root'].startswith('/dev/shm') else 'on the disk'}."
        + (f" STALE: {stale}." if stale else "")
    )


if __name__ == "__main__":
    main()
