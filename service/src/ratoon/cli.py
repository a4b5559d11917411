"""The `ratoon` command: serve, health, keys, recover, demo, example, doctor, warm.

Commands import what they need when they run, so `--help` is quick and `doctor` works on a broken
installation.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ratoon.api.convert.checks import POLICY_ID, matched
from ratoon.auth.audit import AuditEntry, AuditLog
from ratoon.auth.keys import KeyFile, Scope, new_key
from ratoon.config import KeyLimits, RatoonConfig, errors_told, load_config, set_defaults
from ratoon.errors import RatoonError, invalid
from ratoon.example_files import EXAMPLES, write_example
from ratoon.garbage import frozen_imports
from ratoon.model.spec import PRESET_NAMES
from ratoon_proto.build import describe_build

cli = typer.Typer(
    name="ratoon",
    help="Policy-update service for RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys = typer.Typer(
    help="Manage API keys of the data root, as the service's user. Changes take effect at once.",
    no_args_is_help=True,
)
cli.add_typer(keys, name="keys")
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML settings; RATOON_* environment variables override it.",
        exists=True,
        dir_okay=False,
    ),
]
console = Console()
DAY_S = 86_400.0
RAY_POLL_S = 1.0
LIST_COLUMNS = 240
PRESETS = ", ".join(PRESET_NAMES)
QUOTA_HELP = "Tokens of accepted rollouts, without sharing; over all policies and processes."


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ratoon {describe_build('ratoon')}")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show version and commit, and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Handle the options that all commands share."""


def _read_config(path: Path | None) -> RatoonConfig:
    try:
        return load_config(path)
    except ValidationError as err:
        text = errors_told(err)
    except (ValueError, OSError) as err:
        text = str(err)
    typer.echo("\n".join(f"config: {line}" for line in text.splitlines()), err=True)
    raise typer.Exit(2)


@contextmanager
def _reported(*errors: type[Exception]) -> Generator[None, None, None]:
    """Exit with status 2 where the block raises one of `errors`, whose text is shown."""
    try:
        yield
    except errors as err:
        typer.echo(str(err), err=True)
        raise typer.Exit(2) from err


@cli.command(
    epilog=f"Clients create policies: of a folder below models_root, or of a preset: {PRESETS}."
)
def serve(
    config: ConfigOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what Ray and Serve say of themselves too.")
    ] = False,
) -> None:
    """Run the service on this machine until SIGTERM or Ctrl-C; exit 1 if its Ray has ended."""
    settings = _read_config(config)
    # Signals are heeded from before the start: callers are answered while it is under way, and
    # their calls are drained.
    stop = _stop_signals(settings.limits.drain_s)
    typer.echo(f"starting     on {settings.data_root.absolute()}, in some ten seconds")
    with frozen_imports():
        from ratoon import app
        from ratoon.cluster.local_ray import ended_processes, exit_without_ray
        from ratoon.log import ShownLogs

    shown = ShownLogs.ALL if verbose else ShownLogs.OWN
    with (
        _reported(RatoonError),
        suppress(app.StartStoppedError),
        app.running(settings, shown=shown, stopped=stop) as addresses,
    ):
        for name, value in app.describe(settings, addresses).items():
            typer.echo(f"{name:<12} {value}")
        typer.echo("ready        stop it with Ctrl-C or SIGTERM")
        while not stop.wait(RAY_POLL_S):
            if ended := ended_processes():
                typer.echo(f"{ended[0]} of Ray has ended: start the service again", err=True)
                exit_without_ray()


def _stop_signals(drain_s: float) -> threading.Event:
    """An event that SIGTERM and Ctrl-C set; a second Ctrl-C ends this process at once.

    Ray's libraries do not survive a KeyboardInterrupt within them.
    """
    stop = threading.Event()

    def heed(number: int, _frame: object) -> None:
        is_first = not stop.is_set()
        stop.set()
        # What was acknowledged survives that, as it does a kill.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if is_first:
            said = f"stopping     what runs may end, in {drain_s:g} s at most"
            hint = "; Ctrl-C again: at once" if number == signal.SIGINT else ""
            with suppress(OSError):  # Nobody may read it any more.
                # Not by print(): the signal may have come within one.
                os.write(sys.stdout.fileno(), f"{said}{hint}\n".encode())

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, heed)
    return stop


@cli.command()
def doctor(config: ConfigOption = None) -> None:
    """Show what this machine can do; exit 1 if the service could not start."""
    from ratoon.doctor import Status, next_step, run_checks

    checks = run_checks(_read_config(config))
    colors = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
    table = Table(box=None, show_header=False)
    for check in checks:
        table.add_row(
            f"[{colors[check.status]}]{check.status}[/]",
            escape(check.name),
            escape(check.detail),
        )
    console.print(table)
    typer.echo(f"\nnext: {next_step(checks)}")
    raise typer.Exit(1 if any(check.status is Status.FAIL for check in checks) else 0)


