"""Policies of several ranks, of which one fails, is stopped, hangs or dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ratoon.errors import CopyFailedError, ErrorCode, RatoonError
from ratoon.model.spec import FolderBase
from ratoon.planner.planning import cpu_planner
from ratoon.shards.copies import Copies, open_meeting
from ratoon.train.gradient_window import WindowState
from ratoon.train.spec import PassHooks
from ratoon.train.trainer import Trainer
from ratoon_proto.types import Shard
from tests.train.rank_runs import (
    alone_of,
    ranked,
    sequences_of,
    spread_over,
    update_over,
)
from tests.train.trainer_runs import (
    FROZEN,
    make_batch,
    make_loss,
    make_step,
)


def test_the_error_of_one_rank_is_the_callers_and_changes_nothing(
    rank_pair: tuple[Trainer, Trainer],
) -> None:
    _, two = rank_pair
    batch, before = make_batch(6), two.state_digest()
    loss = make_loss(batch)
    plan = spread_over(two.prepare(batch, loss).plan, (0, 1))
    for failing in (0, 1):
        parts = [*plan.micro_batches]
        # The last of several: the others have begun to wait for what comes of it.
        last = max(index for index, part in enumerate(parts) if part.rank == failing)
        assert last > 1
        parts[last] = replace(parts[last], packed_tokens=parts[last].packed_tokens + 1)
        damaged = replace(plan, micro_batches=tuple(parts))
        with pytest.raises(RatoonError, match="of another batch"):
            two.update(two.prepare(batch, loss, damaged), make_step(two, loss))
        assert two.window_state is WindowState.EMPTY
        assert two.state_digest() == before
    report = two.update(two.prepare(batch, loss, plan), make_step(two, loss))
    assert not report.skipped


def test_a_pass_that_fails_on_one_rank_is_not_run_to_its_end_by_another(base: FolderBase) -> None:
    """Which hears of it with the gradients that it is not sent."""
    with ranked(alone_of(base).spec, 2, 100, Shard.GRADIENTS) as (two, _):
        batch = make_batch(6, num_groups=16)
        loss = make_loss(batch)
        plan = spread_over(cpu_planner(8).plan(*sequences_of(batch)), (0, 1))
        parts = [*plan.micro_batches]
        second = [index for index, part in enumerate(parts) if part.rank == 1][1]
        parts[second] = replace(parts[second], packed_tokens=parts[second].packed_tokens + 1)
        done: list[int] = []
        with pytest.raises(RatoonError, match="of another batch"):
            two.forward_backward(
                two.prepare(batch, loss, replace(plan, micro_batches=tuple(parts))),
                PassHooks(on_progress=lambda number, _planned, _tokens: done.append(number)),
            )
        assert len(parts) // 2 > 10
        assert max(done) <= 6


def test_a_cancelled_update_leaves_every_rank_as_it_was(rank_pair: tuple[Trainer, Trainer]) -> None:
    _, two = rank_pair
    batch, before = make_batch(7), two.state_digest()
    loss = make_loss(batch, kl=FROZEN)
    plan = spread_over(two.prepare(batch, loss).plan, (0, 1))
    calls: list[int] = []

    def is_cancelled() -> bool:
        calls.append(1)
        return len(calls) > 1

    hooks = PassHooks(is_cancelled=is_cancelled)
    with pytest.raises(RatoonError) as caught:
        two.update(two.prepare(batch, loss, plan), make_step(two, loss), hooks)
    assert caught.value.code is ErrorCode.CANCELLED
    assert two.state_digest() == before
    assert not two.update(two.prepare(batch, loss, plan), make_step(two, loss)).skipped


def test_a_rank_that_is_gone_is_an_error_and_no_wait(base: FolderBase) -> None:
    with ranked(alone_of(base).spec, 2) as (two, (peer,)):
        update_over(two, 0, (0, 1))
        peer.kill()
        with pytest.raises((RuntimeError, OSError)):
            update_over(two, 1, (0, 1))


def test_a_late_rank_of_an_earlier_worker_does_not_join() -> None:
    """Its port may be the one that the next worker got: it must not be taken for its rank."""
    meeting, store = open_meeting("127.0.0.1", 2, timeout_s=0.5)
    late = replace(meeting, name="of an earlier worker")
    # As rank 0 does, for which nobody plays the rest.
    PrefixStore(meeting.name, store).set("here/0", "")
    with pytest.raises(CopyFailedError, match="rank 1 could not join"):
        Copies.join(late, 1, torch.device("cpu"))
    assert PrefixStore(meeting.name, store).check(["here/1"]) is False


@pytest.mark.parametrize(
    ("num_ranks", "shard", "num_nodes"),
    [
        (2, Shard.GRADIENTS, 1),
        (4, Shard.GRADIENTS, 1),
        (2, Shard.WEIGHTS, 1),
        pytest.param(4, Shard.WEIGHTS, 2, marks=pytest.mark.more),
    ],
)
def test_a_rank_that_dies_in_the_pass_is_waited_for_by_none(
    base: FolderBase, num_ranks: int, shard: Shard, num_nodes: int
) -> None:
    """With four ranks, the two others do not wait for one another either."""
    with ranked(alone_of(base).spec, num_ranks, 100, shard, num_nodes=num_nodes) as (
        trainer,
        peers,
    ):
        batch = make_batch(1, num_groups=12)
        loss = make_loss(batch)
        plan = trainer.prepare(batch, loss).plan
        assert len(plan.of_rank(0).micro_batches) > 1

        def kill(done: int, _planned: int, _tokens: int) -> None:
            if done == 1:
                peers[-1].kill()

        with pytest.raises((RuntimeError, OSError, CopyFailedError)):
            trainer.forward_backward(
                trainer.prepare(batch, loss, plan), PassHooks(on_progress=kill)
            )


def test_a_rank_that_hangs_in_a_pass_that_is_cancelled_ends_the_exchange(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that it is gone: its connections stay."""
    monkeypatch.setattr("ratoon.train.ranks.exchange._END_S", 1.0)
    with ranked(alone_of(base).spec, 2, 100, Shard.GRADIENTS) as (two, (peer,)):
        batch = make_batch(1, num_groups=8)
        loss = make_loss(batch)
        assert peer.process.pid is not None
        os.kill(peer.process.pid, signal.SIGSTOP)
        # Rank 0 asks for its answer in the end.
        end = threading.Timer(4.0, peer.process.kill)
        end.start()
        started = time.monotonic()
        with pytest.raises(CopyFailedError, match="have not ended"):
            two.forward_backward(
                two.prepare(batch, loss),
                PassHooks(is_cancelled=lambda: time.monotonic() > started + 1.0),
            )
        end.join()
