"""Named points at which a test may kill a process: before and after each durable step.

A file named after a point, in the crash folder, holds a decimal count n. The n-th time that one
process reaches the point, counted from then on, it removes the file and sends itself SIGKILL, or
what the file names after the count: SIGSTOP, so that it hangs there, or MemoryError, which it
raises. A process that was given no folder is never harmed here.
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
    """All crash points, by the process that reaches them; docs/operations.md explains each."""

    INGRESS_BEFORE_SUBMIT = "ingress-before-submit"
    INGRESS_AFTER_SUBMIT = "ingress-after-submit"
    ENGINE_AFTER_BODY = "engine-after-body"
    ENGINE_BEFORE_ACCEPT = "engine-before-accept"
    ENGINE_AFTER_ACCEPT = "engine-after-accept"
    ENGINE_AFTER_ANSWER = "engine-after-answer"
    ENGINE_BEFORE_END = "engine-before-end"
    ENGINE_AFTER_END = "engine-after-end"
    ENGINE_BEFORE_PUBLISH = "engine-before-publish"
    ENGINE_AFTER_PUBLISH = "engine-after-publish"
    ENGINE_BEFORE_CHECKPOINT = "engine-before-checkpoint"
    ENGINE_BEFORE_COVER = "engine-before-cover"
    ENGINE_AFTER_COVER = "engine-after-cover"
    ENGINE_AFTER_COLLECT = "engine-after-collect"
    ENGINE_AFTER_RELEASE = "engine-after-release"
    ENGINE_AFTER_DROP = "engine-after-drop"
    ENGINE_BEFORE_PUT_AWAY = "engine-before-put-away"
    ENGINE_AFTER_PUT_AWAY = "engine-after-put-away"
    ENGINE_IN_RETURN = "engine-in-return"
    ENGINE_IN_REPLAY = "engine-in-replay"
    WORKER_BEFORE_APPLY = "worker-before-apply"
    WORKER_IN_APPLY = "worker-in-apply"
    WORKER_AFTER_APPLY = "worker-after-apply"
    WORKER_BEFORE_PUBLISH = "worker-before-publish"
    WORKER_AFTER_PUBLISH = "worker-after-publish"
    WORKER_BEFORE_CHECKPOINT = "worker-before-checkpoint"
    WORKER_AFTER_CHECKPOINT = "worker-after-checkpoint"
    RANK_IN_PASS = "rank-in-pass"
    RANK_BEFORE_COPIES = "rank-before-copies"
    RANK_AFTER_STEP = "rank-after-step"
    RANK_BEFORE_CHECKPOINT = "rank-before-checkpoint"
    RANK_BEFORE_PUBLISH = "rank-before-publish"


Reach = Callable[[CrashPoint], None]


def never(_point: CrashPoint) -> None:
    """`Reach` of a process that must not be killed."""


def make_reach(folder: Path | None) -> Reach:
    """`Reach` of this process; `never` without a folder. The folder need not exist."""
    if folder is None:
        return never
    _LOG.warning("crash points are on: this process may be killed", folder=str(folder))
    return _CrashFolder(folder).reach


class _CrashFolder:
    """Counts from when a file is first seen. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[CrashPoint, int] = {}
        self._lock = threading.Lock()

    def reach(self, point: CrashPoint) -> None:
        path = self._folder / point
        with self._lock:
            try:
                count, _, harm = path.read_text().strip().partition(" ")
                wanted = int(count)
            except (FileNotFoundError, ValueError):
                # No file, or one that is still being written.
                self._counts.pop(point, None)
                return
            self._counts[point] = self._counts.get(point, 0) + 1
            if self._counts[point] < wanted:
                return
            try:
                path.unlink()
            except FileNotFoundError:
                # Another process took the file.
                self._counts.pop(point, None)
                return
        if harm == "MemoryError":
            raise MemoryError(f"at {point}")
        os.kill(os.getpid(), signal.SIGSTOP if harm == "SIGSTOP" else signal.SIGKILL)
