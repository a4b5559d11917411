"""`ratoonctl weights`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ratoon_client.cli.context import (
    Seq,
    Version,
    VersionName,
    WeightsRoot,
    open_client,
    settings_of,
    show,
    show_line,
    show_rows,
    until_stopped,
)
from ratoon_client.config import ClientConfig
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.weights.pull import KEEP_VERSIONS
from ratoon_client.weights.receiver import Adapter, FolderAdapter, Received, ReceiverEvent
from ratoon_client.weights.sglang import SglangAdapter
from ratoon_client.weights.vllm import StagedVllmAdapter, VllmAdapter
from ratoon_client.weights.vllm_nccl import VllmNcclAdapter
from ratoon_proto.types import WeightManifest

cli = typer.Typer(no_args_is_help=True)


class VllmBackend(StrEnum):
    """How a version comes into a vLLM server."""

    RELOAD = "reload"
    RATOON = "ratoon"
    NCCL = "nccl"


@cli.command("list")
def list_versions(context: typer.Context, policy_id: str) -> None:
    """List the versions that can be fetched, newest first, then who serves which."""
    with open_client(context) as client:
        found = client.versions(policy_id)
    columns = ("version", "bytes", "delta bytes", "published", "held", "names")
    versions = [
        (
            each.version,
            each.size_bytes,
            each.delta_bytes or None,
            each.published_at,
            "yes" if each.is_held else None,
            ", ".join(named.name for named in each.names) or None,
        )
        for each in reversed(found.versions)
    ]
    show_rows(context, found, columns, versions)
    if found.receivers and not settings_of(context).as_json:
        receivers = [
            (each.receiver_id, each.version, each.lag, each.holds_version, each.last_seen)
            for each in found.receivers
        ]
        show_rows(context, (), ("receiver", "serves", "lag", "holds", "last seen"), receivers)


@cli.command()
def publish(
    context: typer.Context,
    policy_id: str,
    name: Annotated[str, typer.Argument(help="Name that keeps the version.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Take the name over from another version.")
    ] = False,
    ttl_s: Annotated[
        float | None, typer.Option(help="Seconds until it is deleted. Default: never.", min=0.001)
    ] = None,
    seq: Seq = None,
) -> None:
    """Publish the weights under a name, which keeps them, and wait for it.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    with open_client(context) as client:
        session = client.policy(policy_id)
        handle = session.publish_version(name=name, overwrite=overwrite, ttl_s=ttl_s, seq=seq)
        named = handle.result()
    fields = {"name": named.name, "version": named.version, "bytes": named.size_bytes}
    show(context, named, fields | {"expires": named.expires_at})


@cli.command()
def delete(context: typer.Context, policy_id: str, name: str) -> None:
    """Take a version's name away; its files go unless something else keeps them."""
    with open_client(context) as client:
        named = client.delete_version(policy_id, name)
    show(context, named, {"deleted": name, "version": named.version})


@cli.command()
def pull(
    context: typer.Context,
    policy_id: str,
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for version-N, and for `latest`, which names one.", file_okay=False
        ),
    ],
    version: Version = None,
    name: VersionName = None,
    keep: Annotated[
        int, typer.Option(help="Number of versions to keep; 0: all.", min=0)
    ] = KEEP_VERSIONS,
    weights_root: WeightsRoot = None,
) -> None:
    """Update a folder to a policy's newest weights, verified."""
    with open_client(context, ClientConfig(weights_root=weights_root)) as client:
        pulled = client.pull_weights(policy_id, folder, version, name=name, keep=keep or None)
    fields = {
        "version": pulled.version,
        "folder": pulled.folder,
        "files": len(pulled.manifest.files),
        "fetched bytes": pulled.fetched_bytes,
        "from version": pulled.parent_version,
    }
    show(context, pulled, fields)


@cli.command()
def export(
    context: typer.Context,
    policy_id: str,
    folder: Annotated[Path, typer.Argument(help="Folder that is new or empty.", file_okay=False)],
    version: Version = None,
    name: VersionName = None,
    base: Annotated[
        str | None, typer.Option(help="For an adapter: its base's folder, or id on a hub.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the folder --base.")
    ] = False,
    weights_root: WeightsRoot = None,
) -> None:
    """Write a version as a Hugging Face folder, with tokenizer and README.md."""
    with open_client(context, ClientConfig(weights_root=weights_root)) as client:
        out = client.export_weights(policy_id, folder, version, name=name, base=base, merge=merge)
    names = ", ".join(sorted(path.name for path in out.folder.iterdir()))
    show(context, out, {"version": out.version, "folder": out.folder, "files": names})


