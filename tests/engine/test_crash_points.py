"""Points that kill a process on request, and never otherwise."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from ratoon.config import RatoonConfig
from ratoon.engine.crash_points import CrashPoint, make_reach
from ratoon.engine.settings import EngineSettings

_ROOT = Path(__file__).parents[2]
_SCRIPT = """
import sys
from pathlib import Path
from ratoon.engine.crash_points import CrashPoint, make_reach
reach = make_reach(Path(sys.argv[1]))
for count in range(5):
    reach(CrashPoint.WORKER_IN_APPLY)
    reach(CrashPoint.ENGINE_BEFORE_END)
    print(count, flush=True)
"""


def run(folder: Path) -> tuple[int, list[str]]:
    process = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return process.returncode, [line for line in process.stdout.splitlines() if line.isdigit()]


def test_the_nth_reach_removes_the_file_and_kills_the_process(tmp_path: Path) -> None:
    point = tmp_path / CrashPoint.ENGINE_BEFORE_END
    point.write_text("3\n")
    assert run(tmp_path) == (-signal.SIGKILL, ["0", "1"])
    assert not point.exists()
    assert run(tmp_path) == (0, ["0", "1", "2", "3", "4"])


def test_a_process_that_was_given_no_folder_lives(tmp_path: Path) -> None:
    for config, folder in (
        (RatoonConfig(data_root=tmp_path), None),
        (RatoonConfig(data_root=tmp_path, crash_points=True), tmp_path / "crash-points"),
    ):
        assert EngineSettings.from_config(config).crash_points == folder
    make_reach(None)(CrashPoint.WORKER_IN_APPLY)
    make_reach(tmp_path / "not-there")(CrashPoint.WORKER_IN_APPLY)


def test_the_operations_page_lists_every_point_and_no_other() -> None:
    text = (_ROOT / "docs" / "operations.md").read_text()
    listed = re.findall(r"`((?:ingress|engine|worker|rank)-[a-z-]+)`", text)
    assert sorted(listed) == sorted(CrashPoint)
