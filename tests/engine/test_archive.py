"""Bodies and checkpoints in a second place: acknowledged only with a copy, restored from it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ratoon.engine.commands import LoadCheckpointCommand, SentBody
from ratoon.engine.files.archive import ArchivedBodyFiles, BlobArchive, open_archive
from ratoon.engine.files.paths import make_policy_folders, policy_paths
from ratoon.engine.policy import turns
from ratoon.errors import ErrorCode
from ratoon.stream.files import temporary_name
from ratoon.stream.object_store import FOLDER_MANIFEST
from ratoon_proto.types import OperationState, Teacher
from tests.engine.archived_machine import ArchivedMachine, Store
from tests.engine.fake_trainer import number_body as body_of
from tests.engine.harness import (
    DISCARD,
    RATE,
    code_of,
    digest_of,
    forward_backward,
    load,
    optim_step,
    save,
    taught,
)
from tests.engine.refusals import raises
from tests.stream.s3 import running_s3
from tests.until import until

POLICY = "p"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
async def machine(tmp_path: Path, store: Store) -> ArchivedMachine:
    url = f"sqlite:///{tmp_path / 'journal.sqlite'}"
    machine = ArchivedMachine(tmp_path / "disk", store, url)
    await machine.start()
    return machine


async def settled(machine: ArchivedMachine) -> None:
    """No checkpoint is on its way."""
    await asyncio.sleep(0)
    landing = machine.controller._turns._checkpointer._landing
    if landing is not None:
        await landing


async def test_a_lost_disk_is_filled_from_the_archive(machine: ArchivedMachine, store: Store):
    for seq in range(1, 6):
        await machine.end(await machine.update(seq, float(seq)))
    await settled(machine)
    before = list(machine.weights)
    assert store.folder_names(f"policies/{machine.spec.policy_id}/checkpoints")
    await machine.lose_disk()
    assert list(machine.weights) == before
    ended = await machine.end(await machine.update(6, 6.0))
    assert ended.state is OperationState.DONE


async def test_what_a_teacher_said_is_filled_from_the_archive(
    machine: ArchivedMachine, store: Store
):
    """A window of two answers, and no checkpoint that covers it.

    The policy says the same of both batches, so they share a file.
    """
    for seq in (1, 2):
        command = forward_backward(seq, loss=taught(Teacher("p")))
        await machine.end(await machine.submit(seq, command, seq))
    assert len(store.names("policies/p/bodies")) == len(machine.bodies) == 3
    await machine.lose_disk()
    ended = await machine.end(await machine.submit(3, optim_step(), 0))
    assert ended.state is OperationState.DONE, ended
    # Both are asked at version 0: six log-probs of -1 each.
    assert machine.weights == [([1.0 + 6, 2.0 + 6], RATE)]
    for seq in range(4, 4 + 2 * 3 * machine.checkpoints.keep):
        await machine.end(await machine.update(seq, float(seq)))
        await settled(machine)
    await until(lambda: len(store.names("policies/p/bodies")) == len(machine.bodies))
    needed = {digest for _, digest in machine.journal.store.bodies_in_use("p")}
    await until(lambda: machine.bodies == needed)


async def test_a_callers_checkpoint_is_loaded_from_the_archive(machine: ArchivedMachine):
    await machine.end(await machine.update(1, 1.0))
    await machine.end(await machine.submit(2, save("mine"), 0))
    saved = list(machine.weights)
    await machine.end(await machine.update(3, 3.0))
    shutil.rmtree(machine.paths.checkpoint("mine"))
    command = LoadCheckpointCommand(checkpoint_id="mine")
    ended = await machine.end(await machine.submit(4, command, 0))
    assert ended.state is OperationState.DONE, ended
    assert list(machine.weights) == saved


async def test_without_its_copy_nothing_is_acknowledged(machine: ArchivedMachine, store: Store):
    store.is_away = True
    with raises(ErrorCode.UNAVAILABLE):
        await machine.update(1, 1.0)
    assert machine.bodies == set()
    ended = await machine.end(await machine.submit(1, save("mine"), 0))
    assert ended.state is OperationState.FAILED
    store.is_away = False
    assert (await machine.end(await machine.update(2, 1.0))).state is OperationState.DONE


async def test_a_save_that_failed_at_the_store_leaves_its_name_and_no_folder(
    machine: ArchivedMachine, store: Store
):
    """Red once: the folder stayed, and every later save of the name failed with "File exists"."""
    await machine.end(await machine.update(1, 1.0))
    store.is_away = True
    ended = await machine.end(await machine.submit(2, save("mine"), 0))
    assert code_of(ended) == ErrorCode.UNAVAILABLE
    await machine.end(await machine.submit(3, DISCARD, 0))  # Its turn comes after the folder went.
    assert not machine.paths.checkpoint("mine").exists()
    store.is_away = False
    await machine.end(await machine.update(4, 4.0))
    ended = await machine.end(await machine.submit(5, save("mine"), 0))
    assert ended.state is OperationState.DONE, ended
    await machine.lose_disk()
    ended = await machine.end(await machine.submit(6, load("mine"), 0))
    assert ended.state is OperationState.DONE, ended
    assert machine.weights == [([1.0], RATE), ([4.0], RATE)]


async def test_a_name_that_a_killed_save_left_behind_is_of_the_next_one(
    machine: ArchivedMachine, store: Store
):
    """Here and in the store: the copy of another state would be loaded in its place."""
    paths, state = machine.paths.checkpoint("mine"), "state.json"
    paths.mkdir()
    (paths / state).write_text("another")
    store.put_folder("policies/p/checkpoints/mine", paths)
    ended = await machine.end(await machine.submit(1, save("mine"), 0))
    assert ended.state is OperationState.DONE, ended
    copy = store.path / "policies/p/checkpoints/mine" / state
    assert copy.read_text() == (paths / state).read_text() != "another"


async def test_what_is_needed_no_more_leaves_the_archive(tmp_path: Path, store: Store):
    """At the next start where the store was away when it should have gone."""
    paths = policy_paths(tmp_path / "disk", POLICY)
    make_policy_folders(paths)
    archive = BlobArchive(store, paths)
    bodies = ArchivedBodyFiles(paths, archive)
    for number in (1.0, 2.0):
        await bodies.hold(f"p.{number}", digest_of(number), body_of(number))
        bodies.land(f"p.{number}")
    await bodies.release("p.1.0", digest_of(1.0))
    await until(lambda: store.names("policies/p/bodies") == (digest_of(2.0),))
    store.is_away, num_asked = True, store.num_asked
    await bodies.release("p.2.0", digest_of(2.0))
    await until(lambda: store.num_asked > num_asked)
    await archive.stop()
    store.is_away = False
    again = ArchivedBodyFiles(paths, archive)
    await again.reconcile((), ())
    await archive.stop()
    assert store.names("policies/p/bodies") == (digest_of(2.0),)
    await again.reconcile((), await again.names())
    await until(lambda: store.names("policies/p/bodies") == ())


async def test_a_body_that_went_ahead_has_a_copy_too(tmp_path: Path, store: Store) -> None:
    paths, digest = policy_paths(tmp_path / "disk", POLICY), digest_of(1.0)
    make_policy_folders(paths)
    bodies = ArchivedBodyFiles(paths, BlobArchive(store, paths))
    sent = temporary_name(paths.body(digest))
    sent.write_bytes(body_of(1.0))
    await bodies.hold("p.1", digest, SentBody(name=sent.name, num_bytes=len(body_of(1.0))))
    assert store.get(f"policies/p/bodies/{digest}", digest) == body_of(1.0)
    assert not sent.exists()


async def test_nobody_waits_while_the_store_deletes(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """A store that was away held the turn loop for 30 s with each body; and what is being deleted
    has a copy again before it is acknowledged again."""
    paths = policy_paths(tmp_path / "disk", POLICY)
    make_policy_folders(paths)
    bodies = ArchivedBodyFiles(paths, BlobArchive(store, paths))
    delete, put, answers = store.delete, store.put, threading.Event()
    doomed: list[str] = []

    def hold(holder: str, number: float) -> Coroutine[Any, Any, None]:
        return bodies.hold(holder, digest_of(number), body_of(number))

    def slow_delete(key: str) -> None:
        doomed.append(key)
        answers.wait()
        delete(key)

    def slow_put(key: str, data: bytes) -> None:
        if key.endswith(digest_of(9.0)):
            answers.wait()
        put(key, data)

    monkeypatch.setattr(store, "delete", slow_delete)
    monkeypatch.setattr(store, "put", slow_put)
    for number in (1.0, 2.0, 3.0):
        await hold(f"p.{number}", number)
    arriving = asyncio.create_task(hold("p.9", 9.0))
    try:
        async with asyncio.timeout(20):
            for number in (1.0, 2.0, 3.0):
                await bodies.release(f"p.{number}", digest_of(number))
            await until(lambda: bool(doomed))
            again = asyncio.create_task(hold("p.4", 1.0))
            await hold("p.5", 2.0)
        assert not again.done()
    finally:
        answers.set()
    await asyncio.gather(again, arriving)
    kept = {digest_of(number) for number in (1.0, 2.0, 9.0)}
    await until(lambda: {*store.names("policies/p/bodies")} == kept)
    assert doomed == [f"policies/p/bodies/{digest_of(number)}" for number in (1.0, 3.0)]


async def test_a_store_that_is_away_stops_no_policy(
    machine: ArchivedMachine, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """Every start of a controller asked it what it has: after five attempts all was FAILED."""
    monkeypatch.setattr(turns, "_BACKOFF_S", 0.001)
    monkeypatch.setattr(turns, "_WAITING_S", 0.001)
    await machine.end(await machine.update(1, 1.0))
    store.is_away, machine.worker.is_dead = True, True
    machine.controller._turns.restart()
    ended = await machine.end(await machine.submit(2, DISCARD, 0))
    assert ended.state is OperationState.DONE
    await machine.restart_controller()
    # What recovery lacks here is waited for, for as long as it takes.
    machine.paths.body(digest_of(1.0)).unlink()
    num_asked, machine.worker.is_dead = store.num_asked, True
    machine.controller._turns.restart()
    discarded = await machine.submit(3, DISCARD, 0)
    await until(lambda: store.num_asked > num_asked + 2 * turns._MAX_FAILURES)
    store.is_away = False
    assert (await machine.end(discarded)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE)]


async def test_a_deleted_checkpoint_has_no_copy_and_an_overwritten_one_comes_back(
    machine: ArchivedMachine, store: Store
):
    await machine.end(await machine.update(1, 1.0))
    await machine.end(await machine.submit(2, save("mine"), 0))
    await machine.end(await machine.update(3, 3.0))
    await machine.end(await machine.submit(4, save("mine", overwrite=True), 0))
    await machine.end(await machine.submit(5, save("other"), 0))
    await machine.controller.delete_checkpoint("other")
    await machine.end(await machine.update(6, 6.0))
    await machine.lose_disk()
    await machine.end(await machine.submit(7, load("mine"), 0))
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]
    await machine.updates(8, 9, 10)  # An automatic one each three.
    await machine.updates(11, 12, 13)
    known = machine.journal.store.checkpoints
    await until(lambda: len(known("p")) == 3)
    names = [checkpoint.info.name for checkpoint in known("p")]
    assert names == ["mine", "", ""], "the two that recovery begins at are automatic by now"
    there = {checkpoint.info.checkpoint_id for checkpoint in known("p")}
    await until(lambda: {*store.folder_names("policies/p/checkpoints")} == there)


async def test_a_damaged_copy_of_a_checkpoint_is_not_there(tmp_path: Path, store: Store):
    paths = policy_paths(tmp_path / "disk", POLICY)
    make_policy_folders(paths)
    archive = BlobArchive(store, paths)
    paths.checkpoint("c").mkdir()
    (paths.checkpoint("c") / "weights").write_bytes(b"weights")
    await archive.keep_checkpoint("c")
    await archive.keep_checkpoint("c")
    shutil.rmtree(paths.checkpoint("c"))
    (tmp_path / "store/policies/p/checkpoints/c/weights").write_bytes(b"weightz")
    await archive.restore_checkpoint("c")
    assert not paths.checkpoint("c").exists()
    (tmp_path / "store/policies/p/checkpoints/c" / FOLDER_MANIFEST).unlink()
    await archive.restore_checkpoint("c")
    assert not paths.checkpoint("c").exists()


async def test_the_same_in_an_object_store(tmp_path: Path):
    paths = policy_paths(tmp_path / "disk", POLICY)
    make_policy_folders(paths)
    with running_s3() as server:
        archive = open_archive(server.url(), paths)
        await archive.start()
        await archive.keep_body(digest_of(1.0), body_of(1.0))
        paths.checkpoint("c").mkdir()
        (paths.checkpoint("c") / "weights").write_bytes(b"weights")
        await archive.keep_checkpoint("c")
        shutil.rmtree(paths.root)
        make_policy_folders(paths)
        await archive.restore_bodies([digest_of(1.0)])
        await archive.restore_checkpoint("c")
        assert paths.body(digest_of(1.0)).read_bytes() == body_of(1.0)
        assert (paths.checkpoint("c") / "weights").read_bytes() == b"weights"
        await archive.forget()
        shutil.rmtree(paths.root)
        make_policy_folders(paths)
        await archive.restore_bodies([digest_of(1.0)])
        await archive.restore_checkpoint("c")
        assert not list(paths.bodies.iterdir())
        assert not list(paths.checkpoints.iterdir())


async def test_a_model_that_was_sent_is_restored_with_its_policy(
    store: Store, tmp_path: Path
) -> None:
    paths = policy_paths(tmp_path / "disk", POLICY)
    archive = BlobArchive(store, paths)
    await archive.restore_model()
    assert not paths.model.exists()
    paths.model.mkdir(parents=True)
    (paths.model / "config.json").write_text("{}")
    await archive.keep_model()
    await archive.keep_model()  # A creation that is tried again.
    shutil.rmtree(tmp_path / "disk")
    await archive.restore_model()
    assert (paths.model / "config.json").read_text() == "{}"
    await archive.forget()
    shutil.rmtree(tmp_path / "disk")
    await archive.restore_model()
    assert not paths.model.exists()
