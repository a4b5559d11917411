"""`ratoonctl info` and `health`; `health` succeeds only if the service is healthy."""

from __future__ import annotations

import typer

from ratoon_client.cli.context import open_client, show


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


def health(context: typer.Context) -> None:
    """Exit 0 if the service is healthy, 1 if it is not, 3 if it does not answer."""
    with open_client(context) as client:
        answer = client.health()
    show(context, answer, {"status": answer.status})
    if not answer.is_ok:
        raise typer.Exit(1)
