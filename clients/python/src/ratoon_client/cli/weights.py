"""`ratoonctl weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratoon_client.cli.context import open_client, show, show_rows
from ratoon_client.weights.pull import KEEP_VERSIONS

cli = typer.Typer(no_args_is_help=True)

Version = Annotated[int | None, typer.Option(help="Default: the newest published.")]


@cli.command()
def pull(
    context: typer.Context,
    policy_id: str,
    folder: Annotated[Path, typer.Argument(help="Gets version-N, and `latest` that names one.")],
    version: Version = None,
    keep: Annotated[int, typer.Option(help="Versions that stay; 0: all.", min=0)] = KEEP_VERSIONS,
) -> None:
    """Bring a folder up to date with a policy's weights, verified."""
    with open_client(context) as client:
        pulled = client.pull_weights(policy_id, folder, version, keep=keep or None)
    fields = {
        "version": pulled.version,
        "folder": pulled.folder,
        "files": len(pulled.manifest.files),
        "fetched bytes": pulled.fetched_bytes,
        "from version": pulled.parent_version,
    }
    show(context, pulled, fields)


@cli.command()
def watch(context: typer.Context, policy_id: str) -> None:
    """A line for the newest version, and for each that is published from now on."""
    with open_client(context) as client:
        for newest in client.watch_weights(policy_id):
            num_bytes = sum(file.size_bytes for file in newest.files)
            show(context, newest, {"version": newest.version, "bytes": num_bytes})


@cli.command()
def manifest(context: typer.Context, policy_id: str, version: Version = None) -> None:
    """The files of a version, with their digests."""
    with open_client(context) as client:
        weights = client.weight_manifest(policy_id, version)
    if not weights.files:
        show(context, weights, {"version": weights.version})
        return
    rows = [(weights.version, file.name, file.size_bytes, file.digest) for file in weights.files]
    show_rows(context, [weights], ("version", "name", "bytes", "digest"), rows)
