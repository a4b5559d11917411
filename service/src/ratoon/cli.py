"""The `ratoon` command: serve, demo, doctor.

Enters the command line, leaves an exit status. Invariant: a command imports what it needs when it
runs, so that `--help` is quick and `doctor` works where half of the rest does not.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from ratoon.config import RatoonConfig, load_config
from ratoon.errors import RatoonError

cli = typer.Typer(
    name="ratoon",
    help="Policy-update service for RL post-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="YAML settings; RATOON_* environment variables win over it."),
]
console = Console()


def _read_config(path: Path | None) -> RatoonConfig:
    try:
        return load_config(path)
    except (ValidationError, OSError) as err:
        typer.echo(f"config: {err}", err=True)
        raise typer.Exit(2) from err


@cli.command()
def serve(config: ConfigOption = None) -> None:
    """Run the service on this machine until SIGTERM or Ctrl-C."""
    settings = _read_config(config)
    from ratoon import app

    stop = threading.Event()
    try:
        with app.running(settings, show_logs=True) as addresses:
            # After the start: Ray sets handlers of its own when it is initialised.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            typer.echo(f"http  {addresses.http}")
            typer.echo(f"grpc  {addresses.grpc}")
            stop.wait()
            typer.echo("stopping")
    except RatoonError as err:
        typer.echo(err.message, err=True)
        raise typer.Exit(2) from err


@cli.command()
def doctor(config: ConfigOption = None) -> None:
    """Say what this machine can do; exit 1 where the service could not start."""
    from ratoon.doctor import Status, run_checks

    checks = run_checks(_read_config(config))
    colors = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
    table = Table(box=None, show_header=False)
    for check in checks:
        table.add_row(
            f"[{colors[check.status]}]{check.status}[/]", check.name, check.detail, style=None
        )
    console.print(table)
    raise typer.Exit(1 if any(check.status is Status.FAIL for check in checks) else 0)


@cli.command()
def demo(
    seed: Annotated[int, typer.Option(help="Of the policy, the prompts and the sampler.")] = 0,
    shuffle_rewards: Annotated[
        bool, typer.Option(help="Give each rollout another one's reward: must not learn.")
    ] = False,
) -> None:
    """Start the service here and watch a tiny policy learn; exit 1 where it does not."""
    from ratoon.demo.run import run_demo

    raise typer.Exit(
        0 if run_demo(seed=seed, shuffle_rewards=shuffle_rewards, console=console) else 1
    )


def main() -> None:
    """Entry point of the `ratoon` console script."""
    cli()
