"""The logs of Ray's processes, on one stream."""

from __future__ import annotations

import io
from pathlib import Path

from ratoon.cluster.local_ray import RayLogs


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_whole_lines_are_copied_once_with_the_actor_that_wrote_them(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs = RayLogs(tmp_path, stream)
    worker = tmp_path / "worker-0a1b-01000000-77.err"
    _append(worker, ":job_id:01000000\n:actor_name:EngineActor\none\ntw")
    logs.copy()
    assert stream.getvalue() == "(EngineActor pid=77) one\n"
    _append(worker, "o\n\n")
    _append(tmp_path / "worker-0c-ffffffff-78.out", "early\n")
    logs.copy()
    logs.copy()
    lines = ["(EngineActor pid=77) one", "(EngineActor pid=77) two", "(pid=78) early"]
    assert stream.getvalue().splitlines() == lines


def test_other_files_are_not_shown_and_one_that_shrank_is_read_again(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs = RayLogs(tmp_path, stream)
    _append(tmp_path / "gcs_server.out", "chatter\n")
    _append(tmp_path / "python-core-worker-1.log", "chatter\n")
    raylet = tmp_path / "raylet.err"
    _append(raylet, "a first failure\n")
    logs.copy()
    raylet.write_text("another\n")
    logs.copy()
    assert stream.getvalue().splitlines() == ["(raylet) a first failure", "(raylet) another"]


def test_what_is_written_until_the_stop_is_copied(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs = RayLogs(tmp_path, stream)
    logs.start()
    _append(tmp_path / "worker-1-2-3.out", "the last words\n")
    logs.stop()
    assert stream.getvalue() == "(pid=3) the last words\n"
