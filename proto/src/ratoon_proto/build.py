"""Describes the running build of Ratoon, as `--version` of every command shows it."""

from __future__ import annotations

import json
import subprocess  # nosec B404
from importlib import metadata
from pathlib import Path

# The root of a source tree; an installed copy has a folder without `.git` there.
_ROOT = Path(__file__).parents[3]
_GIT = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
_GIT_S = 5.0


def describe_build(distribution: str, root: Path = _ROOT) -> str:
    """A distribution's version, and the commit in brackets where it is known.

    It is known in a source tree, and where pip has installed from a repository.
    """
    installed = metadata.distribution(distribution)
    commit = _commit_of_tree(root) or _commit_of_install(installed)
    return f"{installed.version} ({commit})" if commit else installed.version


def _commit_of_tree(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(  # nosec B603
            _GIT, cwd=root, capture_output=True, text=True, check=True, timeout=_GIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _commit_of_install(installed: metadata.Distribution) -> str:
    """Commit of an installation, from the file that PEP 610 describes; "" if there is none."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    return str(origin.get("vcs_info", {}).get("commit_id", ""))[:12]
