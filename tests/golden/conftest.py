"""Recorded values that must not change by accident; `pytest tests/golden --write-golden` records.

Whoever changes one on purpose commits the new file with the change, and says why in CHANGELOG.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent


class Golden:
    """Files of recorded JSON values, in this folder."""

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes

    def has(self, name: str) -> bool:
        """Whether a value is recorded under `name`, or will be."""
        return self._writes or (_FOLDER / f"{name}.json").is_file()

    def recorded(self, name: str, found: object) -> object:
        """The value recorded under `name`; with `--write-golden`, `found`, which is recorded."""
        path = _FOLDER / f"{name}.json"
        if self._writes:
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return json.loads(path.read_text())

    def check(self, name: str, found: object) -> None:
        """Raises AssertionError where `found`, as JSON, is not what was recorded."""
        assert json.loads(json.dumps(found)) == self.recorded(name, found)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(writes=bool(request.config.getoption("--write-golden")))
