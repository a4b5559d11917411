"""The SDK of the Tinker API, in a folder of its own beside .venv, and how scripts run with it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SITES = Path(__file__).parents[1] / ".compat"
VERSIONS = ("0.25.0", "0.29.0", "0.34.0", "0.36.0", "0.38.0")
NEWEST = SITES / f"tinker-{VERSIONS[-1]}"
# Trains models of its own for some steps: what it prints is the same at each run.
STEPS = Path(__file__).with_name("tinker_steps.py")


def are_installed(sites: Iterable[Path]) -> bool:
    return all((site / ".stamp").exists() for site in sites)


def environment(url: str, sites: Iterable[Path] = ()) -> Mapping[str, str]:
    """Variables of a process whose SDK asks the service at `url`; it imports from `sites` too."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, sites)),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-none-is-asked-for",
        "TINKER_TELEMETRY": "0",
        "OMP_NUM_THREADS": "1",
    }
