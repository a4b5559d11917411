"""`ratoon doctor`: what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratoon import cli as command_line
from ratoon import doctor
from ratoon.doctor import Check, Status


def test_brackets_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tree_attention [cuda]` was shown as `tree_attention`, as all backends of the op."""
    checks = (
        Check(name="tree_attention [cuda]", status=Status.OK, detail="available"),
        Check(name="tls", status=Status.WARN, detail="of [red]x"),
    )
    monkeypatch.setenv("RATOON_DATA_ROOT", str(tmp_path))
    monkeypatch.setattr(doctor, "run_checks", lambda _: checks)
    done = CliRunner().invoke(command_line.cli, ["doctor"])
    assert done.exit_code == 0
    words = [line.split() for line in done.stdout.splitlines()]
    assert words == [
        ["ok", "tree_attention", "[cuda]", "available"],
        ["warn", "tls", "of", "[red]x"],
    ]
