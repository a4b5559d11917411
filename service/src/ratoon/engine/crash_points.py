"""Named moments at which a test may kill a process: one before and after each durable step.

A process that was given no folder is never killed here.

A file of the point's name in the folder holds a count n, in decimal: from then on the n-th time
that one process reaches the point it removes the file and kills itself with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from ratoon.log import get_logger

_LOG = get_logger("crash_points")
FOLDER_NAME = "crash-points"


class CrashPoint(StrEnum):
    """All there are, by the process that reaches them; docs/operations.md says what each means."""

    INGRESS_BEFORE_SUBMIT = "ingress-before-submit"
    INGRESS_AFTER_SUBMIT = "ingress-after-submit"
    ENGINE_AFTER_BODY = "engine-after-body"
    ENGINE_BEFORE_ACCEPT = "engine-before-accept"
    ENGINE_AFTER_ACCEPT = "engine-after-accept"
    ENGINE_BEFORE_END = "engine-before-end"
    ENGINE_AFTER_END = "engine-after-end"
    ENGINE_BEFORE_PUBLISH = "engine-before-publish"
    ENGINE_AFTER_PUBLISH = "engine-after-publish"
    ENGINE_BEFORE_CHECKPOINT = "engine-before-checkpoint"
    ENGINE_BEFORE_COVER = "engine-before-cover"
    ENGINE_AFTER_COVER = "engine-after-cover"
    ENGINE_AFTER_COLLECT = "engine-after-collect"
    ENGINE_IN_REPLAY = "engine-in-replay"
    WORKER_BEFORE_APPLY = "worker-before-apply"
    WORKER_IN_APPLY = "worker-in-apply"
    WORKER_AFTER_APPLY = "worker-after-apply"
    WORKER_BEFORE_CHECKPOINT = "worker-before-checkpoint"
    WORKER_AFTER_CHECKPOINT = "worker-after-checkpoint"


Reach = Callable[[CrashPoint], None]


def never(_point: CrashPoint) -> None:
    """`Reach` of a process that is not to be killed."""


def make_reach(folder: Path | None) -> Reach:
    """`Reach` of this process; None: `never`. The folder need not be there."""
    if folder is None:
        return never
    _LOG.warning("crash points are on: this process may be killed", folder=str(folder))
    return _CrashFolder(folder).reach


class _CrashFolder:
    """Counts from when a file is first seen; may be used by any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[CrashPoint, int] = {}
        self._lock = threading.Lock()

    def reach(self, point: CrashPoint) -> None:
        path = self._folder / point
        with self._lock:
            try:
                wanted = int(path.read_text())
            except (FileNotFoundError, ValueError):
                # No file, or one that is being written.
                self._counts.pop(point, None)
                return
            self._counts[point] = self._counts.get(point, 0) + 1
            if self._counts[point] < wanted:
                return
            try:
                path.unlink()
            except FileNotFoundError:
                # Another process took it.
                self._counts.pop(point, None)
                return
            os.kill(os.getpid(), signal.SIGKILL)
