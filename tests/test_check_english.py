"""scripts/check_english.py: what it refuses, and a baseline that can only shrink."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "check_english.py"))
FOLDER = "kernels/src"


def _lines(source: str) -> list[int]:
    return [line for line, _ in SCRIPT["hits"](source)]


@pytest.mark.parametrize("word", ["Of", "The same", "That", "Those"])
def test_each_refused_word_is_found_wherever_a_text_begins(word: str) -> None:
    assert _lines(f'"""{word} a module."""\n') == [1]
    assert _lines(f'def f():\n    """\n    {word} a function."""\n') == [2]
    assert _lines(f'class C:\n    x: int\n    """{word} an attribute."""\n') == [3]
    assert _lines(f"# {word} a line.\n") == [1]
    assert _lines(f"x = 1  # {word} what is before it.\n") == [1]


def test_a_line_that_continues_a_comment_is_no_beginning() -> None:
    assert _lines("# The state\n# Of the policy.\n") == []
    assert _lines("x = 1  # the state\n       # Of the policy.\n") == []
    assert _lines("# The state.\n\n# Of the policy.\n") == [3]
    assert _lines("# The state.\nx = 1  # Of the policy.\n") == [2]


def test_other_texts_and_words_pass() -> None:
    assert _lines('"""Offsets of parts."""\n# Thatched.\nx = "Of no docstring"\n') == []
    assert _lines('"""Names its subject. Of the rest nothing is said."""\n') == []


def _checked(root: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_english.py", *arguments])
    code = SCRIPT["main"](root)
    assert isinstance(code, int)
    return code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with two hits in one file, both in its baseline."""
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / FOLDER / "old.py").write_text('"""Of two."""\n# Those.\n')
    (tmp_path / FOLDER / "x_pb2.py").write_text('"""Of generated code."""\n')
    (tmp_path / SCRIPT["BASELINE"]).write_text(f"{FOLDER}/old.py: 2\n")
    return tmp_path


def test_hits_within_the_baseline_pass(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _checked(root, monkeypatch) == 0


@pytest.mark.parametrize("name", ["old.py", "new.py"])
def test_one_more_hit_fails_and_an_update_does_not_allow_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = root / FOLDER / name
    path.write_text((path.read_text() if path.exists() else "") + "\n# That.\n")
    before = (root / SCRIPT["BASELINE"]).read_text()
    assert _checked(root, monkeypatch) == 1
    assert f"{FOLDER}/{name}:" in capsys.readouterr().out
    assert _checked(root, monkeypatch, "--update") == 1
    assert (root / SCRIPT["BASELINE"]).read_text() == before


def test_one_hit_less_fails_until_the_baseline_is_lowered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / FOLDER / "old.py").write_text('"""Of one."""\n')
    assert _checked(root, monkeypatch) == 1
    assert _checked(root, monkeypatch, "--update") == 0
    assert (root / SCRIPT["BASELINE"]).read_text() == f"{FOLDER}/old.py: 1\n"
    (root / FOLDER / "old.py").unlink()
    assert _checked(root, monkeypatch) == 1
    assert _checked(root, monkeypatch, "--update") == 0
    assert (root / SCRIPT["BASELINE"]).read_text() == ""
