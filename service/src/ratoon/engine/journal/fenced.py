"""The journal writes of controllers: each carries a fencing token and is one transaction.

A write with an older token is refused. Every write is durable when its method returns, and
idempotent, so a caller that lost the answer may repeat it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, or_, select
from sqlalchemy.exc import IntegrityError

from ratoon.engine.journal.codec import to_text
from ratoon.engine.journal.connections import timeline_of
from ratoon.engine.journal.integrity import insert_row, lock_row, update_row, update_rows
from ratoon.engine.journal.records import (
    NO_RECOVERY,
    Checkpoint,
    Covered,
    JournalAwayError,
    JournalState,
    OperationEnd,
    OperationRecord,
    RollBack,
    first_uncovered_seq,
    kept_checkpoints,
    lost_records,
    rolled_back,
    surplus,
    unused_name,
)
from ratoon.engine.journal.steps import step_row
from ratoon.engine.journal.tables import (
    CHECKPOINTS,
    NAMED_VERSIONS,
    NUMERICS,
    OPERATIONS,
    POLICIES,
    STEPS,
    insert_checkpoint,
    is_before,
    last_token,
    next_token,
    select_checkpoints,
    select_named,
    select_operations,
    set_last_token,
    set_operation,
    step_columns,
    to_columns,
)
from ratoon.engine.refusals import operation_not_found, policy_not_found
from ratoon.engine.types import CheckpointInfo, NamedVersion
from ratoon.engine.worker.tasks import FencedError, Numerics
from ratoon.model.spec import ModelInfo
from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import OperationKind, PolicyState

ALL_STEPS = 2**62
_FINAL = tuple(state for state in JournalState if state.is_final)


class FencedStore:
    """Shares the database, and its one thread, with `SqlStore`."""

    def __init__(self, engine: Engine, kept_steps: int = ALL_STEPS) -> None:
        """`kept_steps`: the last seqs of a policy whose steps are kept."""
        self._engine = engine
        self._kept_steps = kept_steps

    def acquire(self, policy_id: str, above: int = 0) -> int:
        """A new fencing token, above `above` and all tokens of all policies.

        Tokens whose commits a failover has lost are included.
        """
        with self._engine.begin() as connection:
            policy = lock_row(connection, POLICIES, policy_id)
            if policy is None:
                raise policy_not_found(policy_id)
            own = max(policy["token"], above)
            token = next_token(last_token(connection), own, timeline_of(connection))
            set_last_token(connection, token)
            update_row(connection, POLICIES, policy, {"token": token})
            return token

    def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        """Set the state, unless the policy is being deleted, and `info` (None: leave it)."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            columns: dict[str, Any] = {} if info is None else {"info": to_text(info)}
            if policy["state"] != PolicyState.DELETING:
                columns |= {"state": state, "failure": None}
            update_row(connection, POLICIES, policy, columns)

    def fail(self, token: int, policy_id: str, failure: str) -> None:
        """Mark the policy failed, and why; one being deleted stays so."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            if policy["state"] != PolicyState.DELETING:
                columns = {"state": PolicyState.FAILED, "failure": failure}
                update_row(connection, POLICIES, policy, columns)

    def end_policy(self, token: int, policy_id: str, why: str) -> tuple[str, int]:
        """Mark the policy ended, unless it is being deleted; only callers' checkpoints are left.

        The checkpoint of its last state gets a name, if it has none. Returns why the policy ended,
        with that name, and its position.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            if policy["state"] == PolicyState.DELETING:
                return why, policy["position"] or 0
            known = select_checkpoints(connection, policy_id)
            last = next(iter(kept_checkpoints(known, 1)), None)
            failure = f"{why}; no operation had changed it"
            if last is not None:
                names = {checkpoint.info.name for checkpoint in known}
                name = last.info.name or unused_name(f"ended-v{last.info.version}", names)
                is_last = CHECKPOINTS.c.checkpoint_id == last.info.checkpoint_id
                mine = and_(CHECKPOINTS.c.policy_id == policy_id, is_last)
                update_rows(connection, CHECKPOINTS, mine, {"name": name, "expires_at": None})
                failure = f"{why}; its last state is checkpoint {name}"
            unnamed = (c.info.checkpoint_id for c in known if not c.info.name and c is not last)
            position = _dropped(connection, policy, tuple(unnamed)).position + 1
            _unname(connection, policy_id)
            columns = {
                "state": PolicyState.ENDED,
                "failure": failure,
                "published": "[]",
                "position": position,
            }
            update_row(connection, POLICIES, _fence(connection, policy_id, token), columns)
            return failure, position

    def check_token(self, token: int, policy_id: str) -> None:
        """Raises `FencedError` where the token is not the newest."""
        with self._engine.begin() as connection:
            _fence(connection, policy_id, token)

    def set_published(self, token: int, policy_id: str, published: tuple[int, ...]) -> None:
        """Set the fetchable versions."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            update_row(connection, POLICIES, policy, {"published": json.dumps(published)})

    def accept_loss(
        self,
        token: int,
        policy_id: str,
        checkpoints: Sequence[Checkpoint],
        above: tuple[int, int],
    ) -> None:
        """Go on from what is left, with these checkpoints of it again.

        `above`: the position and the version that were lost.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            for checkpoint in checkpoints:
                insert_checkpoint(connection, policy_id, checkpoint)
            update_row(connection, POLICIES, policy, _above(policy, *above))

    def adopt(
        self,
        token: int,
        policy_id: str,
        checkpoint: Checkpoint,
        closed_seq: int,
        above: tuple[int, int],
        now: float,
    ) -> None:
        """Go on from a checkpoint that is ahead of the journal; all up to its seq has ended.

        What the journal does not know the end of, or not at all, is LOST. `closed_seq`: of the
        operation that closed the journal's last window. `above`: the position and the version that
        were lost.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            is_since = OPERATIONS.c.seq > closed_seq
            since = select_operations(connection, policy_id, is_since)
            seqs = {record.seq: record for record in since}
            for record in lost_records(policy_id, seqs, checkpoint, closed_seq, now):
                columns = to_columns(record)
                if record.seq in seqs:
                    set_operation(connection, columns.pop("operation_id"), **columns)
                else:
                    insert_row(connection, OPERATIONS, columns)
            info = replace(checkpoint.info, replay_from_seq=checkpoint.info.seq + 1)
            insert_checkpoint(connection, policy_id, replace(checkpoint, info=info))
            next_seq = max(policy["next_seq"], info.seq + 1)
            while next_seq in seqs:
                next_seq += 1
            columns = {"version": info.version, "next_seq": next_seq}
            update_row(connection, POLICIES, policy, columns | _above(policy, *above))

    def accept(self, token: int, record: OperationRecord, next_seq: int) -> int:
        """Add a record; returns the policy's position.

        Raises `IntegrityError` where its key names another operation.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, record.policy_id, token)
            position = policy["position"] or 0
            if lock_row(connection, OPERATIONS, record.operation_id) is not None:
                return position
            insert_row(connection, OPERATIONS, to_columns(record))
            columns = {"next_seq": next_seq, "position": position + 1}
            update_row(connection, POLICIES, policy, columns)
            return position + 1

    def end(self, token: int, policy_id: str, end: OperationEnd) -> int:
        """Record how an operation ended, with the policy's version, checkpoint and window.

        Only an applied operation sets the version. Returns the policy's position.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            position = policy["position"] or 0
            operation = _lock_operation(connection, end.operation_id)
            if operation["state"] in _FINAL:
                return position
            is_applied = end.state is JournalState.APPLIED
            columns = {
                "state": end.state,
                "choices": None if end.choices is None else to_text(end.choices),
                "result": to_text(end.result),
                "version": end.version if is_applied else None,
                "weights_digest": end.weights_digest,
                "numerics": None if end.numerics is None else end.numerics.digest,
                "started_at": end.started_at,
                "finished_at": end.finished_at,
            }
            update_row(connection, OPERATIONS, operation, columns)
            # A queued operation is cancelled beside one that runs: it may know the version before.
            version = end.version if is_applied else policy["version"]
            columns = {
                "version": version,
                "max_version": max(policy["max_version"], version),
                "position": position + 1,
            }
            update_row(connection, POLICIES, policy, columns)
            if is_applied:
                self._add_step(connection, operation, end)
            if end.numerics is not None:
                _know_numerics(connection, end.numerics)
            if end.checkpoint is not None:
                named = CHECKPOINTS.c.name == end.checkpoint.info.name
                _release(connection, policy_id, named)
                insert_checkpoint(connection, policy_id, end.checkpoint)
                doomed = surplus(select_checkpoints(connection, policy_id), end.keep_last)
                ids = [checkpoint.info.checkpoint_id for checkpoint in doomed]
                _release(connection, policy_id, CHECKPOINTS.c.checkpoint_id.in_(ids))
            if end.named is not None:
                _unname(connection, policy_id, NAMED_VERSIONS.c.name == end.named.name)
                values = {"policy_id": policy_id, **asdict(end.named)}
                insert_row(connection, NAMED_VERSIONS, values)
            if end.frees_window:
                _free(connection, policy_id, (operation["seq"] or 0) + 1)
            return position + 1

    def _add_step(
        self, connection: Connection, operation: Mapping[str, Any], end: OperationEnd
    ) -> None:
        """Add the operation's step, if it is one, and drop those that are too old."""
        seq, policy_id = operation["seq"], operation["policy_id"]
        kind = OperationKind(operation["kind"])
        step = step_row(kind, seq, end.result, end.version, end.finished_at)
        if step is None:
            return
        insert_row(connection, STEPS, step_columns(policy_id, step))
        if seq > self._kept_steps:
            is_old = and_(STEPS.c.policy_id == policy_id, STEPS.c.seq <= seq - self._kept_steps)
            connection.execute(delete(STEPS).where(is_old))

    def cover(self, token: int, policy_id: str, automatic: Checkpoint | None, keep: int) -> Covered:
        """Add an automatic checkpoint, and free what the newest `keep` of all make superfluous."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            known = select_checkpoints(connection, policy_id)
            names = {checkpoint.info.checkpoint_id for checkpoint in known}
            if automatic is not None and automatic.info.checkpoint_id not in names:
                insert_checkpoint(connection, policy_id, automatic)
                known = select_checkpoints(connection, policy_id)
            kept = kept_checkpoints(known, keep)
            doomed = tuple(
                checkpoint.info.checkpoint_id
                for checkpoint in known
                if checkpoint.is_automatic and checkpoint not in kept
            )
            freed = _free(connection, policy_id, first_uncovered_seq(known, keep))
            bodies = tuple((r.operation_id, digest) for r in freed for digest in r.bodies)
            return _dropped(connection, policy, doomed, bodies)

    def release(self, token: int, policy_id: str, name: str) -> tuple[CheckpointInfo | None, int]:
        """Take a checkpoint's name away. Returns what it was, None: there is none, and the policy's
        position."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            known = select_checkpoints(connection, policy_id)
            found = next((c.info for c in known if name and c.info.name == name), None)
            position = (policy["position"] or 0) + (found is not None)
            if found is not None:
                _release(connection, policy_id, CHECKPOINTS.c.name == name)
                update_row(connection, POLICIES, policy, {"position": position})
            return found, position

    def unname(self, token: int, policy_id: str, name: str) -> tuple[NamedVersion | None, int]:
        """Take a version's name away. Returns what `release` returns."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            known = select_named(connection, policy_id)
            found = next((named for named in known if named.name == name), None)
            position = (policy["position"] or 0) + (found is not None)
            if found is not None:
                _unname(connection, policy_id, NAMED_VERSIONS.c.name == name)
                update_row(connection, POLICIES, policy, {"position": position})
            return found, position

    def set_expiry(
        self, token: int, policy_id: str, name: str, expires_at: float | None, *, of_version: bool
    ) -> tuple[CheckpointInfo | NamedVersion | None, int]:
        """Have a checkpoint, or a version's name, expire at another time; None: never. Returns
        what it is then, and otherwise as `release`."""
        table = NAMED_VERSIONS if of_version else CHECKPOINTS
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            mine = and_(table.c.policy_id == policy_id, table.c.name == name)
            update_rows(connection, table, mine, {"expires_at": expires_at})
            if of_version:
                known = select_named(connection, policy_id)
            else:
                known = tuple(c.info for c in select_checkpoints(connection, policy_id))
            found = next((each for each in known if name and each.name == name), None)
            position = (policy["position"] or 0) + (found is not None)
            if found is not None:
                update_row(connection, POLICIES, policy, {"position": position})
            return found, position

    def collect(self, token: int, policy_id: str, keep: int, now: float) -> Covered:
        """Drop checkpoints that have no name, or that expired before `now`, and are not needed.

        Recovery may begin at the newest `keep`, and replays every LoadCheckpoint whose command is
        kept. Names of versions that have expired go too.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            _release(connection, policy_id, CHECKPOINTS.c.expires_at <= now)
            has_expired = _unname(connection, policy_id, NAMED_VERSIONS.c.expires_at <= now)
            known = select_checkpoints(connection, policy_id)
            is_load = OPERATIONS.c.kind == OperationKind.LOAD_CHECKPOINT
            loads = select_operations(
                connection, policy_id, is_load, OPERATIONS.c.command.is_not(None)
            )
            named = {load.choices.checkpoint for load in loads if load.choices is not None}
            needed = {info.checkpoint_id for info in named if info is not None}
            needed |= {c.info.checkpoint_id for c in kept_checkpoints(known, keep)}
            ids = tuple(c.info.checkpoint_id for c in known if not c.info.name)
            doomed = tuple(checkpoint_id for checkpoint_id in ids if checkpoint_id not in needed)
            return _dropped(connection, policy, doomed, drops_versions=has_expired)

    def rebase(
        self, token: int, policy_id: str, digests: Mapping[int, str], numerics: Numerics
    ) -> None:
        """Replace weights digests by seq, after a replay under other numerics."""
        with self._engine.begin() as connection:
            _fence(connection, policy_id, token)
            _know_numerics(connection, numerics)
            for seq, digest in digests.items():
                condition = and_(OPERATIONS.c.policy_id == policy_id, OPERATIONS.c.seq == seq)
                columns = {"weights_digest": digest, "numerics": numerics.digest}
                update_rows(connection, OPERATIONS, condition, columns)

    def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        """Fail open operations and those applied past the checkpoint; returns what changed.

        Later checkpoints have what was rolled back: callers may load them, no recovery begins at
        one.
        """
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            is_sequenced = OPERATIONS.c.seq.is_not(None)
            is_concerned = or_(
                OPERATIONS.c.state.not_in(_FINAL),
                and_(
                    OPERATIONS.c.seq >= roll_back.replay_from_seq,
                    OPERATIONS.c.state == JournalState.APPLIED,
                ),
            )
            records = select_operations(connection, policy_id, is_sequenced, is_concerned)
            changed = tuple(
                changed
                for changed in (rolled_back(record, roll_back) for record in records)
                if changed is not None
            )
            for record in changed:
                columns = to_columns(record)
                set_operation(connection, columns.pop("operation_id"), **columns)
            is_undone = and_(STEPS.c.policy_id == policy_id, STEPS.c.seq > roll_back.seq)
            columns = {
                "version": roll_back.version,
                "figures": None,
                "warnings": WarningKind.ROLLED_BACK.value,
                "skip_reason": None,
            }
            update_rows(connection, STEPS, is_undone, columns)
            is_past = and_(CHECKPOINTS.c.policy_id == policy_id, CHECKPOINTS.c.seq > roll_back.seq)
            update_rows(connection, CHECKPOINTS, is_past, {"replay_from_seq": NO_RECOVERY})
            columns = {
                "version": roll_back.version,
                "max_version": max(policy["max_version"], roll_back.version),
                "position": (policy["position"] or 0) + 1,
            }
            update_row(connection, POLICIES, policy, columns)
            return changed


