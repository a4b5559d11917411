"""`ratoonctl policies` and `ratoonctl checkpoints`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from ratoon_client.cli.context import Seq, open_client, show, show_rows
from ratoon_client.values import Checkpoint, Lora, PolicyOptions
from ratoon_proto.types import ModelDtypeName, Policy, SequencingName

policies = typer.Typer(no_args_is_help=True)
checkpoints = typer.Typer(no_args_is_help=True)

PolicyId = Annotated[str, typer.Argument(help=escape("[a-z0-9][a-z0-9_-]{0,63}"))]
_COLUMNS = ("policy", "state", "version", "next seq", "base", "parameters", "trainable")
_CHECKPOINT_COLUMNS = ("checkpoint", "version", "seq", "bytes", "created", "pinned", "expires")


@policies.command("list")
def list_policies(context: typer.Context) -> None:
    with open_client(context) as client:
        found = client.list_policies()
    show_rows(context, found, _COLUMNS, map(_row, found))


@policies.command()
def get(context: typer.Context, policy_id: PolicyId) -> None:
    with open_client(context) as client:
        policy = client.get_policy(policy_id)
    show(context, policy, _fields(policy))


@policies.command()
def create(
    context: typer.Context,
    policy_id: PolicyId,
    preset: Annotated[
        str | None,
        typer.Option(help="Built-in random model: tiny, small, tiny-qwen3.5, tiny-gpt-oss."),
    ] = None,
    model_folder: Annotated[
        str | None, typer.Option(help="Model folder below the service's models root.")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help="Train a LoRA adapter of this rank.", min=1)
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="Scale of the adapter. Default: twice the rank.", min=0.0)
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(help="Projections to adapt, as q_proj,v_proj. Default: all."),
    ] = None,
    dtype: Annotated[
        ModelDtypeName | None,
        typer.Option(help="Dtype of the weights on the device."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.", min=0, max=2**64 - 1)] = 0,
    sequencing: Annotated[
        SequencingName | None,
        typer.Option(help="Who numbers the policy's calls."),
    ] = None,
) -> None:
    """Create a policy and wait until it can be trained."""
    options = PolicyOptions(seed=seed)
    if preset is not None:
        options["preset"] = preset
    if model_folder is not None:
        options["model_folder"] = model_folder
    if dtype is not None:
        options["dtype"] = dtype
    if sequencing is not None:
        options["sequencing"] = sequencing
    if lora_rank is not None:
        alpha = 2.0 * lora_rank if lora_alpha is None else lora_alpha
        targets = lora_targets.split(",") if lora_targets else ()
        options["lora"] = Lora(rank=lora_rank, alpha=alpha, target_modules=targets)
    with open_client(context) as client:
        policy = client.create_policy(policy_id, **options).result()
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
        spec.preset or spec.model_folder,
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
