"""What a start and a stop of `ratoon serve` print: few lines, each of which says something."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ratoon.sole_service import free_port
from tests.e2e.test_access import RATOON, START_S

# Counts are of standard output and standard error together.
_MOST_LINES, _MOST_COLUMNS = 12, 200


@pytest.mark.e2e
@pytest.mark.more
def test_a_start_and_a_stop_print_few_lines_that_fit_a_screen(tmp_path: Path) -> None:
    """Ray and Serve told each of their steps, one of them in a line of 2,900 characters."""
    ports = {name: str(free_port()) for name in ("HTTP__PORT", "GRPC__PORT", "SERVE__HTTP_PORT")}
    environment = os.environ | {f"RATOON_{name}": port for name, port in ports.items()}
    environment |= {
        "RATOON_DATA_ROOT": str(tmp_path / "data"),
        "RATOON_WORKER__DEVICE": "cpu",
        "RATOON_RAY__OBJECT_STORE_BYTES": str(100 * 2**20),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [RATOON, "serve"], env=environment, stdout=file, stderr=file, cwd=tmp_path
        )
    deadline = time.monotonic() + START_S
    while "\ngrpc  " not in f"\n{log.read_text()}" and time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0
    lines = log.read_text().splitlines()
    said = log.read_text()
    assert len(lines) <= _MOST_LINES, said
    assert max(map(len, lines)) <= _MOST_COLUMNS, said
    assert f"http  http://127.0.0.1:{ports['HTTP__PORT']}" in lines
    assert f"grpc  127.0.0.1:{ports['GRPC__PORT']}" in lines
    assert lines[-1] == "stopping"
    assert "service runs" in said
    assert "existing" not in said
