"""The page on distillation, run as it stands: a student comes to answer as its teacher does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.running_service import Service

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "docs" / "distil.md"
# A policy of other weights than the student's, which nobody has trained.
NOVICE = """
client.create_policy("novice", preset="tiny", seed=3).result()
taught = Distillation("forward_kl", teachers=[Teacher("novice")], num_teacher_tokens=16)
"""
TAUGHT = (
    'taught = Distillation("forward_kl", teachers=[Teacher("teacher")], num_teacher_tokens=16)\n'
)


def _run(
    service: Service, capsys: pytest.CaptureFixture[str], names: str, *changes: tuple[str, str]
) -> tuple[float, list[float]]:
    """Agreement on held-out prompts, and the KL to the teacher of each step.

    Policies have names that begin with `names`: tests share the service."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks)
    renamed = [(f'"{name}"', f'"{names}-{name}"') for name in ("teacher", "student")]
    address = "grpc://127.0.0.1:8443", f"grpc://{service.addresses.grpc}"
    for old, new in (address, *renamed, *changes):
        assert old in code
        code = code.replace(old, new)
    exec(code, {"__name__": "__main__"})  # noqa: S102
    output = capsys.readouterr().out
    (agreement,) = re.findall(r"^agreement (\S+) on 64 held-out prompts$", output, re.MULTILINE)
    kls = re.findall(r"^student: KL to .*? (\d\S*?)(?: .*)?$", output, re.MULTILINE)
    return float(agreement), [float(text) for text in kls]


def test_a_student_comes_nearer_to_its_teacher(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page with a third of its steps."""
    monkeypatch.chdir(tmp_path)
    _, kls = _run(
        service, capsys, "third", ("session.next_seq() <= 60", "session.next_seq() <= 20")
    )
    assert len(kls) == 21
    assert kls[-2] < 0.6 * kls[0]


@pytest.mark.more
def test_a_student_answers_held_out_prompts_as_its_teacher_does(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    agreement, kls = _run(service, capsys, "whole")
    assert agreement >= 0.9
    # The last one is of answers that rollouts carry.
    assert len(kls) == 61
    assert max(kls[-2:]) < 0.1 * kls[0]


@pytest.mark.more
def test_a_student_of_another_teacher_does_not(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the page shows is not what any targets would do."""
    monkeypatch.chdir(tmp_path)
    agreement, _ = _run(service, capsys, "other", (TAUGHT, NOVICE))
    assert agreement <= 0.3
