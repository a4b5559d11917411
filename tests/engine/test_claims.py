"""Bounds over policies and of API keys, counted in memory; tokens in files."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.config import KeyLimits
from ratoon.engine.commands import NOBODY, Holder, SeqKey, Submission
from ratoon.engine.policy.limits import Claims, QuotaFiles
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import number_body
from tests.engine.harness import POLICY, Machine, life_record, update
from tests.engine.refusals import raises

NOW = 1_000_000_000.0  # 01:46:40 of a day.


def claims_of(root: Path, max_total_bytes: int = 10**9) -> Claims:
    return Claims(root, max_total_bytes=max_total_bytes)


def holder(key_id: str = "k1", **limits: int) -> Holder:
    return Holder(key_id=key_id, limits=KeyLimits.model_validate(limits))


async def take(
    claims: Claims,
    number: int,
    holder: Holder = NOBODY,
    *,
    policy_id: str = "a",
    tokens: int = 0,
    size: int = 0,
    now: float = NOW,
    is_awaited: bool = False,
) -> None:
    await claims.take(
        policy_id,
        str(number),
        holder,
        num_tokens=tokens,
        body_bytes=size,
        now=now,
        is_awaited=is_awaited,
    )


async def refused(claims: Claims, number: int, holder: Holder, **more: Any) -> dict[str, str]:
    with raises(ErrorCode.RESOURCE_EXHAUSTED) as caught:
        await take(claims, number, holder, **more)
    return caught.value.details


async def test_a_keys_open_operations_are_counted_over_policies(tmp_path: Path) -> None:
    claims, mine = claims_of(tmp_path), holder(max_open_operations=2)
    await take(claims, 1, mine, policy_id="a")
    await take(claims, 2, mine, policy_id="b")
    for policy_id in ("a", "b"):
        details = await refused(claims, 3, mine, policy_id=policy_id)
        assert details["resource"] == "key_open_operations"
        assert (details["wanted"], details["free"], details["limit"]) == ("1", "0", "2")
    await take(claims, 4, holder("k2", max_open_operations=2))
    await take(claims, 5)
    await take(claims, 6, mine, is_awaited=True)
    claims.drop("6")
    claims.drop("2")
    await take(claims, 3, mine)


async def test_bytes_are_bounded_by_key_and_in_all(tmp_path: Path) -> None:
    claims, mine = claims_of(tmp_path, 5000), holder(max_queued_bytes=2000)
    await take(claims, 1, mine, policy_id="a", size=1500)
    details = await refused(claims, 2, mine, policy_id="b", size=501)
    assert (details["resource"], details["free"]) == ("key_queued_bytes", "500")
    await take(claims, 3, policy_id="b", size=3000)
    assert (claims.open_bytes("a"), claims.open_bytes("b")) == (1500, 3000)
    details = await refused(claims, 4, NOBODY, size=501)
    assert (details["resource"], details["free"]) == ("total_queued_bytes", "500")


async def test_uploads_count_for_their_key(make_machine: MakeMachine) -> None:
    """A key with a quota of bytes filled the policy's own bound with parts that no call names."""
    machine = await make_machine().start()
    body = number_body(1.0)
    mine = holder(max_queued_bytes=2 * len(body) + 1)
    put, claims = machine.controller.put_upload_part, machine.claims
    for part_index in (0, 1, 0):
        await put("u", part_index, body, mine)
    for upload_id in ("u", "v"):
        with pytest.raises(RatoonError) as caught:
            await put(upload_id, 2, body, mine)
        assert caught.value.details["resource"] == "key_queued_bytes"
    details = await refused(claims, 1, mine, size=2)
    assert (details["resource"], details["free"]) == ("key_queued_bytes", "1")
    await put("w", 0, body)
    await put("x", 0, body, holder("k2", max_queued_bytes=2 * len(body)))
    # Once a call has named it, its bytes are those of the call.
    await machine.controller.get_upload_parts("u", 2)
    await put("v", 2, body, mine)


