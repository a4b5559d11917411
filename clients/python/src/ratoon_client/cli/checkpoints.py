"""`ratoonctl checkpoints`."""

from __future__ import annotations

from typing import Annotated

import typer

from ratoon_client.cli.arguments import Seq
from ratoon_client.cli.context import open_client, show, show_rows
from ratoon_client.values import Checkpoint

cli = typer.Typer(no_args_is_help=True)

_COLUMNS = ("checkpoint", "version", "seq", "bytes", "created")


@cli.command("list")
def list_checkpoints(context: typer.Context, policy_id: str) -> None:
    with open_client(context) as client:
        checkpoints = client.list_checkpoints(policy_id)
    show_rows(context, checkpoints, _COLUMNS, map(_row, checkpoints))


@cli.command()
def save(
    context: typer.Context,
    policy_id: str,
    checkpoint_id: Annotated[
        str, typer.Argument(help="Default: named after seq and version.")
    ] = "",
    seq: Seq = None,
) -> None:
    """Save model, optimizer, version and seq, and wait for it.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    with open_client(context) as client:
        saved = client.policy(policy_id).save_checkpoint(checkpoint_id, seq=seq).result()
    show(context, saved, dict(zip(_COLUMNS, _row(saved), strict=True)))


@cli.command()
def load(context: typer.Context, policy_id: str, checkpoint_id: str, seq: Seq = None) -> None:
    """Go back to a checkpoint, and wait for it.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    with open_client(context) as client:
        client.policy(policy_id).load_checkpoint(checkpoint_id, seq=seq).result()
        policy = client.get_policy(policy_id)
    show(context, policy, {"loaded": checkpoint_id, "version": policy.version})


def _row(checkpoint: Checkpoint) -> tuple[object, ...]:
    return (
        checkpoint.checkpoint_id,
        checkpoint.version,
        checkpoint.seq,
        checkpoint.size_bytes,
        checkpoint.created_at,
    )
