"""A version whose files a disk has lost or changed: what readers get in its place."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratoon.engine.worker.tasks import FencedError
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import (
    MANIFEST_NAME,
    open_chunk,
    publish_version,
    version_folder,
    whole_version,
)
from ratoon_proto.types import OperationState, PublishConfig, PublishKind, WeightKind
from tests.engine.conftest import MakeMachine
from tests.engine.harness import PATIENCE_S, Machine, load, save
from tests.engine.refusals import raises
from tests.engine.test_read_after_end import client_of

FILE = "model.json"
EVERY_2 = PublishConfig(kind=PublishKind.EVERY_N, every_n=2)
WITH_DELTAS = PublishConfig(kind=PublishKind.EVERY, every_n=1, deltas=True)


def of_another_policy(folder: Path) -> None:
    """Whole and sealed, but published by a policy q."""

    def write(target: Path) -> dict[str, str]:
        shutil.copyfile(folder / FILE, target / FILE)
        return {}

    other, version = folder.parent.parent / "other", int(folder.name)
    publish_version(other, "q", version, WeightKind.FULL, write, 0.0)
    shutil.copyfile(version_folder(other, version) / MANIFEST_NAME, folder / MANIFEST_NAME)


def of_another_version(folder: Path) -> None:
    (other, *_) = (p for p in folder.parent.iterdir() if p.name.isdigit() and p != folder)
    shutil.copyfile(other / MANIFEST_NAME, folder / MANIFEST_NAME)


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "empty manifest": changed(MANIFEST_NAME, lambda _: b""),
    "garbage in place of the manifest": changed(MANIFEST_NAME, lambda _: bytes(range(256))),
    "short manifest": changed(MANIFEST_NAME, lambda data: data[:-9]),
    "flipped bit of the manifest": changed(MANIFEST_NAME, lambda d: d.replace(b"0", b"1", 1)),
    "manifest of another policy": of_another_policy,
    "manifest of another version": of_another_version,
    "no file": lambda folder: (folder / FILE).unlink(),
    "short file": changed(FILE, lambda data: data[:-1]),
    "long file": changed(FILE, lambda data: data + b" "),
    "no folder": shutil.rmtree,
    "no folder of any version": lambda folder: shutil.rmtree(folder.parent),
}


async def step_to(machine: Machine, seq: int) -> None:
    """Updates up to `seq`, each of which makes the version of its number; all due are published."""
    for one in range(machine.run.sequencer.turn, seq + 1):
        ended = await machine.end(await machine.update(one, one))
        assert ended.state is OperationState.DONE
    await machine.landed()


async def stepped(machine: Machine, num_updates: int) -> Machine:
    """A started policy after so many updates."""
    await machine.start()
    await step_to(machine, num_updates)
    return machine


def damage(machine: Machine, version: int, name: str = "empty manifest") -> None:
    DAMAGES[name](version_folder(machine.paths.weights, version))


def kept(machine: Machine) -> set[str]:
    """Folders of damaged versions that were set aside."""
    return {path.name for path in machine.paths.weights.glob("damaged-*")}


def check_kept(machine: Machine, version: int, name: str) -> None:
    """The files of a damaged version are set aside, where any were left."""
    assert (f"damaged-{version:08d}" in kept(machine)) == ("folder" not in name), name


async def refusal(machine: Machine, version: int | None) -> RatoonError:
    with pytest.raises(RatoonError) as caught:
        await machine.controller.weight_manifest(version)
    return caught.value


@pytest.mark.parametrize("restarts", [False, True])
async def test_the_current_version_is_written_again(
    make_machine: MakeMachine, *, restarts: bool
) -> None:
    """INTERNAL for the newest version, until the next one was made; a start deleted the files."""
    machine = await make_machine().start()
    for version, name in enumerate(DAMAGES, 1):
        await step_to(machine, version)
        whole = await machine.controller.weight_manifest(None)
        damage(machine, version, name)
        if restarts:
            await machine.restart_controller()
        again = await machine.controller.weight_manifest(None)
        assert (again.version, again.files) == (version, whole.files), name
        assert open_chunk(machine.paths.weights, whole.files[0].digest, 0, 100)
        check_kept(machine, version, name)


async def test_the_version_before_is_the_newest_where_the_weights_are_gone(
    make_machine: MakeMachine,
) -> None:
    """The trainer is a step further, and that version is not published."""
    machine = await make_machine(publish=EVERY_2).start()
    names = [name for name in DAMAGES if name != "no folder of any version"]
    for version, name in zip(range(2, 2 * len(names) + 2, 2), names, strict=True):
        await step_to(machine, version + 1)
        assert machine.run.published == (0, version)
        damage(machine, version, name)
        assert (await machine.controller.weight_manifest(None)).version == 0, name
        assert machine.run.published == (0,)
        assert (await refusal(machine, version)).code is ErrorCode.WEIGHTS_NOT_FOUND
        # A poll waits: it came back at once, and was made again at once, with what it had.
        poll = asyncio.create_task(machine.controller.weight_manifest(None, 0, PATIENCE_S))
        await asyncio.sleep(0.02)
        assert not poll.done()
        await step_to(machine, version + 2)
        assert (await poll).version == version + 2
        check_kept(machine, version, name)


async def test_a_damaged_version_without_another_is_a_typed_error(
    make_machine: MakeMachine,
) -> None:
    machine = await stepped(make_machine(publish=EVERY_2, keep_versions=1), 3)
    damage(machine, 2)
    for version in (None, 2):
        error = await refusal(machine, version)
        assert error.code is ErrorCode.WEIGHTS_NOT_FOUND
    assert "version 2 is damaged: its manifest" in error.message
    assert "damaged-00000002" in error.message


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_damaged_version_that_is_not_the_newest_is_a_typed_error(
    make_machine: MakeMachine, *, restarts: bool
) -> None:
    machine = await make_machine().start()
    for version, name in enumerate(DAMAGES, 1):
        await step_to(machine, version + 1)
        assert machine.run.published == (version, version + 1)
        damage(machine, version, name)
        if restarts:
            await machine.restart_controller()
        assert (await refusal(machine, version)).code is ErrorCode.WEIGHTS_NOT_FOUND, name
        assert (await machine.controller.weight_manifest(None)).version == version + 1
        check_kept(machine, version, name)


async def test_the_version_before_is_the_newest_where_it_cannot_be_written_again(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await stepped(make_machine(), 1)
    asked = list[int]()

    async def full(*args: Any) -> WeightManifest:
        asked.append(args[1])
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "disk full")

    monkeypatch.setattr(machine.worker, "publish", full)
    damage(machine, 1)
    assert (await machine.controller.weight_manifest(None)).version == 0
    assert (await machine.controller.weight_manifest(None, 0, 0.05)).version == 0
    assert asked == [1]
    assert (await refusal(machine, 1)).code is ErrorCode.RESOURCE_EXHAUSTED


async def test_a_version_that_is_damaged_again_and_again_is_written_once_more_only(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await stepped(make_machine(), 1)
    publish, asked = machine.worker.publish, list[int]()

    async def damaged(*args: Any) -> WeightManifest:
        asked.append(args[1])
        manifest = await publish(*args)
        damage(machine, args[1])
        return manifest

    monkeypatch.setattr(machine.worker, "publish", damaged)
    damage(machine, 1)
    for _ in range(2):
        assert (await machine.controller.weight_manifest(None)).version == 0
    assert asked == [1]
    assert kept(machine) == {"damaged-00000001"}


async def test_a_controller_that_was_replaced_sets_nothing_aside(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be one that the newer controller is having written."""
    machine = await stepped(make_machine(), 1)

    async def fenced(*_: object) -> None:
        raise FencedError("another controller")

    monkeypatch.setattr(machine.journal, "set_published", fenced)
    damage(machine, 1)
    assert (await refusal(machine, None)).code is ErrorCode.UNAVAILABLE
    assert kept(machine) == set()


