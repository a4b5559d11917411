"""`ratoonctl log` and `ratoonctl operations`: what a policy has done."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from ratoon_client.blocking import RatoonClient
from ratoon_client.cli.context import (
    open_client,
    printable,
    settings_of,
    show,
    show_rows,
    until_stopped,
)
from ratoon_client.cli.export import (
    ExportError,
    Mlflow,
    Target,
    TensorBoard,
    Trackio,
    Wandb,
    run_name,
)
from ratoon_client.cli.steps import Step, figure_names, follow_steps, read_steps
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.operation import describe
from ratoon_proto.types import (
    Offender,
    Operation,
    OperationKind,
    OperationState,
    Policy,
    StepReport,
)

operations = typer.Typer(no_args_is_help=True)

# Columns of a line, and the figures in them.
_SHOWN: Mapping[str, str] = {
    "reward": "reward_mean",
    "loss": "loss",
    "grad norm": "grad_norm",
    "sampler kl": "sampler_kl",
    "entropy": "entropy",
    "length": "response_length_mean",
    "tokens/s": "tokens_per_second",
}
# Characters of a figure's column, at least.
_FIGURE = 10
# Seconds after which a target that failed is opened again, at first and at most.
_PAUSE_S = 1.0
_MOST_PAUSE_S = 30.0


def log(
    context: typer.Context,
    policy_id: str,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with each step as it ends.")
    ] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, with a header.")] = False,
    figures: Annotated[
        str,
        typer.Option(
            help="Figures of the report, as loss,reward_mean,seconds.forward. Default: all that"
            " there are, and in a table seven, or as many as the terminal has room for.",
            show_default=False,
        ),
    ] = "",
    after_seq: Annotated[
        int,
        typer.Option(help="Only steps behind this seq. An export knows where it was.", min=0),
    ] = 0,
    tensorboard: Annotated[
        str, typer.Option(metavar="DIR", help="Send the steps to event files below this folder.")
    ] = "",
    wandb: Annotated[
        str, typer.Option(metavar="PROJECT", help="Send the steps to Weights & Biases.")
    ] = "",
    mlflow: Annotated[
        str, typer.Option(metavar="URI", help="Send the steps to the MLflow at this tracking URI.")
    ] = "",
    trackio: Annotated[
        str, typer.Option(metavar="PROJECT", help="Send the steps to Trackio.")
    ] = "",
) -> None:
    """Print the figures of every step, one line each, oldest first.

    With a tracker the steps go there, each once, and a line is printed when it has them. What a
    tracker does not take is sent again, after any pause: the service keeps the history. One command
    sends to one tracker.
    """
    chosen = tuple(name.strip() for name in figures.split(",") if name.strip())
    places = {TensorBoard: tensorboard, Wandb: wandb, Mlflow: mlflow, Trackio: trackio}
    targets = [(kind, place) for kind, place in places.items() if place]
    if len(targets) > 1:
        options = " and ".join(f"--{kind.__name__.lower()}" for kind, _ in targets)
        raise InvalidArgumentError(options, "several trackers", "one for each command")
    if jsonl and as_csv:
        raise InvalidArgumentError("--csv", "beside --jsonl", "one form")
    is_jsonl = jsonl or settings_of(context).as_json

    # A table needs no more than it shows.
    asked = chosen or (() if targets or is_jsonl or as_csv else tuple(_SHOWN.values()))
    with until_stopped(), open_client(context) as client:
        policy = client.get_policy(policy_id)
        write = _json_line if is_jsonl else _csv_writer(chosen) if as_csv else _table_writer(chosen)
        for kind, place in targets:
            opened = partial(kind, place, run_name(policy))
            _export(client, policy, opened, asked, write, is_following=follow)
        if not targets:
            for steps in _steps(client, policy, after_seq, asked, is_following=follow):
                _print(steps, write)


def _export(
    client: RatoonClient,
    policy: Policy,
    opened: Callable[[], Target],
    figures: Sequence[str],
    write: Callable[[Step], None],
    *,
    is_following: bool,
) -> None:
    """Send steps to a target; one that fails is opened again, and says where it was."""
    pause_s = _PAUSE_S
    while True:
        try:
            with closing(opened()) as target:
                after_seq = target.last_seq
                for batch in _steps(client, policy, after_seq, figures, is_following=is_following):
                    steps = [step for step in batch if step.is_step]
                    target.write(steps)
                    _print(steps, write)
                    pause_s = _PAUSE_S
                return
        except ExportError as error:
            if not is_following:
                raise
            _tell(f"{error} (again in {pause_s:.1f} s)")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _steps(
    client: RatoonClient,
    policy: Policy,
    after_seq: int,
    figures: Sequence[str],
    *,
    is_following: bool,
) -> Iterator[list[Step]]:
    if is_following:
        return follow_steps(client, policy, after_seq=after_seq, figures=figures, tell=_tell)
    return read_steps(client, policy, after_seq=after_seq, figures=figures)


def _print(steps: Sequence[Step], write: Callable[[Step], None]) -> None:
    for step in steps:
        write(step)
    sys.stdout.flush()


def _tell(line: str) -> None:
    typer.echo(f"ratoonctl: {printable(line)}", err=True)


def _json_line(step: Step) -> None:
    finished_at = None if step.finished_at != step.finished_at else step.finished_at
    head = {"seq": step.seq, "version": step.version, "kind": step.kind, "finished_at": finished_at}
    tail = {"skip_reason": step.skip_reason, "warnings": list(step.warnings)}
    typer.echo(json.dumps(head | dict(step.figures) | tail))


def _csv_writer(chosen: Sequence[str]) -> Callable[[Step], None]:
    """Columns are all figures that a report may have: a later step may have one more."""
    names = chosen or figure_names()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["seq", "version", "kind", "finished_at", *names, "skip_reason", "warnings"])

    def write(step: Step) -> None:
        values = (step.figures.get(name, "") for name in names)
        finished_at = step.finished_at if step.is_step else ""
        kinds = printable(" ".join(step.warnings))
        head = (step.seq, step.version, step.kind, finished_at)
        writer.writerow([*head, *values, step.skip_reason or "", kinds])

    return write


def _table_writer(chosen: Sequence[str]) -> Callable[[Step], None]:
    head = f"{'seq':>7}  {'version':>7}  {'ended':<19}"
    columns = {name: name for name in chosen} or dict(islice(_SHOWN.items(), _room(len(head))))
    widths = [max(_FIGURE, len(title)) for title in columns]
    titles = (f"{title:>{width}}" for title, width in zip(columns, widths, strict=True))
    typer.echo("  ".join([head, *titles]))

    def write(step: Step) -> None:
        head = f"{step.seq:>7}  {step.version:>7}  "
        if not step.is_step:
            typer.echo(head + printable(step.kind))
            return
        ended = datetime.fromtimestamp(step.finished_at, tz=UTC).astimezone()
        values = (
            f"{_number(step.figures.get(name)):>{width}}"
            for name, width in zip(columns.values(), widths, strict=True)
        )
        said = [f"skipped: {step.skip_reason}"] if step.skip_reason else []
        notes = printable(", ".join([*said, *step.warnings]))
        typer.echo("  ".join([f"{head}{ended:%Y-%m-%d %H:%M:%S}", *values, notes]).rstrip())

    return write


def _room(head: int) -> int | None:
    """How many figures a terminal has room for behind the head of a line; None: any number."""
    if not sys.stdout.isatty():
        return None
    return max(1, (get_terminal_size().columns - head) // (_FIGURE + 2))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@operations.command("list")
def list_operations(
    context: typer.Context,
    policy_id: Annotated[str, typer.Argument(help="Only this policy's. Default: all.")] = "",
    kind: Annotated[
        list[OperationKind] | None,
        typer.Option(help="Only operations of this kind; may be given again.", show_default=False),
    ] = None,
    state: Annotated[
        list[OperationState] | None,
        typer.Option(help="Only operations in this state; may be given again.", show_default=False),
    ] = None,
    seq: Annotated[int, typer.Option(help="Only operations with this seq; 0: any.", min=0)] = 0,
    limit: Annotated[int, typer.Option(help="How many at most.", min=1)] = 50,
) -> None:
    """List operations, newest first."""
    with open_client(context) as client:
        listed = client.operations(
            policy_id or None, kinds=kind or (), states=state or (), seq=seq or None
        )
        found = list(islice(listed, limit))
    columns = ("operation", "policy", "kind", "seq", "state", "version", "created", "s", "note")
    show_rows(context, found, columns, map(_operation_row, found))


@operations.command("show")
def show_operation(context: typer.Context, operation_id: str) -> None:
    """Show an operation with its report: every figure, warning and offender."""
    with open_client(context) as client:
        found = client.get_operation(operation_id)
    show(context, found, _whole(found))


def _operation_row(operation: Operation) -> tuple[object, ...]:
    step = operation.step
    ended, began = operation.finished_at, operation.started_at
    seconds = (ended - began).total_seconds() if ended and began else None
    note = operation.error.message if operation.error else None
    if step is not None and step.report.warnings:
        note = "; ".join(map(str, step.report.warnings))
    if operation.blocked_by_seq:
        note = f"waits for seq {operation.blocked_by_seq}"
    return (
        operation.operation_id,
        operation.policy_id,
        operation.kind,
        operation.seq or None,
        operation.state,
        None if step is None else step.version,
        operation.created_at,
        seconds,
        note,
    )


def _whole(operation: Operation) -> dict[str, object]:
    """Rows of a table: what there is of the operation, then of its report."""
    rows: dict[str, object] = {
        "operation": operation.operation_id,
        "policy": operation.policy_id,
        "kind": operation.kind,
        "seq": operation.seq or None,
        "request id": operation.request_id or None,
        "state": describe(operation),
        "created": operation.created_at,
        "started": operation.started_at,
        "finished": operation.finished_at,
    }
    if operation.error is not None:
        rows |= {"error": operation.error.message, "code": operation.error.code}
        rows |= {f"error {name}": value for name, value in operation.error.details.items()}
    result: Any = operation.step or operation.forward or operation.imported or operation.checkpoint
    if result is not None and getattr(result, "version", None) is not None:
        rows["version"] = result.version
    report = getattr(result, "report", None)
    return rows | (_figures(report) if isinstance(report, StepReport) else {})


def _figures(report: StepReport) -> dict[str, object]:
    rows: dict[str, object] = {}
    for each in fields(report):
        value = getattr(report, each.name)
        if isinstance(value, (bool, int, float, str)):
            rows[each.name] = value
    for number, warning in enumerate(report.warnings, 1):
        rows[f"warning {number}"] = str(warning)
        named = [_offender(each) for each in warning.offenders]
        rows |= {f"{number}.{place}": text for place, text in enumerate(named, 1)}
    return rows


def _offender(offender: Offender) -> str:
    places = [f"group {offender.group} ({offender.group_id})"]
    places += [f"rollout {offender.rollout}"] if offender.rollout >= 0 else []
    places += [f"token {offender.token}"] if offender.token is not None else []
    value = "" if offender.value is None else f": {_number(offender.value)}"
    return ", ".join(places) + value