def _release(connection: Connection, policy_id: str, condition: ColumnElement[bool]) -> None:
    """Make checkpoints of callers the service's own."""
    mine = and_(CHECKPOINTS.c.policy_id == policy_id, CHECKPOINTS.c.name.is_not(None), condition)
    columns = {"name": None, "pinned": None, "expires_at": None}
    update_rows(connection, CHECKPOINTS, mine, columns)


def _unname(connection: Connection, policy_id: str, *conditions: ColumnElement[bool]) -> bool:
    """Take names of versions away; returns whether there was one. Else it writes nothing."""
    those = and_(NAMED_VERSIONS.c.policy_id == policy_id, *conditions)
    if connection.execute(select(NAMED_VERSIONS.c.name).where(those).limit(1)).first() is None:
        return False
    connection.execute(delete(NAMED_VERSIONS).where(those))
    return True


def _dropped(
    connection: Connection,
    policy: Mapping[str, Any],
    doomed: tuple[str, ...],
    bodies: tuple[tuple[str, str], ...] = (),
    *,
    drops_versions: bool = False,
) -> Covered:
    """Delete the rows of `doomed`, and count the write where files will be deleted by it."""
    position = policy["position"] or 0
    if bodies or doomed or drops_versions:
        mine = CHECKPOINTS.c.policy_id == policy["policy_id"]
        connection.execute(delete(CHECKPOINTS).where(mine, CHECKPOINTS.c.checkpoint_id.in_(doomed)))
        position += 1
        update_row(connection, POLICIES, policy, {"position": position})
    return Covered(bodies=bodies, checkpoint_ids=doomed, position=position)