async def test_what_is_open_is_what_the_journal_says(tmp_path: Path) -> None:
    """Restoring replaces only the read policy's claims; those of other policies stay."""
    claims, mine = claims_of(tmp_path), holder(max_open_operations=2)
    await take(claims, 1, mine, size=5)
    await take(claims, 2, mine, policy_id="b", size=6)
    open_record = replace(life_record("a", "3"), key_id="k1", body_bytes=7)
    claims.restore("a", [open_record])
    assert (claims.open_bytes("a"), claims.open_bytes("b")) == (7, 6)
    assert (await refused(claims, 4, mine))["resource"] == "key_open_operations"
    claims.restore("a", [])
    await take(claims, 4, mine)


@settings(deadline=None)
@given(data=st.data())
async def test_the_counts_are_those_of_the_open_operations(data: st.DataObject) -> None:
    """Whatever is taken, undone, dropped (twice, too) or restored, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        claims, model = claims_of(Path(folder)), dict[str, tuple[str, str, int]]()
        for number in range(data.draw(st.integers(1, 25))):
            action = data.draw(st.sampled_from(["take", "take", "undo", "drop", "restore"]))
            policy_id = data.draw(st.sampled_from("ab"))
            key_id = data.draw(st.sampled_from(["", "k1", "k2"]))
            known = data.draw(st.sampled_from([*model, "unknown"]))
            size = data.draw(st.integers(0, 9))
            match action:
                case "take":
                    await take(claims, number, holder(key_id), policy_id=policy_id, size=size)
                    model[str(number)] = (policy_id, key_id, size)
                case "undo":
                    await claims.undo(known, NOBODY, 0, NOW)
                    model.pop(known, None)
                case "drop":
                    claims.drop(known)
                    model.pop(known, None)
                case _:
                    record = replace(life_record(policy_id, str(number)), key_id=key_id)
                    claims.restore(policy_id, [replace(record, body_bytes=size)])
                    model = {name: of for name, of in model.items() if of[0] != policy_id}
                    model[str(number)] = (policy_id, key_id, size)
            for counts, column in ((claims._by_policy, 0), (claims._by_key, 1)):
                held = {
                    name: (each.num_operations, each.num_bytes) for name, each in counts.items()
                }
                names = {of[column] for of in model.values()}
                sizes = {
                    name: [of[2] for of in model.values() if of[column] == name] for name in names
                }
                assert held == {name: (len(each), sum(each)) for name, each in sizes.items()}
            assert claims._total.num_bytes == sum(size for _, _, size in model.values())
            assert claims.open_bytes(policy_id) == sum(
                of[2] for of in model.values() if of[0] == policy_id
            )


async def test_a_quota_is_exact_where_callers_meet(tmp_path: Path) -> None:
    """Four policies, one key: no token more than its quota."""
    claims, mine, taken = claims_of(tmp_path), holder(tokens_per_day=100), []

    async def call(policy_id: str) -> None:
        for number in range(20):
            try:
                await take(claims, number, mine, policy_id=policy_id, tokens=3)
            except RatoonError:
                continue
            taken.append(number)

    await asyncio.gather(*(call(name) for name in "abcd"))
    assert len(taken) == 33


async def test_a_quota_says_when_there_are_more(tmp_path: Path) -> None:
    claims, mine = claims_of(tmp_path), holder(tokens_per_minute=10, tokens_per_hour=15)
    await take(claims, 1, mine, tokens=8, size=1)
    details = await refused(claims, 2, mine, tokens=3, size=1, is_awaited=True)
    assert (details["resource"], details["free"]) == ("tokens_per_minute", "2")
    assert details["retry_after_s"] == "20"
    assert claims.open_bytes("a") == 1
    await take(claims, 2, mine, tokens=3, now=NOW + 20)
    details = await refused(claims, 3, mine, tokens=5, now=NOW + 20)
    assert (details["resource"], details["retry_after_s"]) == ("tokens_per_hour", str(13 * 60))
    await claims.undo("2", mine, 3, NOW + 20)
    await take(claims, 3, mine, tokens=5, now=NOW + 20)


async def test_more_than_a_whole_quota_never_passes(tmp_path: Path) -> None:
    with raises(ErrorCode.BODY_TOO_LARGE) as caught:
        await take(claims_of(tmp_path), 1, holder(tokens_per_day=10), tokens=11)
    assert caught.value.retry_after_s is None


async def test_keys_without_a_quota_leave_no_file(tmp_path: Path) -> None:
    await take(claims_of(tmp_path), 1, holder(), tokens=5)
    assert not (tmp_path / "access").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"minute": 1}'])
def test_a_torn_count_begins_anew(tmp_path: Path, text: str) -> None:
    quotas, limits = QuotaFiles(tmp_path), KeyLimits(tokens_per_day=10)
    quotas.use("k1", limits, 9, NOW)
    (path,) = (tmp_path / "access" / "usage").iterdir()
    path.write_text(text)
    quotas.use("k1", limits, 9, NOW)
    assert json.loads(path.read_text())["day"]["tokens"] == 9


def test_a_count_is_durable_before_its_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut that left a torn file gave a key its tokens of the whole day again."""
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition("-")[0])
        fsync(descriptor)

    quotas, limits = QuotaFiles(tmp_path), KeyLimits(tokens_per_day=10)
    quotas.use("k1", limits, 1, NOW)
    monkeypatch.setattr(os, "fsync", record)
    quotas.use("k1", limits, 1, NOW)
    assert synced == [".tmp", "usage"]


