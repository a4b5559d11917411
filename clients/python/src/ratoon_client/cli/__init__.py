"""The `ratoonctl` command."""

from ratoon_client.cli.app import main

__all__ = ["main"]
