"""Copies the logs of Ray's processes to one stream, each line labelled with its actor.

Ray's workers write to files in their session's folder, which this process tails.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_POLL_S = 0.25
# Read per file and round, so that a busy file does not hold up the others.
_MOST_BYTES = 2**20
# Markers that Ray writes between lines to say whose they are.
_ACTOR, _OTHER_MARKS = ":actor_name:", (":job_id:", ":task_name:")
_WORKER = re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(?P<pid>\d+)\.(?:out|err)")
_DAEMON = re.compile(r"(?P<name>raylet|gcs_server)(?:\.\d+)?\.err")


@dataclass(slots=True, kw_only=True)
class _File:
    path: Path
    label: str
    # "": a daemon, whose label never changes.
    pid: str
    offset: int = 0
    rest: bytes = b""


class RayLogs:
    """Tails a folder of logs from `start` to `stop`, which copies what is left."""

    def __init__(self, folder: Path, stream: TextIO) -> None:
        self._folder = folder
        self._stream = stream
        self._files: dict[str, _File] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ray-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self.copy()

    def copy(self) -> None:
        """Write the complete lines added since the last call."""
        for path in sorted(self._folder.glob("*.*")):
            file = self._files.get(path.name) or _file_of(path)
            if file is not None:
                self._files[path.name] = file
                self._copy_file(file)
        self._stream.flush()

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.copy()

    def _copy_file(self, file: _File) -> None:
        try:
            size = file.path.stat().st_size
            if size < file.offset:
                file.offset, file.rest = 0, b""  # It was rotated.
            if size == file.offset:
                return
            with file.path.open("rb") as opened:
                opened.seek(file.offset)
                data = opened.read(_MOST_BYTES)
        except FileNotFoundError:
            return
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        for line in lines:
            self._write(file, line.decode("utf-8", "replace"))

    def _write(self, file: _File, line: str) -> None:
        if line.startswith(_ACTOR):
            file.label = f"{line.removeprefix(_ACTOR)} pid={file.pid}"
        elif line and not line.startswith(_OTHER_MARKS):
            self._stream.write(f"({file.label}) {line}\n")


def _file_of(path: Path) -> _File | None:
    """None: a file that is not shown."""
    if found := _WORKER.fullmatch(path.name):
        return _File(path=path, label=f"pid={found['pid']}", pid=found["pid"])
    if found := _DAEMON.fullmatch(path.name):
        return _File(path=path, label=found["name"], pid="")
    return None
