"""Calls between processes that the type checker must refuse.

Nothing here runs. `make type` checks the file: each comment below is itself an error once the line
that it is on is accepted.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from ratoon.engine.client import EngineClient
from ratoon.engine.engine import Engine
from ratoon.engine.worker.tasks import Outcome, RemoteWorker, Task
from ratoon.engine.worker.worker import WorkerCore
from ratoon.train.ranks.group import RankGroup
from ratoon.train.ranks.rank import Rank


def of_ranks(ranks: RankGroup) -> None:
    accepted: list[dict[str, list[float]]] = ranks.all(Rank.norms, exactly=True)
    ranks.all(Rank.norm, True)  # pyright: ignore[reportAttributeAccessIssue]
    ranks.all(Rank.norms)  # pyright: ignore[reportCallIssue]
    ranks.all(Rank.norms, "yes")  # pyright: ignore[reportArgumentType]
    ranks.all(Rank.norms, True, twice=True)  # pyright: ignore[reportCallIssue]
    ranks.all(WorkerCore.status)  # pyright: ignore[reportArgumentType]
    accepted = ranks.all(Rank.clear)  # pyright: ignore[reportAssignmentType]
    ranks.exchange_leader_value(Rank.take_values, 1)  # pyright: ignore[reportArgumentType]
    del accepted


async def of_worker(worker: RemoteWorker, task: Task) -> None:
    accepted: Outcome = await worker.call(WorkerCore.apply, token=1, task=task)
    await worker.call(WorkerCore.applied, 1, task)  # pyright: ignore[reportAttributeAccessIssue]
    await worker.call(WorkerCore.apply, 1)  # pyright: ignore[reportCallIssue]
    await worker.call(WorkerCore.apply, task, 1)  # pyright: ignore[reportArgumentType]
    accepted = await worker.call(WorkerCore.snapshot, 1)  # pyright: ignore[reportAssignmentType]
    del accepted


async def of_engine(client: EngineClient) -> None:
    accepted: bytes = await client.call(Engine.metrics_text)
    await client.call(Engine.metrics)  # pyright: ignore[reportAttributeAccessIssue]
    await client.call(Engine.policy)  # pyright: ignore[reportCallIssue]
    await client.call(Engine.policy, policy_id=1)  # pyright: ignore[reportArgumentType]
    accepted = await client.call(Engine.policies)  # pyright: ignore[reportAssignmentType]
    del accepted
