"""Reads of an open window's gradient sums: between turns, of named tensors, as a result file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections import namedtuple
from typing import Any

import pytest

from ratoon.engine.files.paths import read_result
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import GradientManifest, OperationState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import DISCARD, Machine, started


async def filled(machine: Machine, *numbers: float) -> None:
    """A window of these ForwardBackwards, from seq 1 on."""
    for seq, number in enumerate(numbers, 1):
        await machine.end(await machine.forward_backward(seq, number))


async def read(machine: Machine, *names: str) -> GradientManifest:
    return await machine.controller.read_gradients(names)


def content(machine: Machine, manifest: GradientManifest) -> dict[str, list[float]]:
    data = read_result(machine.paths, manifest.file.digest, 0, manifest.file.size_bytes + 1)
    assert data is not None
    assert len(data) == manifest.file.size_bytes
    return json.loads(data)


async def refused(machine: Machine, *names: str) -> RatoonError:
    with pytest.raises(RatoonError) as caught:
        await read(machine, *names)
    assert list(machine.paths.results.iterdir()) == []
    return caught.value


async def test_the_sums_of_an_open_window_are_a_file(machine: Machine) -> None:
    await filled(machine, 1, 2)
    manifest = await read(machine, "w", "b")
    assert content(machine, manifest) == {"w": [1.0, 2.0], "b": [1.0, 2.0]}
    assert (manifest.policy_id, manifest.version, manifest.seqs) == ("p", 0, (1, 2))
    assert (manifest.trained_tokens, manifest.num_sequences, manifest.num_groups) == (4, 2, 1)
    # Nothing has changed by it, and the same again is the same file.
    assert (await read(machine, "w", "b")).file == manifest.file
    assert (await machine.end(await machine.step(3))).state is OperationState.DONE
    assert machine.weights == [([1.0, 2.0], 0.5)]


async def test_a_read_waits_for_the_running_operation(machine: Machine) -> None:
    hold = machine.faults.holds[7] = threading.Event()
    await started(machine, await machine.forward_backward(1, 7))
    reads = [asyncio.create_task(read(machine, "w")) for _ in range(3)]
    reads[0].cancel()
    await asyncio.sleep(0.02)
    assert not any(one.done() for one in reads[1:])
    hold.set()
    manifest = await reads[1]
    assert manifest is await reads[2]
    assert content(machine, manifest) == {"w": [7.0]}


async def test_without_a_window_there_is_nothing_to_read(machine: Machine) -> None:
    assert (await refused(machine, "w")).code is ErrorCode.WINDOW_EMPTY
    await filled(machine, 1)
    await machine.end(await machine.submit(2, DISCARD, 0))
    assert (await refused(machine, "w")).code is ErrorCode.WINDOW_EMPTY
    await machine.end(await machine.update(3, 3))
    assert (await refused(machine, "w")).code is ErrorCode.WINDOW_EMPTY


async def test_a_poisoned_window_is_not_read(machine: Machine) -> None:
    machine.faults.breaks.add(2)
    await filled(machine, 1, 2)
    error = await refused(machine, "w")
    assert (error.code, error.details["failed_seq"]) == (ErrorCode.WINDOW_POISONED, "2")


async def test_a_name_that_does_not_exist_is_named(machine: Machine) -> None:
    await filled(machine, 1)
    error = await refused(machine, "nothing")
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "names[0]")
    assert "nothing" in error.message
    assert content(machine, await read(machine, "w")) == {"w": [1.0]}


async def test_more_than_the_cap_is_refused_with_the_numbers(make_machine: MakeMachine) -> None:
    machine = await make_machine(limits={"max_gradient_bytes": 1999}).start()
    await filled(machine, 1)
    error = await refused(machine, "w", "b")
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "names")
    assert "2000 bytes of gradients, expected at most 1999" in error.message
    assert content(machine, await read(machine, "b")) == {"b": [1.0]}


async def test_the_reserve_of_the_disk_is_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(machine, 1)
    usage: Any = namedtuple("usage", "free")
    reserve = machine.limits.min_free_disk_bytes
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(free=reserve + 1999))
        error = await refused(machine, "w", "b")
        assert (error.code, error.details["resource"]) == (ErrorCode.RESOURCE_EXHAUSTED, "disk")
        await read(machine, "w")


async def test_a_full_disk_leaves_nothing_behind(machine: Machine) -> None:
    await filled(machine, 1)
    machine.faults.full_disk = True
    error = await refused(machine, "w")
    assert (error.code, error.details["resource"]) == (ErrorCode.RESOURCE_EXHAUSTED, "disk")
    machine.faults.full_disk = False
    assert (await read(machine, "w")).seqs == (1,)


async def test_a_lost_worker_fails_the_read_and_not_the_window(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    await filled(machine, 1, 2)
    await machine.worker.kill()
    assert (await refused(machine, "w")).code is ErrorCode.WORKER_LOST
    assert content(machine, await read(machine, "w")) == {"w": [1.0, 2.0]}


async def test_files_of_gradients_expire(make_machine: MakeMachine) -> None:
    machine = await make_machine(limits={"result_ttl_s": 100.0}).start()
    await filled(machine, 1)
    path = machine.paths.results / (await read(machine, "w")).file.digest
    await machine.controller.sweep()
    assert path.exists()
    long_ago = path.stat().st_mtime - 101.0
    os.utime(path, (long_ago, long_ago))
    await machine.controller.sweep()
    assert list(machine.paths.results.iterdir()) == []


async def test_a_drained_service_reads_nothing(machine: Machine) -> None:
    hold = machine.faults.holds[7] = threading.Event()
    await started(machine, await machine.forward_backward(1, 7))
    waiting = asyncio.create_task(read(machine, "w"))
    draining = asyncio.create_task(machine.controller.drain(30.0))
    await asyncio.sleep(0.02)
    hold.set()
    await draining
    with pytest.raises(RatoonError):
        await waiting
    assert (await refused(machine, "w")).code is ErrorCode.UNAVAILABLE
