"""What recovery keeps in either database: covers, digests, numerics, why a policy is failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from ratoon.engine.journal.records import (
    Checkpoint,
    Covered,
    JournalState,
)
from ratoon.engine.types import CheckpointInfo
from ratoon.engine.worker.tasks import Choices, FencedError, Numerics, differences
from ratoon_proto.types import OperationKind, PolicyState
from tests.engine.fake_trainer import INFO
from tests.engine.harness import life_record, policy_spec
from tests.engine.stores import NUMERICS, Stores, journaled
from tests.plans import PLAN


@pytest.fixture
def stores(database_url: str) -> Iterator[Stores]:
    opened = Stores(database_url).with_policy()
    yield opened
    opened.engine.dispose()


def checkpoint(seq: int, *, replay_from_seq: int = 0, name: str = "") -> Checkpoint:
    return journaled(
        CheckpointInfo(
            checkpoint_id=name or f"auto-{seq}",
            version=seq,
            seq=seq,
            replay_from_seq=replay_from_seq or seq + 1,
            created_at=float(seq),
            size_bytes=8,
        )
    )


def applied(stores: Stores, *seqs: int, kind: OperationKind = OperationKind.UPDATE) -> None:
    """As a policy that replays ends them: nothing is freed."""
    for seq in seqs:
        stores.accept(seq, kind)
        choices = Choices(plan=PLAN, old_logprobs=f"file{seq}.op", next_version=seq)
        digest = f"digest{seq}"
        stores.end(seq, seq, choices=choices, weights_digest=digest, frees_window=False)


def cover(stores: Stores, automatic: Checkpoint | None, keep: int) -> Covered:
    return stores.fenced.cover(stores.token, "p", automatic, keep)


def test_a_cover_frees_what_no_recovery_begins_before(stores: Stores) -> None:
    applied(stores, 1, 2)
    applied(stores, 3, 4, kind=OperationKind.FORWARD_BACKWARD)
    covered = cover(stores, checkpoint(4, replay_from_seq=3), keep=1)
    assert covered.bodies == (("p.1", "body1"), ("p.2", "body2"))
    assert covered.checkpoint_ids == ()
    assert [stores.record(seq).command is None for seq in (1, 2, 3)] == [True, True, False]
    freed, kept = stores.record(2), stores.record(3)
    assert (freed.choices, freed.payload_hash, freed.weights_digest) == (None, "hash2", "digest2")
    assert kept.choices is not None
    history = stores.store.history("p")
    assert (history.kept_from_seq, history.checkpoints) == (3, (checkpoint(4, replay_from_seq=3),))
    assert stores.store.bodies_in_use("p") == {("p.3", "body3"), ("p.4", "body4")}
    assert stores.store.results_in_use("p") == {"file3", "file4"}


def position_of(stores: Stores) -> int:
    return stores.store.history("p").policy.position


def test_a_repeated_cover_changes_nothing(stores: Stores) -> None:
    applied(stores, 1, 2)
    cover(stores, checkpoint(1), keep=1)
    position = position_of(stores)
    again = cover(stores, checkpoint(1), keep=1)
    assert again == Covered(bodies=(), checkpoint_ids=(), position=position)
    assert position_of(stores) == position
    assert stores.store.checkpoints("p") == (checkpoint(1),)


def test_the_newest_are_kept_and_so_are_all_of_callers(stores: Stores) -> None:
    applied(stores, 1, 2, 3, 4, 5)
    position = position_of(stores)
    nothing = Covered(bodies=(), checkpoint_ids=(), position=position)
    assert cover(stores, checkpoint(1), keep=2) == nothing
    mine = checkpoint(2, name="mine")
    stores.accept(6, OperationKind.SAVE_CHECKPOINT)
    stores.end(6, 5, result=mine.info, checkpoint=mine, frees_window=False)
    covered = cover(stores, checkpoint(4), keep=2)
    assert covered.checkpoint_ids == ("auto-1",)
    assert covered.bodies == (("p.1", "body1"), ("p.2", "body2"))
    assert covered.position == position + 3 == position_of(stores)
    covered = cover(stores, checkpoint(5), keep=1)
    assert covered.checkpoint_ids == ("auto-4",)
    assert [known.info.checkpoint_id for known in stores.store.checkpoints("p")] == [
        "mine",
        "auto-5",
    ]


def test_what_is_open_is_never_freed(stores: Stores) -> None:
    applied(stores, 1)
    stores.accept(2)
    covered = cover(stores, checkpoint(5), keep=1)
    assert covered.bodies == (("p.1", "body1"),)
    assert stores.record(2).command is not None


def test_an_older_token_covers_and_fails_nothing(stores: Stores) -> None:
    applied(stores, 1)
    old = stores.token
    stores.fenced.acquire("p")
    for write in (
        lambda: stores.fenced.cover(old, "p", checkpoint(1), 1),
        lambda: stores.fenced.rebase(old, "p", {1: "other"}, NUMERICS),
        lambda: stores.fenced.fail(old, "p", "why"),
    ):
        with pytest.raises(FencedError):
            write()
    assert stores.store.checkpoints("p") == ()
    assert stores.record(1).weights_digest == "digest1"


def test_numerics_are_kept_once_and_named_by_their_fields(stores: Stores) -> None:
    applied(stores, 1, 2)
    assert stores.record(1).numerics == NUMERICS.digest
    assert stores.store.numerics(NUMERICS.digest) == NUMERICS.fields
    assert stores.store.numerics("unknown") == {}
    other = Numerics.of({"device": "other", "threads": "1"})
    stores.fenced.rebase(stores.token, "p", {2: "other2"}, other)
    assert (stores.record(1).weights_digest, stores.record(2).weights_digest) == (
        "digest1",
        "other2",
    )
    assert stores.store.numerics(stores.record(2).numerics) == other.fields
    assert differences(NUMERICS.fields, other.fields) == "device: fake -> other"


def test_a_policy_says_why_it_is_failed_until_it_is_ready(stores: Stores) -> None:
    stores.fenced.fail(stores.token, "p", "other weights")
    policy = stores.store.history("p").policy
    assert (policy.state, policy.failure) == (PolicyState.FAILED, "other weights")
    stores.fenced.set_policy(stores.token, "p", PolicyState.READY, INFO)
    policy = stores.store.history("p").policy
    assert (policy.state, policy.failure) == (PolicyState.READY, "")


def test_lives_whose_policy_is_gone_are_found(stores: Stores) -> None:
    ended = life_record("gone", "gone.delete", OperationKind.DELETE_POLICY)
    spec = policy_spec("gone")
    stores.store.insert_policy(spec, life_record("gone", "gone.create"))
    stores.store.mark_deleting("gone", ended)
    assert stores.store.orphaned_lifecycle_operations() == ()
    stores.store.remove_policy("gone", keep_operation_id="gone.delete")
    (found,) = stores.store.orphaned_lifecycle_operations()
    assert (found.operation_id, found.state) == ("gone.delete", JournalState.ACCEPTED)
    assert replace(found, created_at=1.0) == ended


def test_what_is_kept_is_found_without_reading_what_was_freed(tmp_path: Path) -> None:
    """Sweeps and checkpoints took longer with each operation that a policy had ever had."""
    stores = Stores(f"sqlite:///{tmp_path / 'journal.sqlite'}").with_policy()
    asked: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, values: Any, *_: object) -> None:
        if "FROM operations" in statement:
            asked.append((statement, values))

    listen: Callable[..., None] = event.listen
    listen(stores.engine, "before_cursor_execute", note)
    stores.store.results_in_use("p")
    stores.store.bodies_in_use("p")
    stores.fenced.cover(stores.token, "p", None, 2)
    with stores.engine.begin() as connection:
        plans = [
            connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            for statement, values in asked.copy()
        ]
    assert len(plans) == 4
    assert all("USING INDEX operations_kept" in str(plan) for plan in plans), plans
    stores.engine.dispose()
