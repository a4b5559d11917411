"""The page on PPO, run as it stands: scores rise, and values come to say them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.running_service import Service

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "docs" / "ppo.md"


def test_actors_learn_from_their_critics(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks)
    address = "grpc://127.0.0.1:8443"
    assert address in code
    exec(  # noqa: S102
        code.replace(address, f"grpc://{service.addresses.grpc}"), {"__name__": "__main__"}
    )
    output = capsys.readouterr().out
    print(output)
    apart = re.findall(r"^step \d+: score (\S+), value loss (\S+)$", output, re.MULTILINE)
    shared = re.findall(r"^one trunk, step \d+: score (\S+), value (\S+)$", output, re.MULTILINE)
    assert len(apart) == len(shared) == 16
    for rows in (apart, shared):
        scores = [float(score) for score, _ in rows]
        assert max(scores[:2]) < 0.65
        assert min(scores[-2:]) > 0.8
    losses = [float(loss) for _, loss in apart]
    assert losses[-1] < 0.2 * losses[0]
    values = [float(value) for _, value in shared]
    assert abs(values[-1] - float(shared[-1][0])) < 0.2