async def test_a_failed_policy_has_the_version_before(make_machine: MakeMachine) -> None:
    machine = await stepped(make_machine(), 1)
    damage(machine, 1)
    await machine.controller._turns._give_up("its worker is gone")
    assert (await machine.controller.weight_manifest(None)).version == 0


async def test_a_loaded_checkpoint_is_written_over_a_damaged_version(
    make_machine: MakeMachine,
) -> None:
    """It was refused, as the version was there."""
    machine = await make_machine(keep_versions=4).start()
    await machine.end(await machine.submit(1, save("mine"), 0))
    await machine.end(await machine.update(2, 2))
    damage(machine, 0)
    await machine.end(await machine.submit(3, load("mine"), 0))
    assert (await machine.controller.weight_manifest(None)).version == 0
    assert kept(machine) == {"damaged-00000000"}


async def test_a_version_that_was_pruned_meanwhile_is_not_damaged(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await stepped(make_machine(keep_versions=1), 0)
    thread = asyncio.to_thread

    async def late(call: Callable[..., Any], *args: Any) -> Any:
        if call is whole_version:
            await machine.end(await machine.update(1, 1))
            await machine.landed()
        return await thread(call, *args)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "to_thread", late)
        assert await machine.controller._publisher.manifest(None) is None
    assert machine.run.published == (1,)
    assert (await machine.controller.weight_manifest(None)).version == 1
    assert kept(machine) == set()


async def test_files_of_whole_versions_are_fetched_beside_a_damaged_one(
    make_machine: MakeMachine,
) -> None:
    """By digest, all versions were INTERNAL."""
    machine = await make_machine(publish=WITH_DELTAS).start()
    for version, name in zip(range(1, 2 * len(DAMAGES) + 1, 2), DAMAGES, strict=True):
        await step_to(machine, version + 1)
        files = (await machine.controller.weight_manifest(version)).files
        file = next(file for file in files if file.name == FILE)
        if "any version" not in name:
            damage(machine, version + 1, name)
            data = open_chunk(machine.paths.weights, file.digest, 0, file.size_bytes)
            assert len(data) == file.size_bytes, name
        damage(machine, version, "no file")
        with raises(ErrorCode.WEIGHTS_NOT_FOUND):
            open_chunk(machine.paths.weights, file.digest, 0, file.size_bytes)


async def test_a_file_by_name_of_a_damaged_version_is_not_found_or_written_again(
    make_machine: MakeMachine,
) -> None:
    machine = await make_machine().start()
    client = client_of(machine.controller, machine.root)
    for version, name in enumerate(DAMAGES, 1):
        await step_to(machine, version + 1)
        damage(machine, version + 1, name)
        path, file = await client.weight_file("p", version + 1, FILE)
        assert path.stat().st_size == file.size_bytes, name
        if "any version" not in name:
            damage(machine, version, name)
        with raises(ErrorCode.WEIGHTS_NOT_FOUND):
            await client.weight_file("p", version, FILE)


async def test_a_damaged_delta_is_no_damaged_version(make_machine: MakeMachine) -> None:
    """Whoever cannot fetch it fetches the files."""
    machine = await stepped(make_machine(publish=WITH_DELTAS), 2)
    for path in version_folder(machine.paths.weights, 2).glob("delta-*"):
        path.unlink()
    assert (await machine.controller.weight_manifest(None)).version == 2
    assert kept(machine) == set()
