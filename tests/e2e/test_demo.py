"""`ratoon demo` as its users start it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LAST_LINE = re.compile(
    r"demo: reward (?P<first>\d\.\d+) -> (?P<last>\d\.\d+) in (?P<updates>\d+) updates,"
    r" rho (?P<rho>\d+\.\d+), version (?P<version>\d+), (?P<seconds>\d+) s"
)


def _demo(*options: str) -> tuple[int, re.Match[str]]:
    done = subprocess.run(
        [Path(sys.executable).with_name("ratoon"), "demo", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr[-4000:]
    found = LAST_LINE.fullmatch(lines[-1])
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return done.returncode, found


@pytest.mark.e2e
@pytest.mark.timeout(660)
def test_demo_learns() -> None:
    status, line = _demo("--seed", "0")
    assert status == 0
    first, last = float(line["first"]), float(line["last"])
    assert first <= 0.3
    assert last >= max(0.6, 2 * first)
    assert float(line["rho"]) >= 2
    # Every update but the skipped ones made a version, and the newest was the one evaluated.
    assert 0 < int(line["version"]) <= int(line["updates"])


@pytest.mark.e2e
@pytest.mark.timeout(660)
def test_demo_with_shuffled_rewards_fails() -> None:
    status, line = _demo("--seed", "0", "--shuffle-rewards")
    assert status == 1
    assert float(line["last"]) < 0.6
