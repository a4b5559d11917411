"""Which build it is: its version, and its commit where there is one."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from ratoon_proto.build import describe_build

VERSION = metadata.version("ratoon-proto")


def _git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@example.test")
    done = subprocess.run(
        ["git", *own, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_source_tree_has_its_commit_and_whether_it_differs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    for arguments in (["init"], ["add", "."], ["commit", "-m", "one"], ["tag", "v9"]):
        _git(tmp_path, *arguments)
    commit = _git(tmp_path, "rev-parse", "HEAD")[:12]
    assert describe_build("ratoon-proto", tmp_path) == f"{VERSION} ({commit})"
    (tmp_path / "file").write_text("b")
    assert describe_build("ratoon-proto", tmp_path) == f"{VERSION} ({commit}-dirty)"


def test_a_folder_that_is_no_tree_has_a_version_alone(tmp_path: Path) -> None:
    assert describe_build("ratoon-proto", tmp_path) == VERSION
    (tmp_path / ".git").write_text("not one of git's")
    assert describe_build("ratoon-proto", tmp_path) == VERSION


def test_what_pip_installed_from_a_repository_has_that_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "ratoon_elsewhere-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ratoon-elsewhere\nVersion: 2.0\n")
    origin = {"url": "https://example.test/r", "vcs_info": {"commit_id": "ab" * 20}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert describe_build("ratoon-elsewhere", tmp_path) == f"2.0 ({'ab' * 6})"
