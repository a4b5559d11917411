"""Bounds over policies and of API keys, counted in file names that all controllers see."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon.config import KeyLimits
from ratoon.engine.claims import Claim, Claims
from ratoon.engine.files import make_policy_folders, policy_paths
from ratoon.engine.quotas import QuotaFiles
from ratoon.engine.types import NOBODY, Holder, OperationState, SeqKey, Submission
from ratoon.errors import ErrorCode, RatoonError
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import number_body
from tests.engine.harness import POLICY, Machine, update

NOW = 1_000_000_000.0  # 01:46:40 of a day.


def claims_of(root: Path, policy_id: str, max_total_bytes: int = 10**9) -> Claims:
    paths = policy_paths(root, policy_id)
    make_policy_folders(paths)
    return Claims(paths, max_total_bytes=max_total_bytes)


def claim(number: int, holder: Holder = NOBODY, *, tokens: int = 0, size: int = 0) -> Claim:
    return Claim(operation_id=f"p.{number:032x}", holder=holder, num_tokens=tokens, body_bytes=size)


def holder(key_id: str = "k1", **limits: int) -> Holder:
    return Holder(key_id=key_id, limits=KeyLimits.model_validate(limits))


def refused(
    call: Callable[..., None], claim: Claim, now: float, *, is_awaited: bool
) -> dict[str, str]:
    with pytest.raises(RatoonError) as caught:
        call(claim, now, is_awaited=is_awaited)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    return caught.value.details


def test_a_keys_open_operations_are_counted_over_policies(tmp_path: Path) -> None:
    first, second, mine = (
        claims_of(tmp_path, "a"),
        claims_of(tmp_path, "b"),
        holder(max_open_operations=2),
    )
    first.take(claim(1, mine), NOW, is_awaited=False)
    second.take(claim(2, mine), NOW, is_awaited=False)
    for claims in (first, second):
        details = refused(claims.take, claim(3, mine), NOW, is_awaited=False)
        assert details["resource"] == "key_open_operations"
        assert (details["wanted"], details["free"], details["limit"]) == ("1", "0", "2")
    other = holder("k2", max_open_operations=2)
    first.take(claim(4, other), NOW, is_awaited=False)
    first.take(claim(5), NOW, is_awaited=False)
    first.take(claim(6, mine), NOW, is_awaited=True)
    first.drop(claim(6).operation_id)
    second.drop(claim(2).operation_id)
    first.take(claim(3, mine), NOW, is_awaited=False)


def test_bytes_are_bounded_by_key_and_in_all(tmp_path: Path) -> None:
    first, second = claims_of(tmp_path, "a", 5000), claims_of(tmp_path, "b", 5000)
    mine = holder(max_queued_bytes=2000)
    first.take(claim(1, mine, size=1500), NOW, is_awaited=False)
    details = refused(second.take, claim(2, mine, size=501), NOW, is_awaited=False)
    assert (details["resource"], details["free"]) == ("key_queued_bytes", "500")
    second.take(claim(3, size=3000), NOW, is_awaited=False)
    assert (first.open_bytes, second.open_bytes) == (1500, 3000)
    details = refused(first.take, claim(4, size=501), NOW, is_awaited=False)
    assert (details["resource"], details["free"]) == ("total_queued_bytes", "500")


async def test_uploads_count_for_their_key(make_machine: MakeMachine) -> None:
    """A key with a quota of bytes filled the policy's own bound with parts that no call names."""
    machine = await make_machine().start()
    body = number_body(1.0)
    mine = holder(max_queued_bytes=2 * len(body) + 1)
    put, claims = machine.controller.put_upload_part, machine.controller._run.claims
    for part_index in (0, 1, 0):
        await put("u", part_index, body, mine)
    for upload_id in ("u", "v"):
        with pytest.raises(RatoonError) as caught:
            await put(upload_id, 2, body, mine)
        assert caught.value.details["resource"] == "key_queued_bytes"
    details = refused(claims.take, claim(1, mine, size=2), NOW, is_awaited=False)
    assert (details["resource"], details["free"]) == ("key_queued_bytes", "1")
    await put("w", 0, body)
    await put("x", 0, body, holder("k2", max_queued_bytes=2 * len(body)))
    # Once a call has named it, its bytes are those of the call.
    await machine.controller.get_upload_parts("u", 2)
    await put("v", 2, body, mine)


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    mine = holder(max_open_operations=2)
    claims = claims_of(tmp_path, "a")
    for number in (1, 2):
        claims.take(claim(number, mine, size=7), NOW, is_awaited=False)
    again = claims_of(tmp_path, "a")
    again.sweep([claim(2).operation_id])
    assert again.open_bytes == 7
    again.take(claim(3, mine), NOW, is_awaited=False)
    again.drop(claim(2).operation_id)
    again.take(claim(4, mine), NOW, is_awaited=False)


def test_a_sweep_minds_nobody_who_drops_claims_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that was replaced, and has not heard of it."""
    claims = claims_of(tmp_path, "a")
    gone = tmp_path / "policies" / "a" / "open" / f"{1:032x}~~0"
    monkeypatch.setattr(Path, "iterdir", lambda _folder: iter([gone]))
    claims.sweep([])


def test_a_quota_is_exact_where_controllers_meet(tmp_path: Path) -> None:
    """Four controllers of as many policies, one key: no token more than its quota."""
    mine, taken = holder(tokens_per_day=100), []

    def take(policy_id: str) -> None:
        claims = claims_of(tmp_path, policy_id)
        for number in range(20):
            try:
                claims.take(claim(number, mine, tokens=3), NOW, is_awaited=False)
            except RatoonError:
                continue
            taken.append(number)

    threads = [threading.Thread(target=take, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 33


def test_a_quota_says_when_there_are_more(tmp_path: Path) -> None:
    claims, mine = claims_of(tmp_path, "a"), holder(tokens_per_minute=10, tokens_per_hour=15)
    claims.take(claim(1, mine, tokens=8), NOW, is_awaited=False)
    details = refused(claims.take, claim(2, mine, tokens=3), NOW, is_awaited=True)
    assert (details["resource"], details["free"]) == ("tokens_per_minute", "2")
    assert details["retry_after_s"] == "20"
    assert list(claims_of(tmp_path, "a")._folder.iterdir()) == [claims._own[claim(1).operation_id]]
    claims.take(claim(2, mine, tokens=3), NOW + 20, is_awaited=False)
    details = refused(claims.take, claim(3, mine, tokens=5), NOW + 20, is_awaited=False)
    assert (details["resource"], details["retry_after_s"]) == ("tokens_per_hour", str(13 * 60))
    claims.undo(claim(2, mine, tokens=3), NOW + 20)
    claims.take(claim(3, mine, tokens=5), NOW + 20, is_awaited=False)


def test_more_than_a_whole_quota_never_passes(tmp_path: Path) -> None:
    with pytest.raises(RatoonError) as caught:
        claims_of(tmp_path, "a").take(
            claim(1, holder(tokens_per_day=10), tokens=11), NOW, is_awaited=False
        )
    assert caught.value.code is ErrorCode.BODY_TOO_LARGE
    assert caught.value.retry_after_s is None


def test_keys_without_a_quota_leave_no_file(tmp_path: Path) -> None:
    claims_of(tmp_path, "a").take(claim(1, holder(), tokens=5), NOW, is_awaited=False)
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