@cli.command("import")
def import_weights(
    context: typer.Context,
    policy_id: str,
    folder: Annotated[
        str, typer.Argument(help="Folder of weights, below the server's models root.")
    ],
    delta: Annotated[
        bool,
        typer.Option("--delta", help="Add the folder's values instead of replacing the weights."),
    ] = False,
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="Reset moments and step count.")
    ] = False,
    expected_version: Annotated[
        int | None, typer.Option(help="Refuse the call if the policy is at another version.", min=0)
    ] = None,
    seq: Seq = None,
) -> None:
    """Import weights from a folder on the server, and wait for the new version.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    with open_client(context) as client:
        handle = client.policy(policy_id).import_weights(
            folder,
            mode="delta" if delta else "full",
            reset_optimizer=reset_optimizer,
            expected_version=expected_version,
            seq=seq,
        )
        imported = handle.result()
    fields = {
        "version": imported.version,
        "tensors": imported.num_tensors,
        "bytes": imported.size_bytes,
        "dtypes": ", ".join(imported.dtypes),
    }
    show(context, imported, fields)


@cli.command()
def watch(context: typer.Context, policy_id: str) -> None:
    """Print a line for the newest version, and for each that is published from now on."""
    with open_client(context) as client:
        for newest in client.watch_weights(policy_id):
            show(context, newest, {"version": newest.version, "bytes": _num_bytes(newest)})


@cli.command()
def follow(
    context: typer.Context,
    policy_id: str,
    root: Annotated[
        Path,
        typer.Option(help="Folder of this receiver, which the engine can read.", file_okay=False),
    ],
    vllm: Annotated[str, typer.Option(help="URL of the server to load versions into.")] = "",
    vllm_backend: Annotated[
        VllmBackend,
        typer.Option(
            help="Source of a load: reload (folder), ratoon (its memory), nccl (--device)."
        ),
    ] = VllmBackend.RELOAD,
    device: Annotated[
        str, typer.Option(help="For nccl: a GPU that the engine does not use.")
    ] = "cuda:0",
    sglang: Annotated[str, typer.Option(help="URL of the server to load versions into.")] = "",
    receiver_id: Annotated[
        str | None,
        typer.Option(help="Its name in the service. Default: of this host and folder."),
    ] = None,
    weights_root: WeightsRoot = None,
) -> None:
    """Load each version as it is published, until SIGINT or SIGTERM; print a line for each."""

    def on_event(event: ReceiverEvent) -> None:
        if isinstance(event, Received):
            show_line(context, event, _received_line(event))
        else:
            version = "" if event.version is None else f"version {event.version}: "
            again = f"(again in {event.retry_s:.1f} s)"
            typer.echo(f"ratoonctl: {version}{event.error} {again}", err=True)

    with until_stopped(), ExitStack() as stack:
        vllm_adapter = {
            VllmBackend.RELOAD: VllmAdapter,
            VllmBackend.RATOON: StagedVllmAdapter,
            VllmBackend.NCCL: partial(VllmNcclAdapter, device=device),
        }[vllm_backend]
        adapter = _adapter(stack, vllm, vllm_adapter, sglang)
        config = ClientConfig(weights_root=weights_root)
        client = stack.enter_context(open_client(context, config))
        client.weight_receiver(
            policy_id, root, adapter, receiver_id=receiver_id, on_event=on_event
        ).follow()


def _adapter(
    stack: ExitStack, vllm: str, vllm_adapter: Callable[[str], VllmAdapter], sglang: str
) -> Adapter:
    if vllm and sglang:
        raise InvalidArgumentError("--sglang", "beside --vllm", "one engine")
    if vllm:
        return stack.enter_context(vllm_adapter(vllm))
    if sglang:
        return stack.enter_context(SglangAdapter(sglang))
    return FolderAdapter()


def _num_bytes(manifest: WeightManifest) -> int:
    return sum(file.size_bytes for file in manifest.files)


def _received_line(event: Received) -> str:
    return (
        f"version {event.version}  {event.size_bytes} bytes  fetched {event.fetched_bytes} in"
        f" {event.fetch_s:.2f} s  verified in {event.verify_s:.2f} s  paused {event.pause_s:.2f} s"
    )


@cli.command()
def manifest(
    context: typer.Context, policy_id: str, version: Version = None, name: VersionName = None
) -> None:
    """List the files of a version, with their digests."""
    with open_client(context) as client:
        weights = client.weight_manifest(policy_id, version, name=name)
    if not weights.files:
        show(context, weights, {"version": weights.version})
        return
    rows = [(weights.version, file.name, file.size_bytes, file.digest) for file in weights.files]
    show_rows(context, [weights], ("version", "name", "bytes", "digest"), rows)
