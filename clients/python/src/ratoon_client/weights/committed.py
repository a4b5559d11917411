"""What a receiver committed last: one small file in its folder, whole or not there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

COMMITTED_NAME = ".receiver.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """`tag` is the adapter's after the commit; None: it cannot tell, or another commit began."""

    policy_id: str
    version: int
    tag: str | None


def read_committed(root: Path, policy_id: str) -> Committed | None:
    """None where nothing of this policy was committed, as far as the file can tell."""
    try:
        data = json.loads((root / COMMITTED_NAME).read_text(encoding="utf-8"))
        committed = Committed(**data)
    except (OSError, ValueError, TypeError):
        return None
    is_ours = committed.policy_id == policy_id and isinstance(cast("Any", committed.version), int)
    return committed if is_ours else None


def write_committed(root: Path, committed: Committed) -> None:
    # Named as what an interrupted pull leaves, which the next one removes.
    staged = root / f".staged-{COMMITTED_NAME}"
    with staged.open("w", encoding="utf-8") as file:
        json.dump(asdict(committed), file)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(root / COMMITTED_NAME)
