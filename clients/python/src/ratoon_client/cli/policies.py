"""`ratoonctl policies`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from ratoon_client.cli.context import open_client, show, show_rows
from ratoon_client.values import Lora, PolicyOptions
from ratoon_proto.types import ModelDtypeName, Policy, SequencingName

cli = typer.Typer(no_args_is_help=True)

PolicyId = Annotated[str, typer.Argument(help=escape("[a-z0-9][a-z0-9_-]{0,63}"))]
_COLUMNS = ("policy", "state", "version", "next seq", "base", "parameters", "trainable")


@cli.command("list")
def list_policies(context: typer.Context) -> None:
    with open_client(context) as client:
        policies = client.list_policies()
    show_rows(context, policies, _COLUMNS, map(_row, policies))


@cli.command()
def get(context: typer.Context, policy_id: PolicyId) -> None:
    with open_client(context) as client:
        policy = client.get_policy(policy_id)
    show(context, policy, _fields(policy))


@cli.command()
def create(
    context: typer.Context,
    policy_id: PolicyId,
    preset: Annotated[str | None, typer.Option(help="Built-in random model: tiny, small.")] = None,
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


@cli.command()
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