async def _update(machine: Machine, seq: int, mine: Holder, tokens: int = 4) -> None:
    command = update(float(seq))
    submission = Submission(
        policy_id=POLICY, key=SeqKey(seq=seq), command=command, body=number_body(float(seq))
    )
    await machine.controller.submit(replace(submission, holder=mine, num_tokens=tokens))


async def test_a_retry_uses_no_tokens(make_machine: MakeMachine) -> None:
    machine, mine = await make_machine().start(), holder(tokens_per_day=10)
    for _ in range(3):
        await _update(machine, 1, mine)
    await _update(machine, 2, mine)
    with pytest.raises(RatoonError) as caught:
        await _update(machine, 3, mine)
    assert caught.value.details["resource"] == "tokens_per_day"
    await _update(machine, 2, mine)
    await _update(machine, 3, mine, tokens=2)


async def test_a_refused_accept_gives_its_tokens_back(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, mine = await make_machine().start(), holder(tokens_per_day=4)

    def refuse(*_: object) -> None:
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "full")

    with monkeypatch.context() as full:
        full.setattr(machine.journal.fenced, "accept", refuse)
        with pytest.raises(RatoonError, match="full"):
            await _update(machine, 1, mine)
    await _update(machine, 1, mine)


async def test_a_quota_that_cannot_be_written_is_a_refusal(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, mine = await make_machine().start(), holder(tokens_per_day=4)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr("ratoon.engine.policy.limits.write_atomic", full)
        with pytest.raises(RatoonError) as caught:
            await _update(machine, 1, mine)
    assert caught.value.details["resource"] == "disk"
    assert (machine.run.ledger.num_open, machine.claims.open_bytes(POLICY)) == (0, 0)
    await _update(machine, 1, mine)


async def test_an_ended_operation_makes_room(make_machine: MakeMachine) -> None:
    machine, mine = await make_machine().start(), holder(max_open_operations=1)
    await _update(machine, 3, mine)
    with pytest.raises(RatoonError) as caught:
        await _update(machine, 2, mine)
    assert caught.value.details["resource"] == "key_open_operations"
    await machine.restart_controller()
    with pytest.raises(RatoonError):
        await _update(machine, 2, mine)
    await machine.end(await machine.update(1, 1.0))
    (waits,) = machine.run.ledger.open_operations()
    await machine.controller.cancel_operation(waits.operation_id)
    await _update(machine, 4, mine)
    with pytest.raises(RatoonError):
        await _update(machine, 5, mine)


async def test_a_policys_bodies_are_bounded(make_machine: MakeMachine) -> None:
    size = len(number_body(2.0))
    machine = await make_machine(limits={"max_queued_bytes": max(2 * size, 1024)}).start()
    room = max(2 * size, 1024) // size
    for seq in range(2, 2 + room):
        await machine.update(seq, float(seq))
    with pytest.raises(RatoonError) as caught:
        await machine.update(2 + room, float(2 + room))
    assert caught.value.details["resource"] == "queued_bytes"
    assert not machine.paths.body(update(float(2 + room)).body_digest).exists()
    await machine.update(1, 1.0)
    last = await machine.update(1 + room, float(1 + room))
    assert (await machine.end(last)).state is OperationState.DONE
