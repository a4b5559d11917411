"""The root of `ratoonctl`: options of all commands, its exit status, and `info` and `health`.

0 is success, 1 the service refused or failed, 2 the command line or a file is wrong, 3 the service
did not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from ratoon_client.cli import history, rollouts, runs, training, weights
from ratoon_client.cli.context import Settings, open_client, printable, show
from ratoon_client.cli.policies import checkpoints, policies
from ratoon_client.config import (
    CA_VARIABLE,
    CERT_VARIABLE,
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    URL_VARIABLE,
    default_url,
)
from ratoon_client.errors import (
    InvalidArgumentError,
    RatoonApiError,
    RatoonClientError,
    TransportError,
)
from ratoon_proto.build import describe_build

SERVICE_ERROR = 1
USAGE_ERROR = 2
NO_CONNECTION = 3

cli = typer.Typer(
    name="ratoonctl",
    help="Talk to a Ratoon policy-update service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.add_typer(policies, name="policies", help="Create, list and delete policies.")
cli.add_typer(weights.cli, name="weights", help="Pull, list, follow and import weights.")
cli.add_typer(checkpoints, name="checkpoints", help="Save, load and list checkpoints.")
cli.add_typer(history.operations, name="operations", help="List and show operations.")
cli.command()(runs.runs)
cli.command()(runs.top)
cli.command()(history.log)
cli.command()(rollouts.rollouts)
cli.command()(training.update)
cli.command()(training.watch)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ratoonctl {describe_build('ratoon-client')}")
        raise typer.Exit


def _file_option(what: str, variable: str) -> OptionInfo:
    """Option for a file of grpcs:// and https://."""
    text = f"{what}, in PEM. Default: the environment's {variable}."
    return typer.Option(help=text, exists=True, dir_okay=False, show_default=False)


@cli.callback()
def settings(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            help="grpc(s)://host:port or http(s)://host:port. Default: the environment's"
            f" {URL_VARIABLE}, else the gRPC gateway of this machine.",
            show_default=False,
        ),
    ] = "",
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the API key. Default: the environment's {KEY_VARIABLE}."
            " There is no option for the key itself: others would see it in the list of processes.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    ca_file: Annotated[Path | None, _file_option("Authorities of the service", CA_VARIABLE)] = (
        None
    ),
    cert_file: Annotated[Path | None, _file_option("Your certificate", CERT_VARIABLE)] = None,
    key_file: Annotated[Path | None, _file_option("Its key", KEY_FILE_VARIABLE)] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds for which a call is retried.", min=0.1)
    ] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback has answered
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
    api_key = None if api_key_file is None else _read_key(api_key_file)
    context.obj = Settings(
        url=url or default_url(),
        api_key=api_key,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        timeout_s=timeout_s,
        as_json=as_json,
    )


@cli.command()
def info(context: typer.Context) -> None:
    """Show the service's versions, device, backends and limits."""
    with open_client(context) as client:
        server = client.server_info()
    fields: dict[str, object] = {
        "version": server.version,
        "api": server.api_version,
        "device": server.device,
        "presets": ", ".join(server.presets),
    }
    for backend in server.backends:
        state = "available" if backend.available else backend.unavailable_reason
        fields[f"{backend.op} {backend.name}"] = state
    for name, version in sorted(server.library_versions.items()):
        fields[f"with {name}"] = version
    show(context, server, fields)


@cli.command()
def health(context: typer.Context) -> None:
    """Exit 0 if the service is healthy, 1 if it is not, 3 if it does not answer."""
    with open_client(context) as client:
        answer = client.health()
    show(context, answer, {"status": answer.status})
    if not answer.is_ok:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: the process's) and exit."""
    command = typer.main.get_command(cli)
    _name_no_type_of_flags(command)
    try:
        command(args=arguments)
    except InvalidArgumentError as error:
        _exit(str(error), USAGE_ERROR)
    except TransportError as error:
        _exit(f"no answer: {error}", NO_CONNECTION)
    except RatoonApiError as error:
        is_named = not error.field or error.message.startswith(f"{error.field}:")
        where = "" if is_named else f" (field {error.field})"
        if error.code == "UNAUTHENTICATED":
            where = f"; {KEY_VARIABLE} or --api-key-file gives ratoonctl one"
        _exit(f"{error}{where}", SERVICE_ERROR)
    except RatoonClientError as error:
        _exit(str(error), SERVICE_ERROR)


def _read_key(path: Path) -> str:
    """The content of `path`, of which nothing is shown where it is no key."""
    key = path.read_text(encoding="utf-8", errors="replace").strip()
    if not key:
        raise InvalidArgumentError("--api-key-file", "an empty file", "a file with an API key")
    return key


def _name_no_type_of_flags(command: Any) -> None:
    """Leave `<bool>` out of the help of flags, which take no value."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _name_no_type_of_flags(child)


def _exit(message: str, status: int) -> None:
    typer.echo(f"ratoonctl: {printable(message)}", err=True)
    sys.exit(status)
