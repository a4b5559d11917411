"""A version whose delta is there before its files: who is told of it, and what a crash costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratoon.engine.types import Acknowledgement
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.files import digest_file
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import list_versions, version_folder
from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_proto.types import OperationState, PublishConfig, PublishKind, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import FakeTrainer
from tests.engine.harness import PATIENCE_S, Machine
from tests.engine.test_read_after_end import Gate, client_of
from tests.stream.samples import NAME, HeldFiles, safetensors

WITH_DELTAS = PublishConfig(kind=PublishKind.EVERY, every_n=1, deltas=True)


def _contents(version: int) -> dict[str, bytes]:
    words = np.random.default_rng(0).integers(0, 2**16, 4000, np.uint16)
    for number in range(version):
        words[number::50] += 1
    return {NAME: safetensors([("BF16", words.tobytes())]), "config.json": b"{}"}


@pytest.fixture(autouse=True)
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers whose weights are files, compared with those of the version copied before."""
    last: dict[int, int] = {}

    def copy_weights(trainer: FakeTrainer) -> HeldFiles:
        before = last.get(id(trainer))
        last[id(trainer)] = trainer.version
        compared = None if before is None else _contents(before)
        return HeldFiles(tmp_path / "scratch", _contents(trainer.version), compared)

    monkeypatch.setattr(FakeTrainer, "copy_weights", copy_weights)


async def _at_version(make_machine: MakeMachine, version: int, **options: Any) -> Machine:
    machine = make_machine(keep_versions=4, publish=WITH_DELTAS, **options)
    await machine.start()
    for seq in range(1, version + 1):
        await machine.end(await machine.update(seq, seq))
    await machine.landed()
    return machine


async def test_who_has_the_parent_is_told_of_a_version_before_its_files_are_written(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = await _at_version(make_machine, 1)
    controller, root = machine.controller, machine.paths.weights
    gate = Gate(machine, monkeypatch)
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    reads = [
        controller.weight_manifest(version, known, wait_s, "", 1)
        for version, known, wait_s in ((None, None, 0.0), (2, None, 0.0), (None, 1, PATIENCE_S))
    ]
    early = await asyncio.wait_for(asyncio.gather(*reads), PATIENCE_S)
    (manifest,) = {each.version: each for each in early}.values()
    assert manifest.version == 2
    assert (list_versions(root), machine.run.listed) == ((0, 1), (0, 1))
    # The version is held, and its delta is read, without a wait for the files.
    ack = Acknowledgement(receiver_id="r", version=1, holds_version=2, hold_s=9.0)
    assert await asyncio.wait_for(controller.ack_weights(ack), PATIENCE_S) == 1
    (delta,) = manifest.deltas
    client = client_of(controller, root.parent.parent.parent)
    path, file = await client.weight_file("p", 2, delta.file.name)
    assert (digest_file(path), file) == (delta.file.digest, delta.file)
    (made,) = read_delta(path)
    rebuild(made, version_folder(root, 1) / NAME, tmp_path / "made")
    # Everything else is waited for.
    whole = asyncio.ensure_future(client.weight_file("p", 2, NAME))
    chunk = asyncio.ensure_future(client.fetch_chunk("p", made.digest, 0, 100))
    others = [
        asyncio.ensure_future(controller.weight_manifest(2)),
        asyncio.ensure_future(controller.weight_manifest(None, 1, 0.0, "", 0)),
    ]
    await gate.check_waits(whole, chunk, *others)
    assert [await other for other in others] == [manifest] * 2
    assert (await whole)[0].read_bytes() == (tmp_path / "made").read_bytes()
    assert await chunk == (tmp_path / "made").read_bytes()[:100]
    assert machine.run.listed == (0, 1, 2)


async def test_the_next_step_waits_for_the_files_all_the_same(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await _at_version(make_machine, 1)
    gate = Gate(machine, monkeypatch)
    await machine.end(await machine.update(2, 2))
    assert (await machine.controller.weight_manifest(None, 1, 0.0, "", 1)).version == 2
    third = await machine.update(3, 3)
    ended = asyncio.ensure_future(machine.end(third))
    await gate.check_waits(ended)
    assert (await ended).state is OperationState.DONE
    await machine.landed()
    assert machine.run.published == (0, 1, 2, 3)


async def test_an_announced_version_that_dies_with_its_worker_is_written_again(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same files; the worker that wrote none has nothing to compare with, nor does a reader
    get the manifest that was told before."""
    machine = await _at_version(make_machine, 1, recovery=Recovery.REPLAY)
    with monkeypatch.context() as patch:
        gate = Gate(machine, patch)
        await machine.end(await machine.update(2, 2))
        early = await machine.controller.weight_manifest(None, 1, 0.0, "", 1)
        await asyncio.wait_for(gate.begun.wait(), PATIENCE_S)
        await machine.worker.kill()
        gate.opened.set()
    again = await asyncio.wait_for(machine.controller.weight_manifest(2), PATIENCE_S)
    assert again.files == early.files
    assert machine.run.listed[-1] == 2


async def test_a_version_whose_files_cannot_be_written_is_told_no_more(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await _at_version(make_machine, 1)
    opened = asyncio.Event()

    async def fail(*_: Any) -> WeightManifest:
        await opened.wait()
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(machine.worker, "publish", fail)
        await machine.end(await machine.update(2, 2))
        assert (await machine.controller.weight_manifest(None, 1, 0.0, "", 1)).version == 2
        opened.set()
        with pytest.raises(RatoonError, match="the disk is full"):
            await machine.controller.weight_manifest(2, None, 0.0, "", 0)
    assert machine.run.listed == (0, 1)


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), MemoryError()])
async def test_a_version_whose_delta_fails_is_published_with_one_of_its_files(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    machine = await _at_version(make_machine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(HeldFiles, "write_delta", fail)
        await machine.end(await machine.update(2, 2))
        manifest = await machine.controller.weight_manifest(None, 1, 0.0, "", 1)
    assert (manifest.version, machine.run.listed) == (2, (0, 1, 2))
    assert [delta.parent_version for delta in manifest.deltas] == [1]
