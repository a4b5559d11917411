"""Builds of the engine that are broken on purpose, to see that a fault run finds each of them.

Each patches classes in a process of its own; the service's code contains none of this.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from ratoon.engine.commands import UpdateCommand
from ratoon.engine.journal import fenced
from ratoon.engine.journal.integrity import lock_row
from ratoon.engine.journal.records import JournalState, OperationEnd, OperationRecord
from ratoon.engine.journal.tables import POLICIES
from ratoon.engine.policy import startup
from ratoon.engine.policy.callers import Admission
from ratoon.engine.policy.executor import Executor
from ratoon.engine.worker.runner import TaskRunner
from ratoon.engine.worker.worker import WorkerCore
from ratoon_proto.types import StepReport, StepResult


def break_build(name: str) -> None:
    """Patch this process; "": leave it as it is."""
    if name:
        BUILDS[name]()


def no_dedupe() -> None:
    """A retry is a new operation, under a request id of its own."""

    async def find(_self: Admission, _key: object, _payload: str) -> OperationRecord | None:
        return None

    record = Admission._record

    def renamed(self: Admission, *args: Any) -> OperationRecord:
        made = record(self, *args)
        return replace(made, request_id=f"{made.request_id}-{uuid.uuid4().hex}")

    _patch(Admission, "find", find)
    _patch(Admission, "_record", renamed)


def no_fencing() -> None:
    """Tokens are given and not looked at."""

    def fence(connection: Any, policy_id: str, _token: int) -> Any:
        return lock_row(connection, POLICIES, policy_id)

    def let_in(self: WorkerCore, token: int) -> None:
        self._token = max(token, self._token)

    _patch(fenced, "_fence", fence)
    _patch(WorkerCore, "fence", let_in)


def commit_before_apply() -> None:
    """The journal has an Update as applied before the worker is asked to run it."""
    init = Executor.__init__

    def with_hasty_worker(self: Executor, run: Any, *args: Any) -> None:
        init(self, run, *args)
        call = run.worker.call

        async def hasty(method: Callable[..., Any], *args: Any) -> Any:
            if method is WorkerCore.apply and isinstance(args[1].command, UpdateCommand):
                token, task = args
                version = task.choices.next_version
                result = StepResult(version=version, report=StepReport())
                end = OperationEnd(
                    operation_id=task.operation_id,
                    state=JournalState.APPLIED,
                    result=result,
                    version=version,
                    started_at=task.started_at,
                    finished_at=run.now(),
                    choices=task.choices,
                )
                await run.journal.end(token, run.policy_id, end)
            return await call(method, *args)

        run.worker.call = hasty

    _patch(Executor, "__init__", with_hasty_worker)


def no_fsync() -> None:
    """What is written is on its way to the disk, and nobody waits for it."""
    _patch(os, "fsync", lambda _descriptor: None)


def window_not_rerun() -> None:
    """A window that must be restored stays empty."""

    def restore(self: TaskRunner, _tasks: object) -> None:
        self.trainer.discard_gradients()

    _patch(TaskRunner, "restore", restore)


def lost_end_unnoticed() -> None:
    """A start takes the journal for all there was, and deletes what is ahead of it."""

    async def nothing(*_args: object) -> None:
        return None

    for name in ("find_loss", "find_worker_loss"):
        _patch(startup, name, nothing)


def _patch(target: object, name: str, value: object) -> None:
    """For as long as the process lives."""
    mock.patch.object(target, name, value).start()


BUILDS: dict[str, Callable[[], None]] = {
    "no dedupe": no_dedupe,
    "no fencing": no_fencing,
    "commit before apply": commit_before_apply,
    "no fsync": no_fsync,
    "window not re-run": window_not_rerun,
    "lost end unnoticed": lost_end_unnoticed,
}
