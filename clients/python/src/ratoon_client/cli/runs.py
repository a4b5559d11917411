"""`ratoonctl runs` and `ratoonctl top`: how every policy trains, in one line each."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ratoon_client.blocking import RatoonClient
from ratoon_client.cli.context import (
    open_client,
    printable,
    settings_of,
    show_rows,
    text_of,
    until_stopped,
)
from ratoon_client.errors import InvalidArgumentError, RatoonApiError, TransportError
from ratoon_client.operation import describe
from ratoon_proto.types import Operation, Policy, StepHistory

# Seqs that are looked back: steps of a line, and of its curve.
_LOOK_BACK = 200
_CURVE_POINTS = 40
_MOST_SHOWN = 20
_CURVE = "▁▂▃▄▅▆▇█"
_FIGURES = ("reward_mean", "loss", "sampler_kl", "tokens_per_second")
# Columns that a narrow terminal lacks, in the order in which they go.
_FIRST_TO_GO = ("loss", "sampler kl", "tokens/s", "version", "last warning", "", "age", "step")
_COLUMNS = ("policy", "state", "version", "step", "reward", "age", "last warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A policy and its latest steps, of those among its last 200 seqs.

    Attributes:
        policy_id: The policy.
        state: Its state, with the reason where it failed.
        version: Its version.
        step: Seq of its latest step; None: there is none.
        finished_at: When that ended, in Unix seconds; None as `step`.
        figures: Latest value of each figure that a step has.
        rewards: Mean rewards of the latest steps, oldest first.
        warning: Latest step with a warning, as `seq: kinds`; "": none.
    """

    policy_id: str
    state: str
    version: int
    step: int | None
    finished_at: float | None
    figures: dict[str, float]
    rewards: list[float]
    warning: str


def runs(context: typer.Context) -> None:
    """List the policies with their latest step: one line each."""
    with open_client(context) as client:
        found = read_runs(client)
    if not found:
        typer.echo("no policy yet: `ratoonctl policies create NAME --preset tiny`", err=True)
    now = time.time()
    show_rows(context, found, _COLUMNS, (_row(run, now) for run in found))


def top(
    context: typer.Context,
    every_s: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600.0)
    ] = 1.0,
) -> None:
    """Watch the policies and what runs now, until Ctrl-C."""
    if not sys.stdout.isatty():
        raise InvalidArgumentError("standard output", "no terminal", "one; see `ratoonctl runs`")
    with (
        until_stopped(),
        open_client(context) as client,
        Live(console=Console(), auto_refresh=False, screen=True) as live,
    ):
        while True:
            screen = _screen(client, settings_of(context).url, live.console.width)
            live.update(screen, refresh=True)
            time.sleep(every_s)


def read_runs(client: RatoonClient) -> list[Run]:
    """Every policy that the caller may see; one that is deleted meanwhile is left out."""
    found: list[Run] = []
    for policy in client.list_policies():
        try:
            found.append(_read_run(client, policy))
        except RatoonApiError as error:
            if error.code != "POLICY_NOT_FOUND":
                raise
    return found


def _read_run(client: RatoonClient, policy: Policy) -> Run:
    policy_id = policy.spec.policy_id
    history = client.steps(
        policy_id,
        figures=_FIGURES,
        after_seq=max(0, policy.next_seq - 1 - _LOOK_BACK),
        max_points=_LOOK_BACK,
    )
    warned = [mark for mark in history.marks if mark.warnings]
    return Run(
        policy_id=policy_id,
        state=f"{policy.state}: {policy.failure}" if policy.failure else policy.state,
        version=policy.version,
        step=history.seq[-1] if history.seq else None,
        finished_at=history.finished_at[-1] if history.seq else None,
        figures={name: values[-1] for name in _FIGURES if (values := _values(history, name))},
        rewards=_values(history, "reward_mean")[-_CURVE_POINTS:],
        warning=f"{warned[-1].seq}: {', '.join(warned[-1].warnings)}" if warned else "",
    )


def _values(history: StepHistory, figure: str) -> list[float]:
    """The figure's values, oldest first, without steps that lack it."""
    means = (series.mean for series in history.series if series.figure == figure)
    return [value for mean in means for value in mean if math.isfinite(value)]


def _row(run: Run, now: float) -> tuple[object, ...]:
    return (
        run.policy_id,
        run.state,
        run.version,
        run.step,
        run.figures.get("reward_mean"),
        None if run.finished_at is None else age(now - run.finished_at),
        run.warning or None,
    )


def age(seconds: float) -> str:
    """`41 s`, `12 min`, `7 h` or `3 d`; a clock that was set back counts as 0 s."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def curve(values: Sequence[float]) -> str:
    """The values as a line of bars between their least and their greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    steps = len(_CURVE) - 1
    return "".join(_CURVE[round((value - low) / span * steps)] for value in values)


def _screen(client: RatoonClient, url: str, width: int) -> Group:
    """Everything that `top` shows; an answer that does not come is said in its place."""
    title = Text(f"{url}   {time.strftime('%H:%M:%S')}   Ctrl-C ends", style="dim")
    try:
        found = read_runs(client)
        busy = list(islice(client.operations(states=("running", "queued")), _MOST_SHOWN))
    except (TransportError, RatoonApiError) as error:
        return Group(title, Text(printable(str(error)), style="red"))
    now = time.time()
    names = (*_COLUMNS[:5], "", "loss", "sampler kl", "tokens/s", *_COLUMNS[5:])
    rows: list[tuple[object, ...]] = []
    for run in found:
        head, tail = _row(run, now)[:5], _row(run, now)[5:]
        rows.append((*head, curve(run.rewards), *map(run.figures.get, _FIGURES[1:]), *tail))
    work_rows = [(each.operation_id, each.policy_id, each.seq, _doing(each)) for each in busy]
    work = _table(("operation", "policy", "seq", ""), work_rows, width, ("operation",))
    return Group(title, _table(names, rows, width, _FIRST_TO_GO), Text(), work)


def _table(
    names: Sequence[str], rows: Sequence[Sequence[object]], width: int, gives_up: Sequence[str]
) -> Table:
    """A table whose cells are whole: columns of `gives_up` are left out until the rest fits."""
    cells = {name: [text_of(row[place]) for row in rows] for place, name in enumerate(names)}
    for name in gives_up:
        if sum(max(map(len, (title, *column))) + 2 for title, column in cells.items()) <= width:
            break
        del cells[name]
    table = Table(*cells, box=None)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def _doing(operation: Operation) -> str:
    progress = operation.progress
    done = f" {progress.micro_batches_done}/{progress.micro_batches_planned}"
    return describe(operation) + (done if progress.micro_batches_planned else "")
