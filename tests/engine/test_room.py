"""A disk without room: new work is refused and nothing of it is left, the rest goes on."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from ratoon.config import LimitsConfig
from ratoon.engine.files import paths as files
from ratoon.engine.files import uploads
from ratoon.engine.refusals import disk_full, disk_refusal
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState
from tests.engine.conftest import MakeMachine
from tests.engine.harness import Machine, forward, policy_spec
from tests.engine.refusals import raises
from tests.small_disk import MIB, NoMountError, SmallDisk, mounted
from tests.until import until

DISK_BYTES = 6 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        with mounted(tmp_path / "disk", DISK_BYTES) as disk:
            yield disk
    except NoMountError as err:
        pytest.skip(str(err))


@pytest.fixture
async def on_small_disk(small_disk: SmallDisk) -> AsyncIterator[Machine]:
    limits = LimitsConfig(min_free_disk_bytes=0)
    url = f"sqlite:///{small_disk.root / 'journal.sqlite'}"
    machine = await Machine(small_disk.root, policy_spec(), limits, url).start()
    yield machine
    small_disk.clear()
    await machine.controller.close(1.0)


async def test_a_full_disk_refuses_new_work_and_loses_none(
    on_small_disk: Machine, small_disk: SmallDisk
) -> None:
    machine = on_small_disk
    first = await machine.end(await machine.update(1, 1.0))
    waits = await machine.update(4, 4.0)
    await machine.landed()
    small_disk.fill()
    for key, number in ((2, 2.0), (3, 3.0), (2, 2.0)):
        with raises(ErrorCode.RESOURCE_EXHAUSTED) as caught:
            await machine.update(key, number)
        assert caught.value.details["resource"] == "disk"
        assert caught.value.retry_after_s is not None
    with pytest.raises(RatoonError) as caught:
        await machine.controller.put_upload_part("u", 0, b"x" * 4096)
    assert caught.value.details["resource"] == "disk"
    with pytest.raises(RatoonError) as caught:
        await machine.controller.cancel_operation(waits.operation_id)
    assert caught.value.details["resource"] == "disk"
    # What is there is read, and a retry is its first operation.
    assert (await machine.end(first)) == first
    assert (await machine.update(1, 1.0)).operation_id == first.operation_id
    assert (await machine.controller.weight_manifest(None)).version == 1
    assert (await machine.controller.get_operation(waits.operation_id, 0.0)).blocked_by_seq == 2
    assert not list(machine.paths.root.rglob(".tmp-*"))
    small_disk.clear()
    for key in (2, 3):
        await machine.update(key, float(key))
    assert (await machine.end(waits)).state is OperationState.DONE
    assert machine.run.version == 4
    assert machine.bodies == set()
    assert machine.claims.open_bytes("p") == 0


async def test_what_was_accepted_ends_once_a_full_disk_has_room(
    on_small_disk: Machine, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an operation cannot be journaled for longer than five tries take."""
    machine = on_small_disk
    monkeypatch.setattr("ratoon.engine.policy.turns._WAITING_S", 0.02)
    monkeypatch.setattr("ratoon.engine.policy.turns._BACKOFF_S", 0.001)
    refused: list[str] = []
    for name in ("end", "acquire"):
        write = _counted(getattr(machine.journal.fenced, name), name, refused)
        monkeypatch.setattr(machine.journal.fenced, name, write)
    hold = machine.faults.holds[1.0] = threading.Event()
    running = await machine.update(1, 1.0)
    await machine.controller.watch_operation(running, 5.0)
    assert [live.is_started for live in machine.run.ledger.open_operations()] == [True]
    small_disk.fill()
    hold.set()
    still = await machine.controller.get_operation(running.operation_id, 0.5)
    assert not still.state.is_final
    await until(lambda: len(refused) > 6)
    assert refused[0] == "end"
    small_disk.clear()
    assert (await machine.end(still)).state is OperationState.DONE
    assert (await machine.end(await machine.update(2, 2.0))).state is OperationState.DONE
    assert len(machine.worker.trainers) == 1
    assert machine.run.version == 2


def _counted(write: Callable[..., object], name: str, refused: list[str]) -> Callable[..., object]:
    def counted(*arguments: object) -> object:
        try:
            return write(*arguments)
        except RatoonError:
            refused.append(name)
            raise

    return counted


def _enospc(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("point", ["body", "part", "journal"])
async def test_a_write_without_room_is_a_refusal_wherever_it_is(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    machine = await make_machine(limits={"min_free_disk_bytes": 0}).start()
    with monkeypatch.context() as full:
        match point:
            case "body":
                full.setattr(files, "write_atomic", _enospc)
            case "part":
                full.setattr(uploads, "write_atomic", _enospc)
            case _:
                full.setattr(machine.journal.fenced, "accept", _refuse)
        put = machine.controller.put_upload_part
        call = put("u", 0, b"part") if point == "part" else machine.update(1, 1.0)
        with pytest.raises(RatoonError) as caught:
            await call
    assert caught.value.details["resource"] == "disk"
    assert machine.run.ledger.num_open == 0
    assert machine.bodies == set()
    assert machine.claims.open_bytes("p") == 0
    assert (await machine.end(await machine.update(1, 1.0))).state is OperationState.DONE
    await machine.controller.put_upload_part("u", 0, b"part")


def _refuse(*_: object) -> None:
    error = disk_full(OSError(errno.EDQUOT, "quota"))
    assert error is not None
    raise error


async def test_the_reserve_is_for_what_was_accepted(make_machine: MakeMachine) -> None:
    machine = make_machine(limits={"min_free_disk_bytes": 2**60})
    await machine.start()
    with pytest.raises(RatoonError) as caught:
        await machine.update(2, 2.0)
    assert (caught.value.code, caught.value.details["resource"]) == (
        ErrorCode.RESOURCE_EXHAUSTED,
        "disk",
    )
    assert caught.value.details["limit"] == str(2**60)
    with pytest.raises(RatoonError):
        await machine.controller.put_upload_part("u", 0, b"part")
    with pytest.raises(RatoonError):
        await machine.submit(None, forward(1.0), 1.0)
    # All others would wait for it, and free nothing.
    awaited = await machine.update(1, 1.0)
    assert (await machine.end(awaited)).state is OperationState.DONE
    assert (await machine.update(1, 1.0)).operation_id == awaited.operation_id


def test_room_is_counted_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert disk_refusal(tmp_path, 60, 40) is None
    refusal = disk_refusal(tmp_path, 61, 40)
    assert refusal is not None
    wanted = {"resource": "disk", "wanted": "61", "free": "60", "limit": "40"}
    assert refusal.details.items() >= wanted.items()
    assert disk_refusal(tmp_path, 101, 0) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "quota"),
        OperationalError("INSERT", {}, psycopg.errors.DiskFull("no space")),
    ],
)
def test_every_full_disk_is_known(error: Exception) -> None:
    assert disk_full(error) is not None


@pytest.mark.parametrize("make", [lambda: OSError(errno.EIO, "io"), lambda: ValueError("no")])
def test_other_faults_are_none(make: Callable[[], Exception]) -> None:
    assert disk_full(make()) is None
