"""`ratoon demo` as its users start it."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="module")
def demos() -> tuple[Demo, Demo]:
    """One as it is, one that shuffles its rewards; side by side, each on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    true = _start(cores[:half], "--seed", "0")
    shuffled = _start(cores[-half:], "--seed", "0", "--shuffle-rewards")
    return _end(true), _end(shuffled)


def _start(cores: list[int], *options: str) -> subprocess.Popen[str]:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # What is started has them too.
    try:
        return subprocess.Popen(
            [Path(sys.executable).with_name("ratoon"), "demo", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, own)


def _end(demo: subprocess.Popen[str]) -> Demo:
    output, errors = demo.communicate(timeout=HANG_S)
    lines = output.strip().splitlines()
    assert lines, errors[-4000:]
    found = LAST_LINE.fullmatch(lines[-1])
    assert found, output[-4000:] + errors[-4000:]
    return Demo(demo.returncode, output, found)


@pytest.mark.e2e
@pytest.mark.more
@pytest.mark.timeout(HANG_S + 60)
def test_demo_learns(demos: tuple[Demo, Demo]) -> None:
    demo, _ = demos
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
@pytest.mark.more
@pytest.mark.timeout(HANG_S + 60)
def test_demo_with_shuffled_rewards_fails(demos: tuple[Demo, Demo]) -> None:
    _, demo = demos
    assert demo.status == 1, demo.output
    assert "wrong: the reward ended below 0.75" in demo.output
    assert demo.last_reward < 0.6
