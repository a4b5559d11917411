"""`ratoonctl policies` and `ratoonctl checkpoints`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from ratoon_client.cli.context import Seq, open_client, show, show_rows
from ratoon_client.cli.options import MessageOptions, takes
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.values import Checkpoint, PolicyOptions
from ratoon_proto.types import Policy, PolicySpec
from ratoon_proto.v1 import policy_pb2

policies = typer.Typer(no_args_is_help=True)
checkpoints = typer.Typer(no_args_is_help=True)

PolicyId = Annotated[str, typer.Argument(help=escape("[a-z0-9][a-z0-9_-]{0,63}"))]
POLICY = MessageOptions(
    message=policy_pb2.PolicySpec,
    title="Policy",
    # The id is the argument, `full` what there is without an adapter, and what was sent is named by
    # --send-folder.
    skip=("policy_id", "full", "sent_model"),
    names={"parallel": "", "numerics_guard": ""},
    bounds={"seed": (0, 2**64 - 1), "lora.rank": (1, None)},
)
_COLUMNS = ("policy", "state", "version", "next seq", "base", "parameters", "trainable")
_CHECKPOINT_COLUMNS = ("checkpoint", "version", "seq", "bytes", "created", "pinned", "expires")


@policies.command("list")
def list_policies(context: typer.Context) -> None:
    """List the policies; `ratoonctl runs` shows how they train."""
    with open_client(context) as client:
        found = client.list_policies()
    show_rows(context, found, _COLUMNS, map(_row, found))


@policies.command()
def get(context: typer.Context, policy_id: PolicyId) -> None:
    """Show a policy."""
    with open_client(context) as client:
        policy = client.get_policy(policy_id)
    show(context, policy, _fields(policy))


@policies.command()
@takes(POLICY)
def create(
    context: typer.Context,
    policy_id: PolicyId,
    send_folder: Annotated[
        Path | None, typer.Option(help="A model folder of this machine, whose files are sent.")
    ] = None,
    **options: Any,
) -> None:
    """Create a policy and wait until it can be trained.

    --lora-rank trains an adapter instead of every parameter; --lora-alpha is then twice the rank
    unless it is given.
    """
    given = POLICY.given(options)
    if send_folder is None and not given.keys() & {"preset", "model_folder"}:
        raise InvalidArgumentError("model", "none", "--preset, --model-folder or --send-folder")
    if "rank" in given.get("lora", {}):
        given["lora"].setdefault("alpha", 2.0 * given["lora"]["rank"])
    spec = POLICY.value(PolicySpec, {"policy_id": policy_id, **given})
    chosen = cast("PolicyOptions", {name: getattr(spec, name) for name in given})
    if send_folder is not None:
        chosen["send_folder"] = send_folder
    with open_client(context) as client:
        policy = client.create_policy(policy_id, **chosen).result()
    show(context, policy, _fields(policy))


@policies.command()
def release(context: typer.Context, policy_id: PolicyId) -> None:
    """Put a policy away, so that its memory and GPUs are free; the next call brings it back.

    It waits until nothing is left to run, and is refused while gradients wait for their step.
    """
    with open_client(context) as client:
        policy = client.release_policy(policy_id)
    show(context, policy, _fields(policy))


@policies.command()
def delete(context: typer.Context, policy_id: PolicyId) -> None:
    """Delete a policy with its weights and checkpoints."""
    with open_client(context) as client:
        client.delete_policy(policy_id).result()
    show(context, {"policy_id": policy_id}, {"deleted": policy_id})


def _row(policy: Policy) -> tuple[object, ...]:
    spec = policy.spec
    return (
        spec.policy_id,
        policy.state,
        policy.version,
        policy.next_seq,
        spec.preset or spec.model_folder or "sent",
        policy.num_parameters,
        policy.num_trainable_parameters,
    )


def _fields(policy: Policy) -> dict[str, object]:
    return dict(zip(_COLUMNS, _row(policy), strict=True)) | {
        "sequencing": policy.spec.sequencing,
        "published version": policy.published_version,
        "failure": policy.failure or None,
        "attention backend": policy.attention_backend,
        "optimizer states": policy.optimizer_states,
        "shard": policy.shard,
        "created": policy.created_at,
    }


@checkpoints.command("list")
def list_checkpoints(context: typer.Context, policy_id: str) -> None:
    """List a policy's checkpoints."""
    with open_client(context) as client:
        found = client.list_checkpoints(policy_id)
    show_rows(context, found, _CHECKPOINT_COLUMNS, map(_checkpoint_row, found))


@checkpoints.command()
def save(
    context: typer.Context,
    policy_id: str,
    checkpoint_id: Annotated[
        str, typer.Argument(help="Default: named after seq and version.")
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint of this name.")
    ] = False,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Keep it whatever --keep-last of later ones says.")
    ] = False,
    ttl_s: Annotated[
        float | None, typer.Option(help="Seconds until it is deleted. Default: never.", min=0.001)
    ] = None,
    keep_last: Annotated[
        int,
        typer.Option(help="Keep the newest so many that are not pinned; 0: all.", min=0),
    ] = 0,
    seq: Seq = None,
) -> None:
    """Save model, optimizer, version and seq, and wait for it.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    with open_client(context) as client:
        handle = client.policy(policy_id).save_checkpoint(
            checkpoint_id,
            overwrite=overwrite,
            pinned=pinned,
            ttl_s=ttl_s,
            keep_last=keep_last,
            seq=seq,
        )
        saved = handle.result()
    show(context, saved, dict(zip(_CHECKPOINT_COLUMNS, _checkpoint_row(saved), strict=True)))


@checkpoints.command()
def load(context: typer.Context, policy_id: str, checkpoint_id: str, seq: Seq = None) -> None:
    """Go back to a checkpoint, and wait for it.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    with open_client(context) as client:
        client.policy(policy_id).load_checkpoint(checkpoint_id, seq=seq).result()
        policy = client.get_policy(policy_id)
    show(context, policy, {"loaded": checkpoint_id, "version": policy.version})


@checkpoints.command("delete")
def delete_checkpoint(context: typer.Context, policy_id: str, checkpoint_id: str) -> None:
    """Delete a checkpoint; its files go as soon as no recovery begins at it."""
    with open_client(context) as client:
        deleted = client.delete_checkpoint(policy_id, checkpoint_id)
    show(context, deleted, {"deleted": checkpoint_id, "version": deleted.version})


def _checkpoint_row(checkpoint: Checkpoint) -> tuple[object, ...]:
    return (
        checkpoint.checkpoint_id,
        checkpoint.version,
        checkpoint.seq,
        checkpoint.size_bytes,
        checkpoint.created_at,
        "yes" if checkpoint.pinned else None,
        checkpoint.expires_at,
    )
