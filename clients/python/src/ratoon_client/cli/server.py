"""`ratoonctl info` and `health`; `health` succeeds only where the service is well."""

from __future__ import annotations

import typer

from ratoon_client.cli.context import open_client, show


def info(context: typer.Context) -> None:
    """What the service is: versions, device, backends, limits."""
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


def health(context: typer.Context) -> None:
    """Exit 0 where the service is well, 1 where it is not, 3 where it does not answer."""
    with open_client(context) as client:
        answer = client.health()
    show(context, answer, {"status": answer.status})
    if not answer.is_ok:
        raise typer.Exit(1)