@cli.command()
def warm(
    folder: Annotated[Path, typer.Argument(help="Model folder.", exists=True, file_okay=False)],
    lora_rank: Annotated[
        int | None,
        typer.Option(help="Rank of an adapter. Default: all weights are trained.", min=1),
    ] = None,
    lora_alpha: Annotated[float, typer.Option(help="Alpha of the adapter.")] = 32.0,
    fast: Annotated[bool, typer.Option("--fast", help="For policies not deterministic.")] = False,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Packed tokens of a micro-batch; repeat it for more. Default: one number in each "
            "range that graphs are for, up to 65,521.",
            min=2,
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Compile a model's layers into data_root/compiled, before its first policy; needs its GPU."""
    settings = _read_config(config)
    from ratoon.cluster.worker_start import GPU_ENVIRONMENT

    # As workers have it, before torch is imported.
    set_defaults(GPU_ENVIRONMENT)
    from ratoon.engine.settings import EngineSettings
    from ratoon.warm import warm as compile_for
    from ratoon_proto.types import FullTuning, LoraTuning

    tuning = FullTuning() if lora_rank is None else LoraTuning(rank=lora_rank, alpha=lora_alpha)
    numbers = tokens or [2048, 8192, 32_768]
    with _reported(RatoonError):
        settings_of_engine = EngineSettings.from_config(settings)
        for num_tokens, seconds in compile_for(
            settings_of_engine, folder, tuning, deterministic=not fast, tokens=numbers
        ):
            typer.echo(f"{num_tokens:>9,} tokens  {seconds:.1f} s")


@cli.command()
def health(config: ConfigOption = None) -> None:
    """Check the health of the service with these settings on this machine; exit 1 if unhealthy."""
    settings = _read_config(config)
    from ratoon.doctor import own_health

    reason = own_health(settings)
    typer.echo("ok" if reason is None else reason, err=reason is not None)
    raise typer.Exit(0 if reason is None else 1)


@cli.command()
def recover(
    policy: Annotated[str, typer.Argument(help="The policy whose journal has lost its end.")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue from what remains of the journal.")
    ] = False,
    from_evidence: Annotated[
        bool, typer.Option("--from-evidence", help="Continue from the checkpoint named there.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Show what a refused policy's journal has lost, or decide how the next start continues."""
    settings = _read_config(config)
    from ratoon.engine.files.losses import Choice, read_loss, write_decision
    from ratoon.engine.settings import EngineSettings
    from ratoon.stream.files import DamagedFileError

    if accept_loss and from_evidence:
        raise typer.BadParameter("--accept-loss or --from-evidence, not both")
    with _reported(RatoonError, DamagedFileError):
        paths = EngineSettings.from_config(settings).paths(matched("policy", policy, POLICY_ID))
        if not paths.root.is_dir():
            raise invalid("policy", policy, f"one with a folder below {paths.root.parent}")
        if not (accept_loss or from_evidence):
            loss = read_loss(paths)
            typer.echo(f"{policy}: nothing is lost" if loss is None else f"{policy}: {loss.text}")
            return
        choice = Choice.ACCEPT_LOSS if accept_loss else Choice.FROM_EVIDENCE
        loss = write_decision(paths, choice)
    _audit(settings, f"recover.{choice}", policy_id=policy)
    typer.echo(f"{policy}: {loss.text}")
    typer.echo(f"decided: --{choice}. The next start of the service carries it out")


@cli.command()
def demo(
    preset: Annotated[str, typer.Option(help=f"Built-in random model: {PRESETS}.")] = PRESET_NAMES[
        0
    ],
    seed: Annotated[
        int, typer.Option(help="Seed of the policy, the prompts and the sampler.", min=0)
    ] = 0,
    shuffle_rewards: Annotated[
        bool,
        typer.Option(help="Give each rollout another one's reward: the policy must not learn."),
    ] = False,
) -> None:
    """Start the service here and watch a tiny policy learn; exit 1 if it does not."""
    if preset not in PRESET_NAMES:
        raise typer.BadParameter(f"{preset!r} is none of {PRESETS}")
    # The demo reads the environment too, so bad variables are refused as in the other commands.
    stop = _stop_signals(_read_config(None).limits.drain_s)
    from ratoon.app import StartStoppedError
    from ratoon.demo.run import run_demo

    try:
        has_learned = run_demo(
            preset=preset,
            seed=seed,
            shuffle_rewards=shuffle_rewards,
            console=console,
            stopped=stop,
        )
    except StartStoppedError:
        has_learned = False
    raise typer.Exit(0 if has_learned else 1)


@cli.command()
def example(
    name: Annotated[
        str | None, typer.Argument(help="Example to write. Without it they are listed.")
    ] = None,
    folder: Annotated[Path, typer.Argument(help="Where to write its files.")] = Path(),
) -> None:
    """Write an example, or files for operators, into this folder, or list what there is."""
    if name is None:
        for each, found in EXAMPLES.items():
            typer.echo(f"{each:<12} {found.about}")
        return
    if name not in EXAMPLES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(EXAMPLES)}")
    with _reported(OSError):
        for path in write_example(name, folder):
            typer.echo(f"{'wrote':<12} {path}")
    there = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"{'next':<12} {there}{EXAMPLES[name].then}")


@keys.command("create")
def create_key(
    scope: Annotated[
        list[Scope],
        typer.Option(
            help="read: look and pull; train: also train; admin: everything; read:rollouts: see "
            "kept rollouts too, beside any of them; tinker: the Tinker wire, on its own models."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy that the key is for; repeat it for more. Default: all."),
    ] = None,
    expires_days: Annotated[
        float | None,
        typer.Option(help="Days until the key expires. Default: never.", min=0.0),
    ] = None,
    note: Annotated[str, typer.Option(help="Purpose of the key, which `list` shows.")] = "",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, over all processes and wires.", min=0.001),
    ] = None,
    burst: Annotated[
        int | None, typer.Option(help="Requests at once, after a pause.", min=1)
    ] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help=QUOTA_HELP, min=1)] = None,
    tokens_per_hour: Annotated[int | None, typer.Option(help=QUOTA_HELP, min=1)] = None,
    tokens_per_day: Annotated[int | None, typer.Option(help=QUOTA_HELP, min=1)] = None,
    max_open_operations: Annotated[
        int | None,
        typer.Option(help="Queued and running operations, over all policies.", min=1),
    ] = None,
    max_queued_bytes: Annotated[
        int | None, typer.Option(help="Bytes of their bodies, over all policies.", min=1024)
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Create a key and show it once, on standard output."""
    ranked = {*scope} - {Scope.READ_ROLLOUTS}
    if len(ranked) != 1 or (Scope.TINKER in ranked and (len(scope) > 1 or policy)):
        raise typer.BadParameter(
            "--scope: one of read, train and admin, and read:rollouts or not; or tinker alone, "
            "without --policy"
        )
    settings = _read_config(config)
    now = time.time()
    with _reported(RatoonError, ValidationError):
        names = tuple(sorted({matched("policy", name, POLICY_ID) for name in policy or ()}))
        limits = KeyLimits(
            requests_per_second=rate,
            burst=burst,
            tokens_per_minute=tokens_per_minute,
            tokens_per_hour=tokens_per_hour,
            tokens_per_day=tokens_per_day,
            max_open_operations=max_open_operations,
            max_queued_bytes=max_queued_bytes,
        )
        key, text = new_key(
            scope=ranked.pop(),
            policies=names or None,
            note=note,
            created_at=now,
            expires_at=None if expires_days is None else now + expires_days * DAY_S,
            limits=limits,
            reads_rollouts=Scope.READ_ROLLOUTS in scope,
        )
        KeyFile(settings.data_root.absolute()).add(key)
    _audit(settings, "keys.create", key.key_id)
    typer.echo(f"key {key.key_id}; what follows is shown this once", err=True)
    typer.echo(text)


@keys.command("list")
def list_keys(config: ConfigOption = None) -> None:
    """List every key, without its secret."""
    file = KeyFile(_read_config(config).data_root.absolute())
    with _reported(RatoonError):
        found = file.keys().values()
    table = Table(
        "id", "scope", "policies", "state", "created", "expires", "limits", "note", box=None
    )
    now = time.time()
    for key in sorted(found, key=lambda key: key.created_at):
        state = "valid" if key.is_valid(now) else "expired" if key.revoked_at is None else "revoked"
        policies = "all" if key.policies is None else ", ".join(key.policies)
        times = (_day(key.created_at), "never" if key.expires_at is None else _day(key.expires_at))
        own = key.limits.model_dump(exclude_none=True)
        limits = ", ".join(f"{name} {value:g}" for name, value in own.items())
        scopes = f"{key.scope}, {Scope.READ_ROLLOUTS}" if key.reads_rollouts else key.scope
        table.add_row(key.key_id, scopes, policies, state, *times, limits, escape(key.note))
    # Ids are never truncated, however narrow the terminal.
    Console(soft_wrap=True, width=LIST_COLUMNS).print(table)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as `list` shows it.")],
    config: ConfigOption = None,
) -> None:
    """Revoke a key: every port refuses it from now on."""
    settings = _read_config(config)
    with _reported(RatoonError):
        KeyFile(settings.data_root.absolute()).revoke(key_id, time.time())
    _audit(settings, "keys.revoke", key_id)
    typer.echo(f"revoked {key_id}")


def _audit(config: RatoonConfig, call: str, key_id: str = "", policy_id: str = "") -> None:
    entry = AuditEntry(
        key_id=key_id, peer="cli", call=call, policy_id=policy_id, seq=0, outcome="OK"
    )
    AuditLog.of(config).write(entry)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: the process's) and exit."""
    command = typer.main.get_command(cli)
    _name_no_type_of_flags(command)
    command(args=arguments)


def _name_no_type_of_flags(command: Any) -> None:
    """Leave `<bool>` out of the help of flags, which take no value."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _name_no_type_of_flags(child)
