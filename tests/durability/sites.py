"""The places of the code that fsync, told apart by what they put on the disk.

Enters an event, leaves the name of its site. Invariant: every fsync of a recording has exactly one
site: a new one in the code fails the test that looks for it.
"""

from __future__ import annotations

import re

from tests.durability.recorder import Event, Kind

_POLICY = "data/policies/[^/]+"
_TEMPORARY = r"/\.tmp-[^/]+"

# The path of what is synced, relative to the recorded folder.
_PATTERNS = {
    "names beside the data root": r"\.",
    "names in the data root": "data",
    "names of policies": "data/policies",
    "names in a policy's folder": _POLICY,
    "body": f"{_POLICY}/bodies{_TEMPORARY}",
    "names of bodies": f"{_POLICY}/bodies",
    "upload part": f"{_POLICY}/uploads/[^/]+{_TEMPORARY}",
    "names of upload parts": f"{_POLICY}/uploads/[^/.]+",
    "names of uploads": f"{_POLICY}/uploads",
    "result": rf"{_POLICY}/results/\.tmp-[0-9a-f]+-[^/]+",
    "whose a result is": rf"{_POLICY}/results/\.tmp-[0-9a-f]+\.[^/]+",
    "names of results": f"{_POLICY}/results",
    "checkpoint's states": rf"{_POLICY}/checkpoints{_TEMPORARY}/states-[\d]+-of-[\d]+.safetensors",
    "checkpoint's manifest": f"{_POLICY}/checkpoints{_TEMPORARY}/checkpoint.json",
    "names in a checkpoint": f"{_POLICY}/checkpoints{_TEMPORARY}",
    "names of checkpoints": f"{_POLICY}/checkpoints",
    "version's weights": f"{_POLICY}/weights{_TEMPORARY}/model.safetensors",
    "version's configuration": f"{_POLICY}/weights{_TEMPORARY}/(generation_)?config.json",
    "version's manifest": f"{_POLICY}/weights{_TEMPORARY}/manifest.json",
    "names in a version": f"{_POLICY}/weights{_TEMPORARY}",
    "names of versions": f"{_POLICY}/weights",
    "keys": r"data/access/\.tmp-keys\.json-[^/]+",
    "names in the access folder": "data/access",
    "journal's log": "data/ratoon.sqlite-wal",
    "journal": "data/ratoon.sqlite",
    "journal's first roll-back log": "data/ratoon.sqlite-journal",
}
_COMPILED = {site: re.compile(pattern) for site, pattern in _PATTERNS.items()}

# Site of SQLite's log while it creates the file: no promise was made by then.
BEFORE_ANY_PROMISE = "journal's first roll-back log"
SITES = tuple(site for site in _PATTERNS if site != BEFORE_ANY_PROMISE)


def site_of(event: Event) -> str:
    """Site of a SYNC; "" for any other event. Raises `LookupError` for an unknown place."""
    if event.kind is not Kind.SYNC:
        return ""
    path = event.path.removesuffix(" (deleted)")
    found = [site for site, pattern in _COMPILED.items() if pattern.fullmatch(path)]
    if len(found) != 1:
        raise LookupError(f"{event.path} is synced at {found or 'no known site'}")
    return found[0]
