"""`ratoon demo` as its users start it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# A minute or two on cores of its own; on a busy machine many times that.
HANG_S = 2400
LAST_LINE = re.compile(
    r"demo: reward (?P<first>\d\.\d+) -> (?P<middle>\d\.\d+) -> (?P<last>\d\.\d+)"
    r" in (?P<updates>\d+) updates,"
    r" rho (?P<rho>\d+\.\d+), version (?P<version>\d+), (?P<seconds>\d+) s"
)


@dataclass(frozen=True, slots=True)
class Demo:
    """How one ended: its status, its output and its last line."""

    status: int
    output: str
    line: re.Match[str]

    @property
    def last_reward(self) -> float:
        return float(self.line["last"])


def _run(*options: str) -> Demo:
    done = subprocess.run(
        [Path(sys.executable).with_name("ratoon"), "demo", "--seed", "0", *options],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr[-4000:]
    found = LAST_LINE.fullmatch(lines[-1])
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return Demo(done.returncode, done.stdout, found)


@pytest.mark.e2e
@pytest.mark.more
@pytest.mark.timeout(HANG_S + 60)
def test_demo_learns() -> None:
    demo = _run()
    assert demo.status == 0, demo.output
    assert "wrong:" not in demo.output
    assert float(demo.line["first"]) <= 0.3
    # Copying one letter of two and guessing the other scores 0.66.
    assert demo.last_reward >= 0.75
    assert float(demo.line["rho"]) >= 2
    assert re.search(r"staleness +1 and 2 versions", demo.output)
    assert re.search(r"clip +held \d+\.\d% ", demo.output)
    # Every update but the skipped ones made a version, and the newest was the one evaluated.
    assert 0 < int(demo.line["version"]) <= int(demo.line["updates"])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(HANG_S + 60)
def test_demo_with_shuffled_rewards_fails() -> None:
    demo = _run("--shuffle-rewards")
    assert demo.status == 1, demo.output
    assert "wrong: the reward ended below 0.75" in demo.output
    assert demo.last_reward < 0.6
