"""Renders the tables of docs/scale.md from a result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.document import markdown_table, write_section

BEGIN = "<!-- scale: written by benchmarks/scale/main.py -->"
END = "<!-- end of scale -->"
# Share of an Update's seconds above which a phase has broken.
BROKEN_SHARE = 0.05
_ALL = "all but Z2"
_NOTHING = "–"
# Numbers of GPUs in the longer tables; the result file has the others too.
_SHOWN = (32, 512, 4096)
# Largest number of GPUs in the memory table: memory hardly falls beyond.
_MEMORY_SHOWN = 128

Result = dict[str, Any]
Row = dict[str, Any]


def write_markdown(result: Result, document: Path, result_link: str) -> None:
    """Fills in the section of the document."""
    write_section(document, BEGIN, END, section(result, result_link))


def section(result: Result, result_link: str) -> Iterator[str]:
    """Its lines: what breaks, seconds and efficiency, remedies, memory, constants."""
    weak = [row for row in result["rows"] if row["scaling"] == "weak"]
    strong = [row for row in result["rows"] if row["scaling"] == "strong"]
    yield f"\n**Modelled, not measured**: commit {result['commit'][:12]}, seed {result['seed']}."
    yield f"[All figures]({result_link}).\n"
    yield f"### What takes more than {BROKEN_SHARE:.0%} of an Update, from how many GPUs on\n"
    yield from _broken_table(weak)
    yield f"\n### Four groups per GPU: {weak[0]['groups']} to {weak[-1]['groups']:,} groups\n"
    yield from _update_table(weak)
    yield "\n### The same, seconds by phase\n"
    yield from _phase_table(weak)
    yield "\n### The same, efficiency with remedies\n"
    yield from _remedy_table(weak)
    yield f"\n### {strong[0]['groups']} groups whatever the GPUs: efficiency\n"
    yield from _strong_table(strong)
    yield "\n### Memory of one GPU, GB without activations\n"
    yield from _memory_table(result["memory"])
    yield "\n### Constants\n"
    yield from _constant_table(result["constants"])


def _broken_table(rows: list[Row]) -> Iterator[str]:
    cells = [[model, _broken(of_model)] for model, of_model in _by_model(rows)]
    yield from markdown_table(("model", "phases"), cells, 2)


def _broken(rows: list[Row]) -> str:
    found: dict[str, int] = {}
    for row in rows:
        for name, seconds in row.get("phases", {}).items():
            if name != "compute" and seconds > BROKEN_SHARE * row["seconds"]:
                found.setdefault(name, row["gpus"])
    return ", ".join(f"{name} {gpus:,}" for name, gpus in found.items())


def _update_table(rows: list[Row]) -> Iterator[str]:
    columns = ("model", "loses most by", "layout", "GPUs", "calls", "seconds", "efficiency",
               "with all remedies", "batch MB/s", "version published s")  # fmt: skip
    cells: list[list[str]] = []
    for row in rows:
        if "phases" not in row:
            cells.append([row["model"], "does not fit", _NOTHING, f"{row['gpus']:,}"])
            cells[-1] += [_NOTHING] * (len(columns) - len(cells[-1]))
            continue
        cells.append([
            row["model"], row["loses_most"], row["layout"], f"{row['gpus']:,}", str(row["calls"]),
            f"{row['seconds']:.1f}", _percent(row["efficiency"]), _percent(row["remedies"][_ALL]),
            f"{1e3 * row['body_gb'] / row['seconds']:.1f}", f"{row['publish_s']:.2f}",
        ])  # fmt: skip
    yield from markdown_table(columns, cells, 3)


def _phase_table(rows: list[Row]) -> Iterator[str]:
    fitting = [row for row in rows if row["gpus"] in _SHOWN and "phases" in row]
    names = list(fitting[0]["phases"])
    cells = [
        [row["model"], f"{row['gpus']:,}", *(_seconds(row["phases"][name]) for name in names)]
        for row in fitting
    ]
    yield from markdown_table(("model", "GPUs", *names), cells)


def _remedy_table(rows: list[Row]) -> Iterator[str]:
    fitting = [row for row in rows if row["gpus"] in _SHOWN and "phases" in row]
    names = list(fitting[0]["remedies"])
    cells = [
        [row["model"], f"{row['gpus']:,}", _percent(row["efficiency"]),
         *(_percent(row["remedies"][name]) for name in names)]
        for row in fitting
    ]  # fmt: skip
    yield from markdown_table(("model", "GPUs", "as designed", *names), cells)


def _strong_table(rows: list[Row]) -> Iterator[str]:
    counts = sorted({row["gpus"] for row in rows})
    cells: list[list[str]] = []
    for model, of_model in _by_model(rows):
        cells.append([model, "as designed", *(_found(row, "efficiency") for row in of_model)])
        remedied = [row.get("remedies", {}) for row in of_model]
        cells.append([model, "all remedies", *(_found(one, _ALL) for one in remedied)])
    yield from markdown_table(("model", "", *(f"{n:,}" for n in counts)), cells, 2)


def _memory_table(rows: list[Row]) -> Iterator[str]:
    columns = ("model", "H100 80 GB", "H200 141 GB", "GPUs", "Z1", "Z2", "Z3")
    yield from markdown_table(
        columns,
        (
            [row["model"], row["H100"] or _NOTHING, row["H200"] or _NOTHING, f"{row['gpus']:,}",
             *(f"{row[layout]:.1f}" for layout in columns[-3:])]
            for row in rows
            if row["gpus"] <= _MEMORY_SHOWN
        ),
        3,
    )  # fmt: skip


def _constant_table(constants: Iterable[Row]) -> Iterator[str]:
    yield from markdown_table(
        ("name", "kind", "source", "unit", "value"),
        (
            [f"`{one['name']}`", one["kind"], one["source"], one["unit"], f"{one['value']:,.4g}"]
            for one in constants
        ),
        4,
    )


def _by_model(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for model in dict.fromkeys(row["model"] for row in rows):
        yield model, [row for row in rows if row["model"] == model]


def _found(row: Row, name: str) -> str:
    return _percent(row[name]) if name in row else _NOTHING


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _seconds(value: float) -> str:
    return "0" if value < 0.005 else f"{value:.2f}"
