"""Table, plot and document section of an optimizer-states result.

Every figure is computed from the runs in the file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.document import aligned, write_section
from benchmarks.optim.judge import LAST, WINDOW, Verdict, judge, targets
from benchmarks.optim.run import BASELINE, NEAREST

BEGIN = "<!-- optimizer states: written by benchmarks/optim/main.py -->"
END = "<!-- end of optimizer states -->"
COLORS = {
    BASELINE: "#777777",
    "bf16_split": "#222222",
    "bf16_split_8bit": "#c98a1b",
    "bf16_stochastic": "#1b7f5c",
    "bf16_8bit": "#3b6fb6",
    NEAREST: "#a34a4a",
}
_COLUMNS = (
    "rate",
    "states",
    "seeds",
    f"loss of the last {LAST}",
    "spread over seeds",
    "minus fp32, same seeds",
    "band of seed noise",
    f"windows of {WINDOW} within",
    "cosine of the updates",
    "their error",
)


def format_table(result: dict[str, Any]) -> str:
    """The table for a terminal, with its provenance."""
    table = aligned([list(_COLUMNS), *(_row(verdict) for verdict in judge(result["runs"]))])
    return "\n".join([_provenance(result), *table, *_notes(result)])


def write_markdown(result: dict[str, Any], path: Path, link: str, image: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    write_section(path, BEGIN, END, _markdown(result, link, image))


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes two panels per rate: loss, and its excess over float32's with the same seeds.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (requirements-dev.txt).
    """
    from matplotlib.figure import Figure

    verdicts = judge(result["runs"])
    rates = list(dict.fromkeys(verdict.learning_rate for verdict in verdicts))
    figure = Figure(figsize=(5 * len(rates), 6.4), layout="constrained")
    columns = figure.subplots(2, len(rates), sharex=True, squeeze=False)
    for column, rate in enumerate(rates):
        panels = columns[:, column]
        _plot_rate(panels, [v for v in verdicts if v.learning_rate == rate])
        panels[0].set_title(f"learning rate {rate:g}", fontsize=10)
        panels[1].set_xlabel("update")
    # At lower rates the few updates do not get near it.
    columns[0, 0].axhline(result["best_loss"], color="#777777", linewidth=0.8, linestyle="--")
    columns[0, 0].set_ylabel("loss, nats per token")
    columns[1, 0].set_ylabel("minus fp32")
    figure.suptitle(f"Optimizer states, preset {result['plan']['preset']}: {result['gpu']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _plot_rate(panels: Any, verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        at = [(window.start + window.stop) / 2 for window in verdict.windows]
        color = COLORS[verdict.states]
        label = f"{verdict.states}, {verdict.num_seeds} seeds"
        panels[0].plot(at, [w.loss for w in verdict.windows], color=color, label=label)
        if verdict.states == BASELINE:
            continue
        panels[1].plot(at, [w.shift for w in verdict.windows], color=color, label=verdict.states)
        if verdict.states != NEAREST:
            band = [w.band for w in verdict.windows]
            panels[1].fill_between(at, [-b for b in band], band, color="#bbbbbb", alpha=0.3, lw=0)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)


def _markdown(result: dict[str, Any], link: str, image: str) -> Iterator[str]:
    yield f"\n{_provenance(result)} [Raw samples]({link}).\n"
    if image:
        yield f"![Loss of each kind of states, and its difference from fp32]({image})\n"
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "|---:|---|" + "---:|" * (len(_COLUMNS) - 2)
    yield from ("| " + " | ".join(_row(verdict)) + " |" for verdict in judge(result["runs"]))
    yield ""
    yield from (f"- {note}" for note in _notes(result))


def _row(verdict: Verdict) -> list[str]:
    start = [
        f"{verdict.learning_rate:g}",
        verdict.states,
        str(verdict.num_seeds),
        f"{verdict.last.loss:.4f}",
        f"{verdict.spread:.4f}",
    ]
    if verdict.states == BASELINE:
        return [*start, "-", "-", "-", "1", "0"]
    return [
        *start,
        f"{verdict.last.shift:+.4f} ± {verdict.shift_error:.4f}",
        f"± {verdict.last.band:.4f}",
        f"{verdict.num_within} of {len(verdict.windows)}",
        f"{verdict.cosine:.4f}",
        f"{verdict.error:.4f}",
    ]


def _notes(result: dict[str, Any]) -> Iterator[str]:
    verdicts = judge(result["runs"])
    first = statistics.mean(run["samples"][0] for run in result["runs"])
    yield f"the loss starts at {first:.2f}; the source's own entropy is {result['best_loss']:.2f}"
    for target in targets(verdicts):
        found = "met" if target["is_met"] else "missed"
        rate = f"{target['learning_rate']:g}"
        yield f"{found}: {target['states']} at {rate}: {target['wanted']}"


def _provenance(result: dict[str, Any]) -> str:
    plan = result["plan"]
    stale = f" STALE: {result['stale']}." if result.get("stale") else ""
    return (
        f"{result['gpu']}, torch {result['versions']['torch']}, commit "
        f"{result['commit'][:12]}, preset {plan['preset']}, {plan['num_updates']} updates.{stale}"
    )