def _above(policy: Mapping[str, Any], position: int, version: int) -> dict[str, int]:
    return {
        "max_version": max(policy["max_version"], version),
        "position": max(policy["position"] or 0, position) + 1,
    }


def _fence(connection: Connection, policy_id: str, token: int) -> dict[str, Any]:
    """The policy's row, locked.

    Raises `FencedError` for an older token, or where the policy is gone. Raises `JournalAwayError`
    where the database has failed over since the token was given: commits may be lost, so the
    controller must read the journal again.
    """
    if is_before(token, timeline_of(connection)):
        raise JournalAwayError("the database has failed over: what it has is to be read again")
    policy = lock_row(connection, POLICIES, policy_id)
    if policy is None or policy["token"] != token:
        raise FencedError(f"token {token} of {policy_id} is not the newest")
    return policy


def _lock_operation(connection: Connection, operation_id: str) -> dict[str, Any]:
    operation = lock_row(connection, OPERATIONS, operation_id)
    if operation is None:
        raise operation_not_found(operation_id)
    return operation


def _free(connection: Connection, policy_id: str, before_seq: int) -> tuple[OperationRecord, ...]:
    """Drop commands and choices that no recovery needs: idempotency needs only the hash."""
    condition = and_(
        OPERATIONS.c.policy_id == policy_id,
        OPERATIONS.c.seq < before_seq,
        OPERATIONS.c.command.is_not(None),
        OPERATIONS.c.state.in_(_FINAL),
    )
    freed = select_operations(connection, policy_id, condition)
    update_rows(connection, OPERATIONS, condition, {"command": None, "choices": None})
    return freed


def _know_numerics(connection: Connection, numerics: Numerics) -> None:
    """Store the fields once. Another policy's write may come first, despite the policy's lock."""
    query = select(NUMERICS.c.numerics).where(NUMERICS.c.numerics == numerics.digest)
    if connection.execute(query).first() is not None:
        return
    with contextlib.suppress(IntegrityError), connection.begin_nested():
        insert_row(connection, NUMERICS, {"numerics": numerics.digest, "fields": numerics.text})
